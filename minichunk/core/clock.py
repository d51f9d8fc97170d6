"""Two clocks, one loop: the wall clock passes by itself, the virtual one jumps when told.

The engine asks its clock before and after each step and waits on it for the next arrival. That is
all that tells a measured run from a simulated one.
"""

from __future__ import annotations

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the engine began."""

    name: str

    def now(self) -> float: ...

    def advance(self, seconds: float | None) -> None:
        """A step took so long, if its executor says so."""

    def wait_until(self, when: float) -> None: ...


class WallClock:
    """Real time. A step's duration is what the clock says it was."""

    name = "wall"

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def advance(self, seconds: float | None) -> None:
        pass  # it has passed already

    def wait_until(self, when: float) -> None:
        while (left := when - self.now()) > 0:
            time.sleep(left)


class VirtualClock:
    """Simulated time: an hour of traffic passes in seconds."""

    name = "simulated"

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float | None) -> None:
        if seconds is not None and not 0.0 <= seconds < math.inf:
            raise ValueError(f"a step took {seconds} seconds: it must be finite and 0 or more")
        self._now += seconds or 0.0

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)
