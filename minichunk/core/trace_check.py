"""Does a trace agree with itself? Checked by replaying its rows: tokens, times and blocks.

Whoever writes traces (the engine, an adapter for another engine, a student's own tool) can be held
to the same rules.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from minichunk.core.trace import LifecycleEvent, Trace, TraceError

_TOLERANCE = 1e-9


def validate(trace: Trace) -> None:
    """Raise `TraceError` at the first contradiction."""
    _check_steps(trace)
    _check_spans(trace)
    _check_positions(trace)
    _check_requests(trace)
    if trace.block_events:
        _check_blocks(trace)


def _check_steps(trace: Trace) -> None:
    end = float("-inf")
    pool = trace.steps[0].free_blocks + trace.steps[0].used_blocks if trace.steps else 0
    for number, step in enumerate(trace.steps):
        if step.end < step.start:
            raise TraceError(f"step {number} ends at {step.end} before it starts at {step.start}")
        tokens = step.prefill_tokens + step.decode_tokens
        if step.decode_tokens and tokens > step.budget:
            raise TraceError(f"step {number} has {tokens} tokens with a budget of {step.budget}")
        if step.free_blocks + step.used_blocks != pool:
            raise TraceError(
                f"step {number} counts {step.free_blocks} free and {step.used_blocks} used blocks, "
                f"the first step {pool} in all"
            )
        if step.start < end - _TOLERANCE:
            raise TraceError(f"step {number} starts at {step.start} before the last ended at {end}")
        end = step.end


def _check_spans(trace: Trace) -> None:
    prefill: Counter[int] = Counter()
    decode: Counter[int] = Counter()
    for span in trace.spans:
        where = f"a {span.kind} span of request {span.request_id!r}"
        if span.request_id not in trace.requests:
            raise TraceError(f"{where} names a request that is not in the trace")
        if not 0 <= span.first_step <= span.last_step < len(trace.steps):
            raise TraceError(f"{where} covers steps {span.first_step} to {span.last_step}")
        if span.kind == "prefill":
            prefill[span.first_step] += span.tokens
        else:
            steps = range(span.first_step, span.last_step + 1)
            if len(steps) != span.tokens:
                raise TraceError(f"{where} has {span.tokens} tokens in {len(steps)} steps")
            decode.update(steps)
    for number, step in enumerate(trace.steps):
        counted = (prefill[number], decode[number])
        if counted != (step.prefill_tokens, step.decode_tokens):
            raise TraceError(
                f"step {number} has {step.prefill_tokens} prefill and {step.decode_tokens} decode "
                f"tokens, its spans have {counted[0]} and {counted[1]}"
            )


def _check_positions(trace: Trace) -> None:
    """Each request computes its positions one after the other, from its prefix hit onwards."""
    turns: dict[str, list[LifecycleEvent]] = {}
    for event in trace.events:
        if event.kind in ("admit", "resume", "preempt"):
            turns.setdefault(event.request_id, []).append(event)
    position: dict[str, int] = {}
    for span in sorted(trace.spans, key=lambda span: span.first_step):
        name = span.request_id
        mine = turns.get(name, [])
        while mine and mine[0].step <= span.first_step:
            event = mine.pop(0)
            position[name] = event.tokens if event.kind != "preempt" else -1
        expected = position.get(name, -1)
        if span.first_position != expected:
            was = "was not running" if expected < 0 else f"stood at position {expected}"
            raise TraceError(
                f"step {span.first_step}: request {name!r} computes position "
                f"{span.first_position}, but it {was}"
            )
        position[name] = expected + span.tokens


def _check_requests(trace: Trace) -> None:
    for name, record in trace.requests.items():
        times = record.token_times
        if any(later < earlier for earlier, later in pairwise(times)):
            raise TraceError(f"request {name!r}: its token times go backwards")
        if times and times[0] < record.arrival - _TOLERANCE:
            raise TraceError(f"request {name!r} has a token before it arrived")
        if len(times) > record.max_tokens:
            raise TraceError(
                f"request {name!r} has {len(times)} tokens, max_tokens={record.max_tokens}"
            )
        ids = record.output_token_ids
        if ids is not None and len(ids) != len(times):
            raise TraceError(f"request {name!r} has {len(ids)} tokens and {len(times)} times")
    for event in trace.events:
        if event.request_id not in trace.requests:
            raise TraceError(f"event {event.kind!r} names unknown request {event.request_id!r}")


def _check_blocks(trace: Trace) -> None:
    """Replay who takes and frees blocks, and compare with what the steps counted."""
    holders: Counter[int] = Counter()
    held: dict[str, Counter[int]] = {}
    events = iter(trace.block_events)
    event = next(events, None)
    for number, step in enumerate(trace.steps):
        while event is not None and event.step <= number:
            mine = held.setdefault(event.request_id, Counter())
            for block in event.blocks:
                if event.kind == "alloc" and holders[block]:
                    raise TraceError(f"step {number}: block {block} is allocated but held already")
                if event.kind in ("alloc", "share"):
                    holders[block] += 1
                    mine[block] += 1
                elif event.kind == "free":
                    if not mine[block]:
                        raise TraceError(
                            f"step {number}: request {event.request_id!r} frees block {block}, "
                            "which it does not hold"
                        )
                    holders[block] -= 1
                    mine[block] -= 1
            event = next(events, None)
        used = sum(count > 0 for count in holders.values())
        if used != step.used_blocks:
            raise TraceError(
                f"step {number} counts {step.used_blocks} used blocks, its events {used}"
            )
