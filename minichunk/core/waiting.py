"""The queue of waiting requests: one heap per group, and a heap of groups.

Finding the next head costs the logarithm of what is waiting, never its length: with 100,000
requests in the queue a step costs what it costs with ten.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from minichunk.core.orders import Order, ask, place
from minichunk.core.request import UNPLACED, WAITING, Rank, Request

Entry = tuple[Rank, Request]
GroupEntry = tuple[float, Rank, str]


class WaitingQueue:
    """Waiting requests in an order's order. Requests that were cancelled are dropped on the way."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.size = 0
        self._heaps: dict[str, list[Entry]] = {}
        self._groups: list[GroupEntry] = []
        self._entered: dict[str, GroupEntry] = {}  # each group's valid entry in the heap of groups

    def push(self, request: Request) -> None:
        key = ask(self.order, self.order.group_key, request.group)  # first: the order may fail
        heap = self._heaps.setdefault(request.group, [])
        entry: Entry = (request.rank, request)
        heapq.heappush(heap, entry)
        if heap[0] is entry:
            self._enter(request.group, key)
        self.size += 1

    def head(self) -> Request | None:
        """The request that goes next, left in the queue."""
        while self._groups:
            entry = self._groups[0]
            group = entry[2]
            if self._entered.get(group) is not entry:
                heapq.heappop(self._groups)  # a newer entry of this group is in the heap
            elif not self.has_group(group):
                heapq.heappop(self._groups)
                del self._entered[group]
            else:
                rank, request = self._heaps[group][0]
                key = ask(self.order, self.order.group_key, group)
                if entry[1] is rank and entry[0] == key:
                    return request
                # Group keys only rise: an entry that lags is found here before it can mislead.
                heapq.heappop(self._groups)
                self._enter(group, key)
        return None

    def remove(self, request: Request) -> None:
        """Account for a request that leaves; its status must no longer be `waiting`.

        One in the middle keeps its entry until that comes to the top, so leaving costs nothing.
        """
        self.size -= 1
        self.has_group(request.group)

    def has_group(self, group: str) -> bool:
        """Is anybody of this group waiting? Drops entries whose request no longer is."""
        heap = self._heaps.get(group)
        while heap and heap[0][1].status is not WAITING:
            heapq.heappop(heap)
        if heap is not None and not heap:
            del self._heaps[group]
        return bool(heap)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no particular order; for checks and displays."""
        for heap in self._heaps.values():
            yield from (r for _, r in heap if r.status is WAITING)

    def _enter(self, group: str, key: float) -> None:
        """Put the group, with its present head, into the heap of groups."""
        entry = (key, self._heaps[group][0][0], group)
        self._entered[group] = entry
        heapq.heappush(self._groups, entry)


class WaitingLine:
    """The whole queue: prompts above `long_threshold` wait apart, so that they can be held back.

    Holding them lets short prompts pass, the only overtaking there is. Without a threshold this is
    one plain queue.
    """

    def __init__(self, order: Order, long_threshold: int | None) -> None:
        self.order = order
        self.long_threshold = long_threshold
        self.short, self.long = WaitingQueue(order), WaitingQueue(order)

    def add(self, request: Request) -> None:
        """Queue a request, new or preempted. Its place in the order is asked for once."""
        if request.rank is UNPLACED:
            request.group, request.rank = place(self.order, request)
        group = request.group
        if not (self.short.has_group(group) or self.long.has_group(group)):
            head = self.head()
            next_group = None if head is None else head.group
            ask(self.order, self.order.group_joins, group, next_group)
        self._queue_of(request).push(request)
        request.status = WAITING

    def remove(self, request: Request) -> None:
        """The request left the queue; its status says where to."""
        self._queue_of(request).remove(request)

    def head(self, hold_long: bool = False) -> Request | None:
        """The request that goes next; long prompts are passed over while they are held."""
        short = self.short.head()
        long = None if hold_long or not self.long.size else self.long.head()
        if short is None or long is None:
            return short or long
        return min(short, long, key=self.precedence)

    def precedence(self, request: Request) -> tuple[float, Rank]:
        """Sorts requests of all groups: the order's order."""
        return ask(self.order, self.order.group_key, request.group), request.rank

    def is_long(self, request: Request) -> bool:
        return self.long_threshold is not None and request.num_tokens > self.long_threshold

    def __len__(self) -> int:
        return self.short.size + self.long.size

    def __iter__(self) -> Iterator[Request]:
        yield from self.short
        yield from self.long

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self.long if self.is_long(request) else self.short
