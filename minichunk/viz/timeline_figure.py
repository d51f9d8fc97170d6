"""The timeline as a still picture, from a trace alone: the `image/png` of a notebook's output.

It says what the interactive timeline says, in the same colours: lanes per request, stalls hatched,
tokens per step against the dashed budget, several traces on one time axis.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minichunk.viz.columns import Traces, as_named, duration, pane
from minichunk.viz.figure_style import (
    MUTED,
    PALETTE,
    STALL_TINT,
    TEXT,
    TITLE,
    Picture,
    frame,
    letters,
    shorten,
)

MAX_LANES = 60


def timeline_figure(
    traces: Traces, width: float = 10.0, view: tuple[float, float] | None = None
) -> Figure:
    """Lanes per request and tokens per step, one pane per trace on one time axis.

    `width` in inches, `view` in seconds. Beyond 60 requests a pane shows those that stall longest,
    and says so.
    """
    panes = [pane(name, trace) for name, trace in as_named(traces).items()]
    shown = [_lanes_shown(p) for p in panes]
    heights = []
    for lanes in shown:
        heights += [min(5.0, max(0.9, 0.22 * len(lanes))), 0.55]
    total = sum(heights) + 0.62 * len(panes) + 0.55
    figure = Picture(figsize=(width, total), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    span = view or _extent(panes)
    per_inch = (span[1] - span[0]) / (width * 100)
    for i, (p, lanes) in enumerate(zip(panes, shown, strict=True)):
        _draw_lanes(axes[2 * i], p, lanes, per_inch)
        _draw_bars(axes[2 * i + 1], p, per_inch)
    axes[-1].set_xlim(*span)
    axes[-1].set_xlabel("time (s)", color=MUTED, fontsize=8.5)
    axes[-1].tick_params(axis="x", labelsize=8, labelcolor=MUTED)
    figure.legend(
        handles=[
            Patch(facecolor=STALL_TINT, edgecolor=colour, hatch="/////", label=kind, linewidth=0)
            if kind == "stall"
            else Patch(facecolor=colour, label=kind)
            for kind, colour in PALETTE.items()
        ],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=8,
    )
    return figure


def _extent(panes: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    starts = [t for p in panes for t in (*p["requests"]["arrival"][:1], *p["steps"]["start"][:1])]
    ends = [p["steps"]["end"][-1] for p in panes if p["steps"]["end"]]
    start, end = min(starts, default=0.0), max(ends, default=1.0)
    return start, end + 0.01 * (end - start or 1.0)


def _lanes_shown(p: Mapping[str, Any]) -> list[int]:
    count = len(p["requests"]["id"])
    if count <= MAX_LANES:
        return list(range(count))
    worst = [0.0] * count
    stalls = p["stalls"]
    for lane, start, end in zip(stalls["request"], stalls["start"], stalls["end"], strict=True):
        worst[lane] = max(worst[lane], end - start)
    return sorted(sorted(range(count), key=lambda lane: -worst[lane])[:MAX_LANES])


def _segments(p: Mapping[str, Any]) -> dict[str, list[tuple[int, float, float]]]:
    """(lane, start, end) of everything to draw, by kind."""
    steps, spans, events = p["steps"], p["spans"], p["events"]
    out: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in PALETTE}
    for lane, first, last, prefill in zip(
        spans["request"], spans["first"], spans["last"], spans["prefill"], strict=True
    ):
        kind = "prefill" if prefill else "decode"
        out[kind].append((lane, steps["start"][first], steps["end"][last]))
    waiting = {lane: ("queued", t) for lane, t in enumerate(p["requests"]["arrival"])}
    for lane, time, kind in zip(events["request"], events["time"], events["kind"], strict=True):
        if kind == "preempt":
            waiting[lane] = ("preempted", time)
        elif kind != "arrive" and lane in waiting:
            state, since = waiting.pop(lane)
            if time > since:
                out[state].append((lane, since, time))
    end = steps["end"][-1] if steps["end"] else 0.0
    for lane, (state, since) in waiting.items():
        if end > since:
            out[state].append((lane, since, end))
    stalls, gaps = p["stalls"], p["gaps"]
    stalled = set(zip(stalls["request"], stalls["token"], strict=True))
    for kind, rows in (("interference", gaps), ("stall", stalls)):
        for lane, token, start, excess in zip(
            rows["request"], rows["token"], rows["start"], rows["excess"], strict=True
        ):
            if kind == "stall" or (lane, token) not in stalled:
                out[kind].append((lane, start, start + excess))
    return out


def _draw_lanes(ax: Axes, p: Mapping[str, Any], lanes: list[int], pixel: float) -> None:
    place = {lane: i for i, lane in enumerate(lanes)}
    segments = _segments(p)
    inset = {"queued": 0.36, "preempted": 0.25}
    # What lies on top comes last: a recomputed chunk inside a stall stays visible.
    for kind in ("queued", "decode", "interference", "stall", "preempted", "prefill"):
        boxes = []
        for lane, start, end in _merged(segments[kind], pixel):
            if lane in place:
                y, pad = place[lane], 0.12 + inset.get(kind, 0.0)
                boxes.append(_box(start, max(end, start + pixel), y + pad, y + 1 - pad))
        is_stall = kind == "stall"
        ax.add_collection(
            PolyCollection(
                boxes,
                facecolors=STALL_TINT if is_stall else PALETTE[kind],
                edgecolors=PALETTE[kind] if is_stall else "white",
                hatch="//////" if is_stall else None,
                linewidths=0.5 if is_stall else (0.6 if kind == "prefill" else 0.0),
            )
        )
    ax.set_ylim(len(lanes) or 1, 0)
    every = max(1, -(-len(lanes) // 24))
    names = [shorten(p["requests"]["id"][lane]) for lane in lanes]
    ax.set_yticks([i + 0.5 for i in range(0, len(lanes), every)], names[::every], parse_math=False)
    ax.tick_params(axis="y", length=0, labelsize=7.5, labelcolor=MUTED)
    ax.tick_params(axis="x", length=0)
    frame(ax, "x")
    _label_stalls(ax, p, place, pixel)
    left_out = len(p["requests"]["id"]) - len(lanes)
    title = f"{p['name']} · {p['headline']} · {p['policy']}"
    ax.set_title(textwrap.fill(title, letters(ax)), pad=15, **TITLE)
    note = _stall_note(p) + (f" · {left_out} other requests not shown" if left_out else "")
    ax.text(0, 1.0, note, transform=ax.transAxes, va="bottom", fontsize=8.5, color=TEXT)


def _label_stalls(ax: Axes, p: Mapping[str, Any], place: Mapping[int, int], pixel: float) -> None:
    """The length of a stall, where its box has the room for it."""
    if len(place) > 24:
        return
    for lane, start, end, excess in zip(
        *(p["stalls"][key] for key in ("request", "start", "end", "excess")), strict=True
    ):
        if lane in place and excess > 90 * pixel:
            ax.text(
                start + excess / 2,
                place[lane] + 0.53,
                duration(end - start),
                ha="center",
                va="center",
                fontsize=7,
                color=TEXT,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
                clip_on=True,
            )


def _merged(
    rows: Iterable[tuple[int, float, float]], pixel: float
) -> Iterable[tuple[int, float, float]]:
    """Neighbours in a lane that no pixel could tell apart become one box."""
    open_row: tuple[int, float, float] | None = None
    for lane, start, end in sorted(rows):
        thin = open_row is not None and min(end - start, open_row[2] - open_row[1]) < 3 * pixel
        if open_row and thin and lane == open_row[0] and start - open_row[2] < 0.5 * pixel:
            open_row = (lane, open_row[1], max(end, open_row[2]))
            continue
        if open_row:
            yield open_row
        open_row = (lane, start, end)
    if open_row:
        yield open_row


def _box(x0: float, x1: float, y0: float, y1: float) -> list[tuple[float, float]]:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _draw_bars(ax: Axes, p: Mapping[str, Any], pixel: float) -> None:
    steps = p["steps"]
    for kind, base in (("decode", None), ("prefill", "decode")):
        boxes = []
        for i, tokens in enumerate(steps[kind]):
            if tokens:
                low = steps[base][i] if base else 0
                start, end = steps["start"][i], max(steps["end"][i], steps["start"][i] + pixel)
                boxes.append(_box(start, end, low, low + tokens))
        ax.add_collection(
            PolyCollection(boxes, facecolors=PALETTE[kind], edgecolors="white", linewidths=0.15)
        )
    most = max(
        [1]
        + [
            max(b, f + d)
            for b, f, d in zip(steps["budget"], steps["prefill"], steps["decode"], strict=True)
        ]
    )
    ax.step(steps["start"], steps["budget"], where="post", color=TEXT, lw=0.9, ls=(0, (4, 3)))
    ax.set_ylim(0, most * 1.08)
    ax.set_yticks([0, max(steps["budget"], default=1)])
    ax.tick_params(axis="y", length=0, labelsize=7, labelcolor=MUTED)
    ax.set_ylabel("tokens", fontsize=7.5, color=MUTED)
    frame(ax, "x")


def _stall_note(p: Mapping[str, Any]) -> str:
    stalls = p["stalls"]
    gaps = [b - a for a, b in zip(stalls["start"], stalls["end"], strict=True)]
    if not gaps:
        return "no stalls"
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    floor = stalls["floor"][worst]
    times = f" = {gaps[worst] / floor:.0f}× a decode step" if floor else ""
    count = f"{len(gaps)} stall{'s' if len(gaps) > 1 else ''}"
    return f"{count}, the longest {duration(gaps[worst])}{times}"
