"""Traces written by hand, for figures that can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from minichunk.core.trace import LifecycleEvent, RequestRecord, Skip, Span, StepRecord, Trace


def step(
    start: float, end: float, prefill: int = 0, decodes: int = 0, floor: float | None = None
) -> StepRecord:
    return StepRecord(
        start=start,
        end=end,
        prefill_tokens=prefill,
        decode_tokens=decodes,
        budget=1000,
        free_blocks=10,
        used_blocks=0,
        reserved_blocks=0,
        flops=None,
        bytes=None,
        decode_floor=floor,
        scheduling_time=0.0,
        num_decodes=decodes,
    )


def request(
    rid: str, times: Sequence[float], arrival: float = 0.0, prompt: int = 10, reason: str = "length"
) -> RequestRecord:
    return RequestRecord(
        rid,
        arrival,
        prompt,
        max_tokens=max(1, len(times)),
        token_times=list(times),
        finish_reason=reason,
        finish_time=times[-1] if times else None,
    )


def trace_of(
    steps: list[StepRecord],
    requests: list[RequestRecord],
    spans: Sequence[Span] = (),
    events: Sequence[LifecycleEvent] = (),
    skips: Sequence[Skip] = (),
) -> Trace:
    return Trace(
        requests={record.request_id: record for record in requests},
        steps=steps,
        spans=list(spans),
        events=list(events),
        skips=list(skips),
    )


def chunk(rid: str, at: int, first: int, tokens: int) -> Span:
    return Span(rid, at, at, "prefill", first, tokens)


def decodes(rid: str, first_step: int, last_step: int, position: int) -> Span:
    return Span(rid, first_step, last_step, "decode", position, last_step - first_step + 1)
