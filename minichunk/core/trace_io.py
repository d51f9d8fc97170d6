"""Traces as files: JSON lines, the version first, columns for what is many.

A line is either the header or a piece of one table, as columns. Files are written beside their
place and moved there, so that a reader never finds half a trace.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from minichunk.core.trace import (
    TRACE_VERSION,
    BlockEvent,
    CounterRow,
    LifecycleEvent,
    RequestRecord,
    Skip,
    Span,
    StepRecord,
    Trace,
    TraceError,
)

ROWS_PER_LINE = 20_000
_TABLES: dict[str, Any] = {
    "requests": RequestRecord,
    "steps": StepRecord,
    "spans": Span,
    "events": LifecycleEvent,
    "skips": Skip,
    "counters": CounterRow,
    "block_events": BlockEvent,
}


def save(trace: Trace, path: str | Path) -> Path:
    """Write the trace to `path`; an error leaves what was there before."""
    write_whole(Path(path), "\n".join(_lines(trace)) + "\n")
    return Path(path)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | Path) -> Trace:
    """Read a trace. Raises `TraceError` with the line, OSError where there is no file."""
    trace = Trace()
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                if number == 1:
                    _read_header(trace, row)
                else:
                    _read_table(trace, row)
            except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
                raise TraceError(
                    f"{path}, line {number}: not a line of a trace ({error})"
                ) from None
    if not trace.meta and not trace.steps:
        raise TraceError(f"{path}: the file is empty")
    return trace


def _lines(trace: Trace) -> Iterator[str]:
    yield json.dumps({"version": TRACE_VERSION, "meta": trace.meta}, default=str)
    for name, kind in _TABLES.items():
        rows = list(trace.requests.values()) if name == "requests" else getattr(trace, name)
        columns = _columns(kind)
        for first in range(0, len(rows), ROWS_PER_LINE):
            piece = rows[first : first + ROWS_PER_LINE]
            data = {column: [getattr(row, column) for row in piece] for column in columns}
            yield json.dumps({"table": name, "columns": data}, separators=(",", ":"))


def _read_header(trace: Trace, row: dict[str, Any]) -> None:
    if row["version"] != TRACE_VERSION:
        raise ValueError(f"version {row['version']}, this minichunk reads {TRACE_VERSION}")
    trace.meta = dict(row["meta"])


def _read_table(trace: Trace, row: dict[str, Any]) -> None:
    name, data = row["table"], row["columns"]
    kind = _TABLES[name]
    columns = _columns(kind)
    if "blocks" in data:
        data["blocks"] = [tuple(blocks) for blocks in data["blocks"]]
    lists = [data[column] for column in columns]
    if len({len(values) for values in lists}) > 1:
        raise ValueError(f"the columns of table {name!r} have different lengths")
    for values in zip(*lists, strict=True):
        made = kind(*values)
        if name == "requests":
            trace.requests[made.request_id] = made
        else:
            getattr(trace, name).append(made)


def _columns(kind: Any) -> list[str]:
    return [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind._fields)
