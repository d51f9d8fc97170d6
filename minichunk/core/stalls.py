"""Stalls and their causes: which gaps between tokens hurt, and what filled them.

A gap = decode floor + interference + waiting. The floor is what a step of the same decodes alone
costs; interference is what the prefill chunks of the token's own step add; waiting is the time in
which the request was in no step. A gap above `stall_factor` floors *and* `stall_slo` seconds is a
stall. A longer mixed step below that is interference: chunking shrinks gaps, it does not make them
vanish, and this says so.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minichunk.core.trace import Trace

STALL_FACTOR = 2.0
STALL_SLO = 0.050


class Cause(NamedTuple):
    """What filled part of a gap, longest first in a `Stall`.

    `chunk`: prompt chunk `chunk_index` of `num_chunks` (from 1) of `request_id` held the step;
    `preemption`: the request was evicted and its tokens recomputed; `blocks`, `slots`, `budget`:
    it waited for those; `decode`: others decoded without it; `idle`: the engine was between steps.
    """

    kind: str
    request_id: str
    step: int
    chunk_index: int
    num_chunks: int
    seconds: float


@dataclass(frozen=True)
class Gap:
    """The time between output tokens `token_index - 1` and `token_index` of a request (seconds).

    `floor` is None where no decode-only step of the trace tells it.
    """

    request_id: str
    token_index: int
    start: float
    end: float
    first_step: int
    last_step: int
    floor: float | None
    interference: float
    waiting: float

    @property
    def gap(self) -> float:
        return self.end - self.start

    @property
    def times_floor(self) -> float | None:
        return self.gap / self.floor if self.floor else None


@dataclass(frozen=True)
class Stall(Gap):
    """A gap that a reader notices, with what filled it."""

    causes: tuple[Cause, ...] = ()

    def describe(self) -> str:
        """One sentence: how long, how bad, and because of whom."""
        times = f" = {self.times_floor:.0f}× a decode step" if self.times_floor else ""
        because = _because(self.causes[0]) if self.causes else "for an unknown reason"
        return f"request {self.request_id}: gap of {self.gap * 1e3:.0f} ms{times}, {because}"


def _because(cause: Cause) -> str:
    if cause.kind == "chunk":
        return (
            f"waiting for chunk {cause.chunk_index}/{cause.num_chunks} "
            f"of request {cause.request_id}"
        )
    words = {
        "preemption": "preempted, its tokens were recomputed",
        "blocks": "waiting for free blocks",
        "slots": "waiting for a slot",
        "budget": "waiting for a share of the budget",
        "decode": "while others decoded",
        "idle": "the engine was between steps",
    }
    return words.get(cause.kind, cause.kind)


def find_stalls(
    trace: Trace, stall_factor: float = STALL_FACTOR, stall_slo: float = STALL_SLO
) -> list[Stall]:
    """Every stall, by time. A gap whose floor is unknown is judged by `stall_slo` alone."""
    index = StepIndex(trace)
    floors = DecodeFloors(trace)
    stalls = []
    for request_id, token_index, start, end in _long_gaps(trace, stall_slo):
        gap = _decompose(trace, index, floors, request_id, token_index, start, end)
        if gap.floor is None or gap.gap > stall_factor * gap.floor:
            stalls.append(Stall(**vars(gap), causes=_causes(trace, index, gap)))
    return sorted(stalls, key=lambda stall: (stall.start, stall.request_id))


def gaps(trace: Trace) -> Iterator[Gap]:
    """Every gap of a trace, decomposed, request by request."""
    index, floors = StepIndex(trace), DecodeFloors(trace)
    for request_id, token_index, start, end in _long_gaps(trace, -1.0):
        yield _decompose(trace, index, floors, request_id, token_index, start, end)


def _long_gaps(trace: Trace, above: float) -> Iterator[tuple[str, int, float, float]]:
    for record in trace.requests.values():
        times = record.token_times
        for i in range(1, len(times)):
            if times[i] - times[i - 1] > above:
                yield record.request_id, i, times[i - 1], times[i]


class DecodeFloors:
    """What a step with only its decodes costs: the model's figure, or the trace's own medians."""

    def __init__(self, trace: Trace) -> None:
        by_batch: dict[int, list[float]] = {}
        for step in trace.steps:
            if step.prefill_tokens == 0 and step.num_decodes > 0:
                by_batch.setdefault(step.num_decodes, []).append(step.duration)
        self._steps = trace.steps
        self._medians = {batch: statistics.median(times) for batch, times in by_batch.items()}

    def of(self, step: int) -> float | None:
        """Seconds, or None where neither a model nor a decode-only step of the trace says."""
        row = self._steps[step]
        if row.decode_floor is not None:
            return row.decode_floor
        if not self._medians:
            return None
        batch = max(1, row.num_decodes)  # a token may come from a recomputing chunk, too
        nearest = min(self._medians, key=lambda known: (abs(known - batch), known))
        return self._medians[nearest]


@dataclass
class _Chunk:
    request_id: str
    index: int
    count: int
    tokens: int


class StepIndex:
    """Steps by time, the prompt chunks in each, and each request's preemptions and refusals."""

    def __init__(self, trace: Trace) -> None:
        self.ends = [step.end for step in trace.steps]
        self.chunks: dict[int, list[_Chunk]] = {}
        of_request: dict[str, list[_Chunk]] = {}
        reached: dict[str, int] = {}
        for span in trace.spans:
            starts_again = span.first_position < reached.get(span.request_id, 0)
            reached[span.request_id] = span.first_position + span.tokens
            if span.kind != "prefill":
                continue
            mine = of_request.setdefault(span.request_id, [])
            if starts_again:  # after a preemption
                _number(mine)
                mine = of_request[span.request_id] = []
            chunk = _Chunk(span.request_id, len(mine) + 1, 0, span.tokens)
            mine.append(chunk)
            self.chunks.setdefault(span.first_step, []).append(chunk)
        for mine in of_request.values():
            _number(mine)
        self.preempted: dict[str, list[int]] = {}
        for event in trace.events:
            if event.kind == "preempt":
                self.preempted.setdefault(event.request_id, []).append(event.step)
        self.skips: dict[str, list[tuple[int, int, str]]] = {}
        for skip in trace.skips:
            if skip.reason != "behind":
                row = (skip.first_step, skip.last_step, skip.reason)
                self.skips.setdefault(skip.request_id, []).append(row)

    def step_at(self, time: float) -> int:
        """The step that ended at this time, where the token came from."""
        position = bisect.bisect_left(self.ends, time)
        return min(position, len(self.ends) - 1)

    def was_preempted(self, request_id: str, first_step: int, last_step: int) -> bool:
        steps = self.preempted.get(request_id, [])
        position = bisect.bisect_left(steps, first_step)
        return position < len(steps) and steps[position] <= last_step

    def reason(self, request_id: str, step: int) -> str | None:
        """Why the request got nothing in this step, if a row of its own says so."""
        rows = self.skips.get(request_id, [])
        position = bisect.bisect_right(rows, (step, float("inf"), "")) - 1
        if position >= 0 and rows[position][0] <= step <= rows[position][1]:
            return rows[position][2]
        return None


def _number(chunks: list[_Chunk]) -> None:
    for chunk in chunks:
        chunk.count = len(chunks)


def _decompose(
    trace: Trace,
    index: StepIndex,
    floors: DecodeFloors,
    request_id: str,
    token_index: int,
    start: float,
    end: float,
) -> Gap:
    first, last = index.step_at(start) + 1, index.step_at(end)
    own = trace.steps[last]
    floor = floors.of(last)
    in_step = min(end - start, own.duration)
    base = 0.0 if floor is None else min(floor, in_step)
    return Gap(
        request_id,
        token_index,
        start,
        end,
        first,
        last,
        floor,
        interference=in_step - base,
        waiting=max(0.0, end - start - in_step),
    )


def _causes(trace: Trace, index: StepIndex, gap: Gap) -> tuple[Cause, ...]:
    """What filled each of the gap's steps, merged by culprit, longest first."""
    found: list[Cause] = []
    previous_end = gap.start
    preempted = index.was_preempted(gap.request_id, gap.first_step, gap.last_step)
    for number in range(gap.first_step, gap.last_step + 1):
        step = trace.steps[number]
        idle = step.start - previous_end
        if idle > 0:
            found.append(Cause("idle", gap.request_id, number, 0, 0, idle))
        seconds, previous_end = step.duration, step.end
        others = [c for c in index.chunks.get(number, []) if c.request_id != gap.request_id]
        is_own = number == gap.last_step
        if is_own:
            seconds -= min(seconds, gap.floor or 0.0)
        if preempted:
            found.append(Cause("preemption", gap.request_id, number, 0, 0, seconds))
        elif others:
            total = sum(chunk.tokens for chunk in others)
            for chunk in others:
                share = seconds * chunk.tokens / total
                found.append(
                    Cause("chunk", chunk.request_id, number, chunk.index, chunk.count, share)
                )
        elif seconds > 0:
            reason = None if is_own else index.reason(gap.request_id, number)
            kind = reason if reason in ("blocks", "slots", "budget") else "decode"
            found.append(Cause(kind, gap.request_id, number, 0, 0, seconds))
    return tuple(sorted(_merged(found), key=lambda cause: -cause.seconds))


def _merged(causes: list[Cause]) -> Iterator[Cause]:
    """Causes of one kind that name no chunk become one; chunks stay apart."""
    total: dict[str, Cause] = {}
    for cause in causes:
        if cause.kind == "chunk":
            yield cause
        elif cause.kind in total:
            known = total[cause.kind]
            total[cause.kind] = known._replace(seconds=known.seconds + cause.seconds)
        else:
            total[cause.kind] = cause
    yield from total.values()
