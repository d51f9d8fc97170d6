"""The trade-off curve of the explorer as SVG: chunk size against the two waits that it trades.

Small chunks keep the gaps between tokens short and make the long prompt wait; large ones do the
opposite (Sarathi-Serve, OSDI 2024, calls it the throughput-latency trade-off).
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minichunk.viz.columns import duration

WIDTH, HEIGHT = 380, 220
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 14, 40
COLOURS = {"A": "#d55e00", "B": "#0072b2"}


class Point(NamedTuple):
    """A chunk size (None: no limit) and what it gives, in seconds."""

    chunk_size: int | None
    longest_gap: float
    longest_ttft: float


def curve_svg(points: Sequence[Point], today: Mapping[str, Point]) -> str:
    """The curve through `points`, and `today`'s points by name. Texts take the page's colour."""
    known = [p for p in (*points, *today.values()) if p.longest_gap > 0 and p.longest_ttft > 0]
    if not known:
        return "<p>No request decoded: there is no gap to trade.</p>"
    x_range = _range([p.longest_gap for p in known])
    y_range = _range([p.longest_ttft for p in known])

    def place(p: Point) -> tuple[float, float]:
        x = _share(p.longest_gap, x_range) * (WIDTH - LEFT - RIGHT) + LEFT
        y = HEIGHT - BOTTOM - _share(p.longest_ttft, y_range) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [*_axis_x(x_range), *_axis_y(y_range)]
    line = [place(p) for p in _ordered(points)]
    if line:
        path = " ".join(f"{x},{y}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#85909c" stroke-width="1.5"/>')
    taken: list[tuple[float, float]] = []
    for p in _ordered(points):
        x, y = place(p)
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="#85909c"/>')
        if all(abs(x - u) > 34 or abs(y - v) > 12 for u, v in taken):
            taken.append((x, y))
            anchor = "end" if x > WIDTH - 60 else "start"
            shift = -6 if anchor == "end" else 6
            parts.append(_text(x + shift, y - 5, _size(p.chunk_size), anchor))
    for name, p in today.items():
        x, y = place(p)
        colour = COLOURS.get(name, "#b65f96")
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="6.5" fill="{colour}"/>'
            f'<text x="{x}" y="{y + 3.5}" font-size="9.5" font-weight="700" text-anchor="middle" '
            f'fill="#fff">{html.escape(name[:1])}</text>'
        )
    label = "Trade-off: longest gap between tokens against longest time to a first token"
    return (
        f'<svg role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'fill="var(--jp-ui-font-color1, currentColor)">' + "".join(parts) + "</svg>"
    )


def _ordered(points: Sequence[Point]) -> list[Point]:
    return sorted(points, key=lambda p: math.inf if p.chunk_size is None else p.chunk_size)


def _size(chunk_size: int | None) -> str:
    return "no limit" if chunk_size is None else f"{chunk_size:,}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values need, in powers: both axes are logarithmic."""
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = max(0.08, (high - low) * 0.1)
    return low - pad, high + pad


def _share(value: float, around: tuple[float, float]) -> float:
    return (math.log10(value) - around[0]) / (around[1] - around[0])


def _ticks(around: tuple[float, float]) -> list[float]:
    low, high = around
    every = [
        m * 10.0**k
        for k in range(math.floor(low), math.ceil(high) + 1)
        for m in (1, 2, 5)
        if low <= math.log10(m * 10.0**k) <= high
    ]
    return every if len(every) <= 5 else every[:: -(-len(every) // 5)]


def _axis_x(around: tuple[float, float]) -> list[str]:
    parts = []
    for value in _ticks(around):
        x = round(LEFT + _share(value, around) * (WIDTH - LEFT - RIGHT), 1)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM))
        parts.append(_text(x, HEIGHT - BOTTOM + 14, duration(value), "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, _text(middle, HEIGHT - 6, "longest gap between tokens", "middle")]


def _axis_y(around: tuple[float, float]) -> list[str]:
    parts = []
    for value in _ticks(around):
        y = round(HEIGHT - BOTTOM - _share(value, around) * (HEIGHT - TOP - BOTTOM), 1)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 5, y + 3.5, duration(value), "end"))
    middle = (HEIGHT - BOTTOM) / 2
    turned = f'font-size="10" text-anchor="middle" transform="rotate(-90 12 {middle})"'
    return [*parts, f'<text x="12" y="{middle}" {turned}>longest TTFT</text>']


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#85909c" stroke-opacity="0.3"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="10" text-anchor="{anchor}">{html.escape(text)}</text>'
