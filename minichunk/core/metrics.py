"""What users feel, computed from a trace: TTFT, TPOT, ITL, goodput, fairness.

Definitions follow the field. TTFT is the time from arrival to the first *token* (not the first
chunk), ITL the gap between two tokens of a request (also called TBT), TPOT their mean over a
request. Goodput counts only requests that met their targets (DistServe, OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minichunk.core.stalls import STALL_FACTOR, STALL_SLO, find_stalls

if TYPE_CHECKING:
    from minichunk.core.trace import RequestRecord, Trace


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile by linear interpolation between ranks; None where there is no value."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Spread:
    """A distribution in five numbers (seconds). None where nothing was observed."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        data = sorted(values)
        if not data:
            return cls(0, None, None, None, None, None)
        p50, p95, p99 = (percentile(data, percent) for percent in (50, 95, 99))
        return cls(len(data), math.fsum(data) / len(data), p50, p95, p99, data[-1])


@dataclass(frozen=True)
class RequestMetrics:
    """One request. Times in seconds; None where it got no token, or only one."""

    request_id: str
    ttft: float | None
    tpot: float | None
    itl: tuple[float, ...]
    max_itl: float | None
    latency: float | None
    queue_time: float | None
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True, repr=False)
class Metrics:
    """A whole run. `throughput` in output tokens per second of the run's duration."""

    num_requests: int
    num_finished: int
    num_steps: int
    duration: float
    output_tokens: int
    prompt_tokens: int
    throughput: float
    total_throughput: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    queue_time: Spread
    num_stalls: int
    longest_stall: float
    num_preemptions: int
    recomputed_tokens: int
    cached_tokens: int
    requests: dict[str, RequestMetrics]

    def __repr__(self) -> str:
        return (
            f"<Metrics: {self.num_finished} of {self.num_requests} requests finished, "
            f"{self.num_steps} steps, {self.throughput:.4g} tokens/s, {self.num_stalls} stalls>"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def request_metrics(trace: Trace) -> dict[str, RequestMetrics]:
    """Per-request figures, in order of arrival."""
    first_run: dict[str, float] = {}
    preemptions: dict[str, int] = {}
    for event in trace.events:
        if event.kind == "admit":
            first_run.setdefault(event.request_id, event.time)
        elif event.kind == "preempt":
            preemptions[event.request_id] = preemptions.get(event.request_id, 0) + 1
    return {
        request_id: _of_one(record, first_run.get(request_id), preemptions.get(request_id, 0))
        for request_id, record in trace.requests.items()
    }


def _of_one(record: RequestRecord, first_run: float | None, preemptions: int) -> RequestMetrics:
    times = record.token_times
    itl = tuple(later - earlier for earlier, later in pairwise(times))
    return RequestMetrics(
        request_id=record.request_id,
        ttft=times[0] - record.arrival if times else None,
        tpot=(times[-1] - times[0]) / len(itl) if itl else None,
        itl=itl,
        max_itl=max(itl) if itl else None,
        latency=None if record.finish_time is None else record.finish_time - record.arrival,
        queue_time=None if first_run is None else first_run - record.arrival,
        num_output_tokens=len(times),
        num_preemptions=preemptions,
    )


def compute_metrics(
    trace: Trace, stall_factor: float = STALL_FACTOR, stall_slo: float = STALL_SLO
) -> Metrics:
    """All figures of a run. An empty trace gives zeros and Nones, never an error."""
    per_request = request_metrics(trace)
    stalls = find_stalls(trace, stall_factor, stall_slo)
    duration = trace.steps[-1].end - trace.steps[0].start if trace.steps else 0.0
    output_tokens = sum(len(record.token_times) for record in trace.requests.values())
    prompt_tokens = sum(
        record.prompt_tokens for record in trace.requests.values() if record.token_times
    )
    return Metrics(
        num_requests=len(trace.requests),
        num_finished=sum(r.finish_reason in ("stop", "length") for r in trace.requests.values()),
        num_steps=len(trace.steps),
        duration=duration,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        throughput=output_tokens / duration if duration > 0 else 0.0,
        total_throughput=(output_tokens + prompt_tokens) / duration if duration > 0 else 0.0,
        ttft=Spread.of(r.ttft for r in per_request.values() if r.ttft is not None),
        tpot=Spread.of(r.tpot for r in per_request.values() if r.tpot is not None),
        itl=Spread.of(gap for r in per_request.values() for gap in r.itl),
        queue_time=Spread.of(
            r.queue_time for r in per_request.values() if r.queue_time is not None
        ),
        num_stalls=len(stalls),
        longest_stall=max((stall.gap for stall in stalls), default=0.0),
        num_preemptions=sum(r.num_preemptions for r in per_request.values()),
        recomputed_tokens=recomputed_tokens(trace),
        cached_tokens=sum(event.tokens for event in trace.events if event.kind == "admit"),
        requests=per_request,
    )


def recomputed_tokens(trace: Trace) -> int:
    """Positions that were computed more than once, because of preemptions."""
    computed: dict[str, int] = {}  # how far each request had been before
    total = 0
    for span in trace.spans:
        reached = computed.get(span.request_id, 0)
        stop = span.first_position + span.tokens
        total += max(0, min(reached, stop) - span.first_position)
        computed[span.request_id] = max(reached, stop)
    return total


def goodput(
    trace: Trace, ttft: float, itl: float | None = None, tpot: float | None = None
) -> float:
    """Requests per second that finished with TTFT, every gap and TPOT within these limits (s)."""
    if not trace.steps:
        return 0.0
    duration = trace.steps[-1].end - trace.steps[0].start
    good = 0
    for request_id, figures in request_metrics(trace).items():
        finished = trace.requests[request_id].finish_reason in ("stop", "length")
        meets = (
            figures.ttft is not None
            and figures.ttft <= ttft
            and (itl is None or (figures.max_itl or 0.0) <= itl)
            and (tpot is None or (figures.tpot or 0.0) <= tpot)
        )
        good += finished and meets
    return good / duration if duration > 0 else 0.0


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all shares are equal, 1/n when one has everything."""
    total, squares = math.fsum(shares), math.fsum(share * share for share in shares)
    return total * total / (len(shares) * squares) if squares > 0 else 1.0


def service_by_tenant(
    trace: Trace, prompt_weight: float = 1.0, output_weight: float = 2.0
) -> dict[str, float]:
    """Weighted tokens that each tenant was served: its prompts (once admitted) and its outputs."""
    admitted = {event.request_id for event in trace.events if event.kind == "admit"}
    service: dict[str, float] = {}
    for record in trace.requests.values():
        prompt = record.prompt_tokens if record.request_id in admitted else 0
        tokens = prompt_weight * prompt + output_weight * len(record.token_times)
        service[record.tenant] = service.get(record.tenant, 0.0) + tokens
    return service


def slowdowns(trace: Trace) -> dict[str, float]:
    """Each finished request's latency over what its tokens cost at the run's median pace.

    The reference is the same for all: the median decode-only step per output token plus the
    median time per prefill token, so that a slowdown of 1 means "as if alone".
    """
    decode_steps = [s.duration for s in trace.steps if s.prefill_tokens == 0 and s.decode_tokens]
    prefill = [s.duration / s.prefill_tokens for s in trace.steps if s.prefill_tokens > 0]
    per_output, per_prompt = percentile(decode_steps, 50) or 0.0, percentile(prefill, 50) or 0.0
    result = {}
    for record in trace.requests.values():
        alone = record.prompt_tokens * per_prompt + len(record.token_times) * per_output
        if record.finish_time is not None and alone > 0:
            result[record.request_id] = (record.finish_time - record.arrival) / alone
    return result
