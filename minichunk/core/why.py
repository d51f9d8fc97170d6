"""Answers "why did request r get nothing in step s?", for any request and any step.

The trace keeps reasons only for running requests and the queue's head, and only where they change;
everybody else's answer follows from those rows and from when the request came and went.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minichunk.core.plan import SkipReason

if TYPE_CHECKING:
    from minichunk.core.trace import Span, Trace

REASONS = {
    SkipReason.BUDGET: "the token budget of the step was spent",
    SkipReason.SLOTS: "max_num_seqs requests were running already",
    SkipReason.BLOCKS: "there were not enough free KV blocks for it",
    SkipReason.WHOLE: "it wanted its whole prompt in one step, and that did not fit what was left",
    SkipReason.PREEMPTED: "it was preempted in this step: its blocks went to another request",
    SkipReason.HELD: "long prompts are held back while max_long_partial_prefills are in progress",
    SkipReason.POLICY: "the policy did not offer it",
    SkipReason.BEHIND: "it queued behind the head, and nobody overtakes",
}


@dataclass(frozen=True)
class Why:
    """The answer. `reason` is None where the request was scheduled, not there yet, or finished."""

    request_id: str
    step: int
    scheduled_tokens: int
    reason: SkipReason | None
    text: str

    def __str__(self) -> str:
        return self.text


def why(trace: Trace, request_id: str, step: int) -> Why:
    """See the module. Raises ValueError for an unknown request or step."""
    if request_id not in trace.requests:
        known = ", ".join(list(trace.requests)[:8]) or "none"
        raise ValueError(f"no request {request_id!r} in this trace; it has {known} …")
    if not 0 <= step < len(trace.steps):
        raise ValueError(f"step {step} is not among the {len(trace.steps)} steps of this trace")
    name = f"step {step}, request {request_id}:"
    span = _span_at(trace, request_id, step)
    if span is not None:
        tokens = 1 if span.kind == "decode" else span.tokens
        what = "decoded one token" if span.kind == "decode" else _chunk_text(span)
        return Why(request_id, step, tokens, None, f"{name} it {what}")

    came, went = _life(trace, request_id)
    if step < came:
        return Why(request_id, step, 0, None, f"{name} it had not arrived yet")
    if went is not None and step > went:
        end = trace.requests[request_id].finish_reason
        return Why(request_id, step, 0, None, f"{name} it had ended before ({end})")
    rows = [skip for skip in trace.skips if skip.first_step <= step <= skip.last_step]
    for skip in rows:
        if skip.request_id == request_id and skip.reason != SkipReason.BEHIND:
            reason = SkipReason(skip.reason)
            return Why(request_id, step, 0, reason, f"{name} {REASONS[reason]}")
    if any(skip.reason == SkipReason.HELD for skip in rows) and _is_long(trace, request_id, step):
        return Why(request_id, step, 0, SkipReason.HELD, f"{name} {REASONS[SkipReason.HELD]}")
    if went is not None and step == went:
        end = trace.requests[request_id].finish_reason
        return Why(request_id, step, 0, None, f"{name} it ended before the step ran ({end})")
    for skip in rows:
        if skip.reason == SkipReason.BEHIND:
            queue = f"head: request {skip.request_id}, {skip.count} behind it"
            text = f"{name} {REASONS[SkipReason.BEHIND]} ({queue})"
            return Why(request_id, step, 0, SkipReason.BEHIND, text)
    return Why(request_id, step, 0, None, f"{name} it arrived while the step ran")


def _span_at(trace: Trace, request_id: str, step: int) -> Span | None:
    for span in trace.spans:
        if span.request_id == request_id and span.first_step <= step <= span.last_step:
            return span
    return None


def _is_long(trace: Trace, request_id: str, step: int) -> bool:
    """Was it a long prompt then? A preempted request counts with the outputs that it had."""
    threshold = trace.meta.get("long_prefill_threshold")
    record, start = trace.requests[request_id], trace.steps[step].start
    outputs = sum(time <= start for time in record.token_times)
    return threshold is not None and record.prompt_tokens + outputs > threshold


def _chunk_text(span: Span) -> str:
    stop = span.first_position + span.tokens
    return f"computed a chunk of {span.tokens}, positions {span.first_position} to {stop - 1}"


def _life(trace: Trace, request_id: str) -> tuple[int, int | None]:
    """The steps at which the request arrived and ended (None: still there)."""
    came, went = 0, None
    for event in trace.events:
        if event.request_id == request_id:
            if event.kind == "arrive":
                came = event.step
            elif event.kind in ("finish", "cancel", "timeout"):
                went = event.step
    return came, went
