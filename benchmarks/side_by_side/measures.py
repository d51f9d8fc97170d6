"""What is compared, computed from traces by one function per figure, whoever wrote the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.side_by_side.workloads import Case
from minichunk.core.metrics import percentile
from minichunk.core.trace import RequestRecord, Trace

COMPARED_TOKENS = 16


@dataclass(frozen=True)
class Measure:
    """A figure of a run. Times are in seconds; `more_is_better` only for throughput."""

    label: str
    unit: str
    of: Callable[[Trace], float]
    more_is_better: bool = False

    def times_as_good(self, ours: float, theirs: float) -> float:
        """How many times as fast we are: above 1 in our favour, whichever way the figure counts."""
        return ours / theirs if self.more_is_better else theirs / ours


def throughput(trace: Trace) -> float:
    """Output tokens per second, from the first arrival to the last token."""
    records = trace.requests.values()
    tokens = sum(len(record.token_times) for record in records)
    start = min(record.arrival for record in records)
    return tokens / (max(record.token_times[-1] for record in records) - start)


def first_token(trace: Trace) -> float:
    """Seconds to the first token: the median over requests."""
    return _median_ttft(list(trace.requests.values()))


def longest_gap(trace: Trace) -> float:
    """The longest wait between two tokens of those who were decoding when the late one came."""
    *decoding, _ = trace.requests.values()
    return max(later - earlier for r in decoding for earlier, later in pairwise(r.token_times))


def late_first_token(trace: Trace) -> float:
    """Seconds from the late request's arrival to its first token."""
    return _median_ttft(list(trace.requests.values())[-1:])


def gap_p99(trace: Trace) -> float:
    """The 99th percentile of all gaps between tokens."""
    gaps = [b - a for r in trace.requests.values() for a, b in pairwise(r.token_times)]
    value = percentile(gaps, 99)
    assert value is not None
    return value


def _median_ttft(records: Sequence[RequestRecord]) -> float:
    value = percentile([record.token_times[0] - record.arrival for record in records], 50)
    assert value is not None
    return value


def measures(case: Case) -> tuple[Measure, ...]:
    """The figures that a case is about; the first is the one that its median run is chosen by."""
    if case.late is not None:
        return (
            Measure("longest gap", "s", longest_gap),
            Measure("long prompt's first token", "s", late_first_token),
        )
    if case.num_requests == 1:
        return (Measure("first token", "s", first_token),)
    if any(spec.arrival > 0 for spec in case.requests):
        return (
            Measure("first token, median", "s", first_token),
            Measure("gap, P99", "s", gap_p99),
        )
    return (Measure("throughput", "tokens/s", throughput, more_is_better=True),)


def agreement(trace: Trace, other: Trace) -> float:
    """The share of the first tokens of each answer that are the same, up to the first difference.

    Greedy decoding in bfloat16 has near ties that rounding decides, so it may stay below 1; engines
    that computed different things would agree on next to nothing.
    """
    same = compared = 0
    for request_id, record in trace.requests.items():
        ours = (record.output_token_ids or [])[:COMPARED_TOKENS]
        theirs = (other.requests[request_id].output_token_ids or [])[:COMPARED_TOKENS]
        compared += len(ours)
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                break
            same += 1
    return same / compared if compared else 1.0
