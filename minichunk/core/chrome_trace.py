"""A trace in Chrome's trace event format, which Perfetto and chrome://tracing open.

One track per request (prefill chunks, decodes, stalls), one for the engine's steps, counters for
budget use and free blocks, and an arrow from each stall to the chunk that caused it. Source:
"Trace Event Format" (Google, 2016). Times are microseconds.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minichunk.core.stalls import StepIndex, find_stalls

if TYPE_CHECKING:
    from minichunk.core.trace import Trace

Event = dict[str, Any]
REQUESTS, ENGINE = 1, 2  # the two "processes" of the picture


def to_chrome(trace: Trace, path: str | Path) -> Path:
    """Write the trace as JSON, whole or not at all; returns the path."""
    path = Path(path)
    text = json.dumps(chrome_trace(trace), separators=(",", ":"))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def chrome_trace(trace: Trace) -> Event:
    """The whole document, as a dict. Thread i + 1 is the i-th request by arrival in the trace."""
    threads = {request_id: i for i, request_id in enumerate(trace.requests, start=1)}
    clock = "simulated" if trace.meta.get("clock") == "simulated" else "measured"
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            _name("process_name", REQUESTS, 0, "requests"),
            _name("process_name", ENGINE, 0, f"engine, {clock}"),
            *(
                _name("thread_name", REQUESTS, thread, request_id)
                for request_id, thread in threads.items()
            ),
            *_steps(trace),
            *_spans(trace, threads),
            *_lifecycle(trace, threads),
            *_stalls(trace, threads),
        ],
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(
    pid: int, tid: int, name: str, start: float, end: float, args: Event | None = None
) -> Event:
    # The end is rounded, not the duration: neighbours then never overlap by a rounding error.
    length = round(max(0.0, _us(end) - _us(start)), 1)
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(start), "dur": length}
    return {**event, "args": args} if args else event


def _counter(name: str, start: float, values: Event) -> Event:
    return {"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": _us(start), "args": values}


def _steps(trace: Trace) -> Iterator[Event]:
    for number, step in enumerate(trace.steps):
        tokens = {"prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens}
        args = {**tokens, "budget": step.budget}
        yield _slice(ENGINE, 1, f"step {number}", step.start, step.end, args)
        use = {"prefill": step.prefill_tokens, "decode": step.decode_tokens}
        yield _counter("budget use", step.start, use)
        yield _counter("free blocks", step.start, {"free": step.free_blocks})


def _spans(trace: Trace, threads: dict[str, int]) -> Iterator[Event]:
    """A slice per chunk and per decode step: a decode span's steps, one by one."""
    index = StepIndex(trace)
    for span in trace.spans:
        thread = threads[span.request_id]
        if span.kind == "prefill":
            chunk = next(
                c for c in index.chunks[span.first_step] if c.request_id == span.request_id
            )
            start, end = trace.steps[span.first_step].start, trace.steps[span.last_step].end
            args = {"first_position": span.first_position, "tokens": span.tokens}
            yield _slice(REQUESTS, thread, f"chunk {chunk.index}/{chunk.count}", start, end, args)
            continue
        for step in trace.steps[span.first_step : span.last_step + 1]:
            yield _slice(REQUESTS, thread, "decode", step.start, step.end)


def _lifecycle(trace: Trace, threads: dict[str, int]) -> Iterator[Event]:
    for event in trace.events:
        yield {
            "ph": "i",
            "s": "t",
            "pid": REQUESTS,
            "tid": threads[event.request_id],
            "name": event.kind,
            "ts": _us(event.time),
            "args": {"tokens": event.tokens},
        }


def _stalls(trace: Trace, threads: dict[str, int]) -> Iterator[Event]:
    """A slice around each stalled gap, and an arrow to the chunk that takes most of it."""
    for number, stall in enumerate(find_stalls(trace)):
        thread = threads[stall.request_id]
        what = {"what": stall.describe()}
        yield _slice(REQUESTS, thread, "stall", stall.start, stall.end, what)
        cause = next((cause for cause in stall.causes if cause.kind == "chunk"), None)
        if cause is None:
            continue
        at = _us(max(stall.start, trace.steps[cause.step].start))
        flow = {"cat": "stall", "id": f"0.{number}", "name": "caused by", "pid": REQUESTS}
        yield {"ph": "s", **flow, "tid": thread, "ts": at}
        yield {"ph": "f", "bp": "e", **flow, "tid": threads[cause.request_id], "ts": at}
