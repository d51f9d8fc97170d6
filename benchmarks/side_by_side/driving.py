"""Gives requests to an engine when their time comes, and turns its crank until all have finished.

The same loop drives every engine that works in steps: minichunk, vLLM, and Transformers'
continuous batching. A request is due at its arrival time, or, for the late one, when everybody
else has got some tokens. With nothing to do the loop sleeps; it never spins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from benchmarks.side_by_side.workloads import AFTER_TOKENS, Case
from minichunk.core.clock import Clock
from minichunk.core.request import RequestSpec


class Due(NamedTuple):
    """A request whose time has come, named by its place among the requests of its case."""

    request_id: str
    spec: RequestSpec
    arrival: float


class Arrivals:
    """The requests of a case that have not arrived yet."""

    def __init__(self, case: Case) -> None:
        self._timed = [Due(str(i), spec, spec.arrival) for i, spec in enumerate(case.requests)]
        self._others = [due.request_id for due in self._timed]
        self._late = case.late

    @property
    def next_time(self) -> float | None:
        """When the next one comes by the clock; None if nobody does."""
        return self._timed[0].arrival if self._timed else None

    @property
    def pending(self) -> bool:
        return bool(self._timed) or self._late is not None

    def due(self, now: float, num_output_tokens: Callable[[str], int]) -> list[Due]:
        """Who has arrived by now, given how many tokens each earlier request has."""
        arrived = [due for due in self._timed if due.arrival <= now]
        del self._timed[: len(arrived)]
        everybody_was_added = not self._timed and not arrived
        if self._late is None or not everybody_was_added:
            return arrived
        if min(map(num_output_tokens, self._others)) >= AFTER_TOKENS:
            arrived.append(Due(str(len(self._others)), self._late, now))
            self._late = None
        return arrived


class SteppedEngine(Protocol):
    """What the loop needs of an engine."""

    def add(self, due: Due) -> None: ...

    def step(self) -> object: ...

    def has_unfinished(self) -> bool: ...

    def num_output_tokens(self, request_id: str) -> int: ...


def drive(case: Case, engine: SteppedEngine, clock: Clock) -> None:
    """Serve the whole case on an engine whose clock has just been started."""
    arrivals = Arrivals(case)
    while arrivals.pending or engine.has_unfinished():
        for due in arrivals.due(clock.now(), engine.num_output_tokens):
            engine.add(due)
        if engine.has_unfinished():
            engine.step()
        elif arrivals.next_time is not None:
            clock.wait_until(arrivals.next_time)
