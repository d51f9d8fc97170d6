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
_NOT_A_TRACE = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    path = path.resolve()  # a link stays a link, to the new file
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)  # a device or a pipe must not be replaced
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | Path) -> Trace:
    """Read a trace. Raises `TraceError` with the line, OSError where there is no file."""
    trace = Trace()
    expected: dict[str, int] = {}
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode("utf-8"))
                if number == 1:
                    expected = _read_header(trace, row)
                else:
                    _read_table(trace, row)
            except _NOT_A_TRACE as error:
                reason = f"{type(error).__name__}: {error}"
                raise TraceError(
                    f"{path}, line {number}: not a line of a trace ({reason})"
                ) from None
    if number == 0:
        raise TraceError(f"{path}: the file is empty")
    for name, count in expected.items():
        if (found := len(getattr(trace, name))) != count:
            raise TraceError(
                f"{path}, line {number}: the file ends here with {found} of {count} rows of "
                f"table {name!r}; it was cut short"
            )
    return trace


def _lines(trace: Trace) -> Iterator[str]:
    counts = {name: len(getattr(trace, name)) for name in _TABLES}
    yield json.dumps({"version": TRACE_VERSION, "meta": trace.meta, "rows": counts}, default=str)
    for name, kind in _TABLES.items():
        rows = list(trace.requests.values()) if name == "requests" else getattr(trace, name)
        columns = _columns(kind)
        for first in range(0, len(rows), ROWS_PER_LINE):
            piece = rows[first : first + ROWS_PER_LINE]
            data = {column: [getattr(row, column) for row in piece] for column in columns}
            yield json.dumps({"table": name, "columns": data}, separators=(",", ":"))


def _read_header(trace: Trace, row: dict[str, Any]) -> dict[str, int]:
    """The number of rows that each table should have; other writers may leave that out."""
    if row["version"] != TRACE_VERSION:
        raise ValueError(f"version {row['version']}, this minichunk reads {TRACE_VERSION}")
    trace.meta = dict(row["meta"])
    rows = {str(name): int(count) for name, count in dict(row.get("rows", {})).items()}
    if unknown := sorted(set(rows) - set(_TABLES)):
        raise ValueError(f"unknown tables {unknown}")
    return rows


def _read_table(trace: Trace, row: dict[str, Any]) -> None:
    name, data = row["table"], row["columns"]
    if name not in _TABLES:
        raise ValueError(f"unknown table {name!r}; known: {', '.join(_TABLES)}")
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
