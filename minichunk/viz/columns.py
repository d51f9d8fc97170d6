"""A trace as compact columns: the one payload that the timeline, the HTML page and exports draw.

Pure functions, standard library only. The browser gets plain numbers and texts, sent once; what a
person then does (cursor, zoom, selection) needs no further data. Stalls, gaps and metrics are
computed by `core.metrics`, never a second time in JavaScript.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minichunk.core.metrics import Metrics, compute_metrics
from minichunk.core.stalls import Cause, Gap, StepIndex, find_stalls, gaps
from minichunk.core.trace import Trace

PAYLOAD_VERSION = 1
# Beyond this many block numbers the pool grid is left out, and the timeline says so.
MAX_BLOCK_RUNS = 400_000
# A gap is worth a mark when it is this much longer than a decode step alone.
VISIBLE_EXCESS = 0.05

Traces = Trace | Mapping[str, Trace]


def as_named(traces: Traces) -> dict[str, Trace]:
    """One trace or several by name, always as a dict; a single trace is named after its policy."""
    if isinstance(traces, Trace):
        return {str(traces.meta.get("name") or traces.meta.get("policy") or "trace"): traces}
    if not isinstance(traces, Mapping) or not traces:
        raise ValueError("a timeline needs a Trace, or a non-empty dict of name -> Trace")
    for name, trace in traces.items():
        if not isinstance(trace, Trace):
            raise ValueError(f"traces[{name!r}] is a {type(trace).__name__}, not a Trace")
    return {str(name): trace for name, trace in traces.items()}


def headline(meta: Mapping[str, Any]) -> str:
    """Where the numbers come from: "simulated …" or "measured on …", never left open."""
    model = meta.get("model")
    device = meta.get("device_name") or meta.get("gpu") or meta.get("device")
    if meta.get("clock") == "simulated":
        parts = [str(model)] if model else []
        parts += [f"on {device}"] if device else []
        return " ".join(["simulated", *parts])
    return f"measured on {device or 'an unnamed device'}" + (f", {model}" if model else "")


def policy_line(meta: Mapping[str, Any]) -> str:
    """The scheduler in a few words: policy, order and the knobs that were set."""
    words = [str(meta[key]) for key in ("policy", "order") if meta.get(key)]
    for key, label in (
        ("max_num_batched_tokens", "budget"),
        ("chunk_size", "chunk"),
        ("max_num_seqs", "slots"),
    ):
        value = meta.get(key)
        if value is not None:
            words.append(f"{label} {value:,}" if isinstance(value, int) else f"{label} {value}")
    return " · ".join(words)


def columns(traces: Traces) -> dict[str, Any]:
    """The whole payload: one pane per trace, all on the time axis of the first arrival."""
    return {
        "version": PAYLOAD_VERSION,
        "panes": [pane(name, trace) for name, trace in as_named(traces).items()],
    }


def pane(name: str, trace: Trace) -> dict[str, Any]:
    """One trace as columns. Requests are numbered by their place in `requests.id` everywhere."""
    index = {request_id: i for i, request_id in enumerate(trace.requests)}
    meta = trace.meta
    notes: list[str] = []
    return {
        "name": name,
        "headline": headline(meta),
        "policy": policy_line(meta),
        "simulated": meta.get("clock") == "simulated",
        "block_size": meta.get("block_size"),
        "num_blocks": meta.get("num_blocks"),
        "peak_flops": _number(meta.get("peak_flops")),
        "peak_bandwidth": _number(meta.get("peak_bandwidth")),
        "summary": summary(compute_metrics(trace)),
        "requests": _requests(trace),
        "steps": _steps(trace),
        "spans": _spans(trace, index),
        "events": {
            "request": [index[event.request_id] for event in trace.events],
            "step": [event.step for event in trace.events],
            "time": [_seconds(event.time) for event in trace.events],
            "kind": [event.kind for event in trace.events],
            "tokens": [event.tokens for event in trace.events],
        },
        "skips": {
            "request": [index[skip.request_id] for skip in trace.skips],
            "first": [skip.first_step for skip in trace.skips],
            "last": [skip.last_step for skip in trace.skips],
            "reason": [str(skip.reason) for skip in trace.skips],
            "count": [skip.count for skip in trace.skips],
        },
        "gaps": _gaps(trace, index),
        "stalls": _stalls(trace, index),
        "blocks": _blocks(trace, index, notes),
        "notes": notes,  # what had to be left out, in words
    }


def chunk_numbers(trace: Trace) -> dict[tuple[str, int], tuple[int, int]]:
    """(request, step) of each prefill chunk -> (i, n) as in "chunk i/n", as stalls count them."""
    return {
        (chunk.request_id, step): (chunk.index, chunk.count)
        for step, chunks in StepIndex(trace).chunks.items()
        for chunk in chunks
    }


def _seconds(value: float | None) -> float | None:
    """Tenths of a microsecond are finer than any clock here, and short to write."""
    return None if value is None else round(value, 7)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _requests(trace: Trace) -> dict[str, Any]:
    records = list(trace.requests.values())
    times: list[float] = []
    offsets = [0]
    for record in records:
        times.extend(round(t, 7) for t in record.token_times)
        offsets.append(len(times))
    return {
        "id": [record.request_id for record in records],
        "tenant": [record.tenant for record in records],
        "arrival": [_seconds(record.arrival) for record in records],
        "prompt": [record.prompt_tokens for record in records],
        "finish": [_seconds(record.finish_time) for record in records],
        "reason": [str(record.finish_reason or "") for record in records],
        "note": [record.note for record in records],
        "token_offsets": offsets,
        "token_times": times,
    }


def _steps(trace: Trace) -> dict[str, Any]:
    steps = trace.steps
    return {
        "start": [_seconds(step.start) for step in steps],
        "end": [_seconds(step.end) for step in steps],
        "prefill": [step.prefill_tokens for step in steps],
        "decode": [step.decode_tokens for step in steps],
        "budget": [step.budget for step in steps],
        "free": [step.free_blocks for step in steps],
        "used": [step.used_blocks for step in steps],
        "reserved": [step.reserved_blocks for step in steps],
        "flops": [step.flops for step in steps],
        "bytes": [step.bytes for step in steps],
        "floor": [_seconds(step.decode_floor) for step in steps],
    }


def _spans(trace: Trace, index: Mapping[str, int]) -> dict[str, Any]:
    numbers = chunk_numbers(trace)
    chunks = [
        numbers[span.request_id, span.first_step] if span.kind == "prefill" else (0, 0)
        for span in trace.spans
    ]
    return {
        "request": [index[span.request_id] for span in trace.spans],
        "first": [span.first_step for span in trace.spans],
        "last": [span.last_step for span in trace.spans],
        "prefill": [int(span.kind == "prefill") for span in trace.spans],
        "position": [span.first_position for span in trace.spans],
        "tokens": [span.tokens for span in trace.spans],
        "chunk": [chunk for chunk, _ in chunks],
        "chunks": [total for _, total in chunks],
    }


def summary(metrics: Metrics) -> dict[str, str]:
    """The figures of a pane's header, written out; a figure that nothing supports is left out."""
    figures = {
        "TTFT p50": metrics.ttft.p50,
        "ITL p50": metrics.itl.p50,
        "p95": metrics.itl.p95,
        "p99": metrics.itl.p99,
        "max": metrics.itl.max,
    }
    out = {label: duration(value) for label, value in figures.items() if value is not None}
    if metrics.throughput:
        out["throughput"] = f"{metrics.throughput:,.0f} tokens/s"
    return out


def duration(seconds: float) -> str:
    """A duration for people: three digits, in the unit that suits."""
    size = abs(seconds)
    if size >= 100:
        return f"{seconds:.0f} s"
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 0.1:
        return f"{seconds * 1e3:.0f} ms"
    if size >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs" if size else "0 s"


def _excess(gap: Gap) -> float:
    """How much of a gap is more than decoding alone. Without a floor only waiting counts."""
    return gap.waiting + (gap.interference if gap.floor is not None else 0.0)


def _gaps(trace: Trace, index: Mapping[str, int]) -> dict[str, Any]:
    """The gaps that are visibly longer than a decode step; the others need no mark."""
    shown = [
        gap for gap in gaps(trace) if (extra := _excess(gap)) > VISIBLE_EXCESS * (gap.gap - extra)
    ]
    return {
        "request": [index[gap.request_id] for gap in shown],
        "token": [gap.token_index for gap in shown],
        "start": [_seconds(gap.start) for gap in shown],
        "end": [_seconds(gap.end) for gap in shown],
        "excess": [_seconds(_excess(gap)) for gap in shown],
        "floor": [_seconds(gap.floor) for gap in shown],
    }


def _stalls(trace: Trace, index: Mapping[str, int]) -> dict[str, Any]:
    stalls = find_stalls(trace)
    # The longest cause with a chunk to point at: where an arrow from the stall can end.
    chunks: list[Cause | None] = [
        next((cause for cause in stall.causes if cause.kind == "chunk"), None) for stall in stalls
    ]
    return {
        "request": [index[stall.request_id] for stall in stalls],
        "token": [stall.token_index for stall in stalls],
        "start": [_seconds(stall.start) for stall in stalls],
        "end": [_seconds(stall.end) for stall in stalls],
        "excess": [_seconds(_excess(stall) or stall.gap) for stall in stalls],
        "floor": [_seconds(stall.floor) for stall in stalls],
        "text": [stall.describe() for stall in stalls],
        "cause_request": [index[cause.request_id] if cause else -1 for cause in chunks],
        "cause_step": [cause.step if cause else -1 for cause in chunks],
    }


def _blocks(trace: Trace, index: Mapping[str, int], notes: list[str]) -> dict[str, Any] | None:
    """Block events with their blocks as runs (first, length), flat; None where there are none."""
    if not trace.block_events:
        return None
    runs: list[int] = []
    offsets = [0]
    for event in trace.block_events:
        previous = -2
        for block in event.blocks if event.kind != "publish" else ():
            # Blocks count up when taken and down when given back; the order within one event is
            # kept by never merging the latter, because a block table is read in that order.
            if block == previous + 1:
                runs[-1] += 1
            else:
                runs += (block, 1)
            previous = block
        offsets.append(len(runs))
        if len(runs) > 2 * MAX_BLOCK_RUNS:
            notes.append(
                f"The block pool is not drawn: more than {MAX_BLOCK_RUNS:,} runs of blocks changed "
                "hands in this trace."
            )
            return None
    return {
        "step": [event.step for event in trace.block_events],
        "kind": [event.kind for event in trace.block_events],
        "request": [index[event.request_id] for event in trace.block_events],
        "offsets": offsets,
        "runs": runs,
    }
