"""What is due when: requests that are still to come, and the time limits of those that wait.

The engine asks before each step. Both lists are heaps, so a workload of a million arrivals costs
each step nothing but a look at the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from minichunk.core.request import Request


class Agenda:
    """Arrivals and deadlines, in engine seconds."""

    def __init__(self) -> None:
        self._arrivals: list[tuple[float, int, Request]] = []
        self._deadlines: list[tuple[float, int, str, Request]] = []

    def expect(self, request: Request) -> None:
        """The request arrives at its `arrival_time`."""
        heapq.heappush(self._arrivals, (request.arrival_time, request.index, request))

    def limit(self, request: Request) -> None:
        """The request has arrived: its `queue_timeout` and `timeout` count from its arrival."""
        for kind in ("queue_timeout", "timeout"):
            seconds = getattr(request, kind)
            if seconds is not None:
                entry = (request.arrival_time + seconds, request.index, kind, request)
                heapq.heappush(self._deadlines, entry)

    @property
    def next_arrival(self) -> float | None:
        """When the next request comes; None where nobody is expected."""
        while self._arrivals and self._arrivals[0][2].is_finished:
            heapq.heappop(self._arrivals)  # cancelled before it came
        return self._arrivals[0][0] if self._arrivals else None

    def arrivals(self, now: float) -> Iterator[Request]:
        """Requests whose time has come, each once."""
        while (when := self.next_arrival) is not None and when <= now:
            yield heapq.heappop(self._arrivals)[2]

    def overdue(self, now: float) -> Iterator[tuple[str, Request]]:
        """Unfinished requests whose time is up, with the name of the limit.

        The queue timeout no longer counts once a request was admitted.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, kind, request = heapq.heappop(self._deadlines)
            if not (request.is_finished or (kind == "queue_timeout" and request.was_admitted)):
                yield kind, request
