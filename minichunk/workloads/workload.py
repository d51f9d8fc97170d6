"""A workload as data: requests in order of arrival, and what follows when one has finished.

The engine only iterates over it and calls `on_finish`; everything is fixed beforehand, so that two
schedulers can be given exactly the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from minichunk.core.request import PromptShape, RequestSpec


@dataclass(frozen=True, repr=False)
class Workload:
    """Requests in order of arrival. `bad_rows` names the rows that a loader could not read."""

    name: str
    requests: tuple[RequestSpec, ...]
    bad_rows: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.requests)

    def __repr__(self) -> str:
        bad = f", {len(self.bad_rows)} bad rows left out" if self.bad_rows else ""
        return f"<{type(self).__name__} {self.name!r}: {len(self.requests)} requests{bad}>"

    def __len__(self) -> int:
        return len(self.requests)

    def on_finish(self, spec: RequestSpec, now: float) -> RequestSpec | None:
        """The request that follows when `spec` has finished; None in an open loop."""
        return None

    def head(self, num_requests: int) -> Workload:
        """The first `num_requests` requests only."""
        return replace(self, requests=self.requests[:num_requests])

    @property
    def rate(self) -> float:
        """Requests per second, on average; 0 where all come at once."""
        span = self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0
        return (len(self.requests) - 1) / span if span > 0 else 0.0

    def scaled(self, speed: float) -> Workload:
        """The same requests arriving `speed` times as fast."""
        if not speed > 0:
            raise ValueError(f"speed={speed} must be above 0")
        requests = tuple(replace(spec, arrival=spec.arrival / speed) for spec in self.requests)
        return replace(self, requests=requests)

    def at_rate(self, rate: float) -> Workload:
        """The same requests arriving at `rate` per second on average."""
        if not self.rate > 0:
            raise ValueError(f"{self.name!r} has no arrival rate: its requests come all at once")
        return self.scaled(rate / self.rate)


@dataclass(frozen=True)
class Turn(RequestSpec):
    """A request of a closed loop: it knows whose it is and which of that user's."""

    user: int = 0
    turn: int = 0


@dataclass(frozen=True, repr=False)
class ClosedLoop(Workload):
    """A fixed number of users, each of whom asks again after reading the answer.

    Holds no state: a finished `Turn` names its successor, so one object serves many runs.
    """

    turns: tuple[tuple[tuple[int, int], ...], ...] = ()  # per user: (prompt, output) lengths
    think_times: tuple[tuple[float, ...], ...] = ()

    def on_finish(self, spec: RequestSpec, now: float) -> RequestSpec | None:
        if not isinstance(spec, Turn) or spec.turn + 1 >= len(self.turns[spec.user]):
            return None
        turn = spec.turn + 1
        prompt, output = self.turns[spec.user][turn]
        return replace(
            spec,
            arrival=now + self.think_times[spec.user][turn],
            prompt=PromptShape(prompt),
            output_tokens=output,
            turn=turn,
        )


def merge(*workloads: Workload, name: str = "merged") -> Workload:
    """Several open-loop workloads as one, in order of arrival."""
    for workload in workloads:
        if isinstance(workload, ClosedLoop):
            raise ValueError(f"{workload.name!r} is a closed loop: it cannot be merged with others")
    requests = [spec for workload in workloads for spec in workload]
    requests.sort(key=lambda spec: spec.arrival)
    bad_rows = tuple(row for workload in workloads for row in workload.bad_rows)
    return Workload(name, tuple(requests), bad_rows)


def describe(workload: Iterable[RequestSpec]) -> str:
    """Counts, arrival rate and length quantiles, in a few lines."""
    specs = list(workload)
    name = getattr(workload, "name", "workload")
    if not specs:
        return f"{name}: no requests"
    span = max(spec.arrival for spec in specs) - min(spec.arrival for spec in specs)
    rate = f"{(len(specs) - 1) / span:.3g} requests/s over {span:.1f} s" if span else "all at once"
    lines = [f"{name}: {len(specs)} requests, {rate}"]
    for label, values in (
        ("prompt", sorted(len(spec.prompt) for spec in specs)),
        ("output", sorted(spec.output_tokens for spec in specs)),
    ):
        p90 = values[min(len(values) - 1, math.ceil(0.9 * len(values)) - 1)]
        lines.append(
            f"  {label} tokens: median {median(values):g}, P90 {p90}, max {values[-1]}, "
            f"total {sum(values):,}"
        )
    bad_rows: Sequence[str] = getattr(workload, "bad_rows", ())
    if bad_rows:
        lines.append(f"  {len(bad_rows)} bad rows left out: {sample_rows(bad_rows)}")
    return "\n".join(lines)


def sample_rows(rows: Sequence[str], count: int = 3) -> str:
    """The first few of many rows, in one line."""
    return "; ".join(rows[:count]) + ("; …" if len(rows) > count else "")
