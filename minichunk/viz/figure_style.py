"""What all still pictures share: colours, frames, titles, and how a user's text is written.

The colours are those of the interactive timeline on a light ground. Nothing here touches pyplot,
so no figure is left open and none shows up twice in a notebook.
"""

from __future__ import annotations

import io
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minichunk.core.trace import Trace
from minichunk.viz.columns import Traces, as_named, headline, policy_line

# Okabe–Ito hues, darkened until each has 3:1 on white; `viz/static/timeline.css` has the same.
PALETTE = {
    "queued": "#85909c",
    "decode": "#009067",
    "prefill": "#0072b2",
    "preempted": "#b65f96",
    "interference": "#b87a00",
    "stall": "#d55e00",
}
STALL_TINT = "#ffe9d9"
TEXT, MUTED, GRID = "#1c2530", "#59636f", "#e3e7ec"
# Lines differ in colour and in dash, so that they stay apart in grey as well.
LINES = ("#0072b2", "#d55e00", "#009067", "#b65f96", "#b87a00", "#1c2530")
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 9, "color": TEXT, "parse_math": False}


def to_png(figure: Figure, dpi: int = 110) -> bytes:
    """A figure as PNG bytes, on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


class Picture(Figure):
    """A figure that a notebook shows by itself, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


def single(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Picture(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def frame(ax: Axes, grid: str) -> None:
    ax.grid(axis=grid, color=GRID, lw=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#cbd2da")


def finish(ax: Axes, traces: Traces, legend: bool = True) -> None:
    """Grid, legend, and where the numbers come from: said once if all traces agree."""
    frame(ax, "both")
    ax.tick_params(labelsize=8.5, colors=MUTED)
    sources = dict.fromkeys(headline(trace.meta) for trace in as_named(traces).values())
    title = " / ".join(sources)
    if isinstance(traces, Trace):
        title += f" · {policy_line(traces.meta)}"
    ax.set_title(textwrap.fill(title, letters(ax)), **TITLE)
    if legend and ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8.5)


def shorten(text: str, most: int = 18) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def legend_text(text: str) -> str:
    """A user's text as a legend label: `$` is no mathematics, a leading `_` hides nothing."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def letters(ax: Axes) -> int:
    """About how many letters of a title fit across the figure."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return max(30, int(figure.get_figwidth() * 14.5) - 8)
