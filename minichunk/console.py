"""What the commands print: one style of table, one line for an error, no noise from libraries."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def fail(error: BaseException | str, status: int = 1) -> int:
    """Print an error as one line on stderr and return the exit status."""
    if isinstance(error, OSError) and error.strerror:
        error = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    print(f"minichunk: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def print_whatever_the_terminal_can() -> None:
    """A character that the terminal's encoding lacks becomes "?" instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def quieten_libraries() -> None:
    """Keep other libraries' chatter out of the terminal; our own warnings become one-line notes."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any) -> None:
        if category is UserWarning and f"{os.sep}minichunk{os.sep}" in filename:
            print(f"note: {message}", file=sys.stderr)

    warnings.showwarning = show  # type: ignore[assignment]


def side_by_side(rows: Iterable[Mapping[str, Any]], name: str = "run", **options: Any) -> Table:
    """Rows as columns: one column per run, headed by its `name`, one line per figure."""
    from rich import box
    from rich.table import Table

    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, **options)
    table.add_column("")
    for row in rows:
        table.add_column(str(row[name]), justify="right", overflow="fold")
    for figure in rows[0]:
        if figure != name:
            table.add_row(figure, *(str(row.get(figure, "")) for row in rows))
    return table


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.0f} ms"
