"""The queue of waiting requests: one heap per group, and a heap of groups.

Finding the next head costs the logarithm of what is waiting, never its length: with 100,000
requests in the queue a step costs what it costs with ten.
"""

from __future__ import annotations

import heapq

from minichunk.core.orders import Key, Order
from minichunk.core.request import Request, RequestStatus

Entry = tuple[Key, int, Request]
GroupEntry = tuple[float, Key, int, str]


class WaitingQueue:
    """Waiting requests in an order's order. Requests that were cancelled are dropped on the way."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.size = 0
        self._heaps: dict[str, list[Entry]] = {}
        self._groups: list[GroupEntry] = []
        self._entered: dict[str, GroupEntry] = {}  # each group's valid entry in the heap of groups

    def push(self, request: Request) -> None:
        group = self.order.group(request)
        if not self._live(group):
            self.order.group_joins(
                group, [other for other in list(self._heaps) if self._live(other)]
            )
            self._heaps[group] = []
        entry = (self.order.key(request), request.index, request)
        heap = self._heaps[group]
        heapq.heappush(heap, entry)
        if heap[0] is entry:
            self._enter(group)
        self.size += 1

    def head(self) -> Request | None:
        """The request that goes next, left in the queue."""
        while self._groups:
            entry = self._groups[0]
            group = entry[3]
            if self._entered.get(group) is not entry:
                heapq.heappop(self._groups)  # a newer entry of this group is in the heap
            elif not self._live(group):
                heapq.heappop(self._groups)
                del self._entered[group]
            else:
                key, index, request = self._heaps[group][0]
                if entry[:3] == (self.order.group_key(group), key, index):
                    return request
                # Group keys only rise: an entry that lags is found here before it can mislead.
                heapq.heappop(self._groups)
                self._enter(group)
        return None

    def remove(self, request: Request) -> None:
        """Account for a request that leaves; its status must no longer be `waiting`.

        One in the middle keeps its entry until that comes to the top, so leaving costs nothing.
        """
        self.size -= 1
        self._live(self.order.group(request))

    def __len__(self) -> int:
        return self.size

    def _live(self, group: str) -> bool:
        """Drop entries whose request no longer waits; is anybody left in the group?"""
        heap = self._heaps.get(group)
        while heap and not _is_current(heap[0]):
            heapq.heappop(heap)
        if heap is not None and not heap:
            del self._heaps[group]
        return bool(heap)

    def _enter(self, group: str) -> None:
        """Put the group, with its present head, into the heap of groups."""
        key, index, _ = self._heaps[group][0]
        entry = (self.order.group_key(group), key, index, group)
        self._entered[group] = entry
        heapq.heappush(self._groups, entry)


def _is_current(entry: Entry) -> bool:
    return entry[2].status is RequestStatus.WAITING
