"""Still pictures from a trace alone: timeline, ITL distribution, trade-off, roofline, fairness.

They say what the interactive timeline says, in the same colours, where nothing is interactive:
the `image/png` of a notebook's output, a README, a paper. Nothing here touches pyplot, so no
figure is left open and none shows up twice.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minichunk.core.trace import Trace
from minichunk.viz.columns import Traces, as_named, duration, headline, pane, policy_line

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
LINES = ("#0072b2", "#d55e00", "#009067", "#b65f96", "#b87a00", "#1c2530")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MAX_LANES = 60
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 9, "color": TEXT, "parse_math": False}


def to_png(figure: Figure, dpi: int = 110) -> bytes:
    """A figure as PNG bytes, on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


# Timeline -----------------------------------------------------------------------------------------


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
    figure = Figure(figsize=(width, total), layout="constrained")
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
    names = [_short(p["requests"]["id"][lane]) for lane in lanes]
    ax.set_yticks([i + 0.5 for i in range(0, len(lanes), every)], names[::every], parse_math=False)
    ax.tick_params(axis="y", length=0, labelsize=7.5, labelcolor=MUTED)
    ax.tick_params(axis="x", length=0)
    _frame(ax, "x")
    _label_stalls(ax, p, place, pixel)
    left_out = len(p["requests"]["id"]) - len(lanes)
    title = f"{p['name']} · {p['headline']} · {p['policy']}"
    ax.set_title(textwrap.fill(title, _letters(ax)), pad=15, **_TITLE)
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
    _frame(ax, "x")


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


# Distributions and trade-offs ---------------------------------------------------------------------


def itl_figure(traces: Traces, width: float = 6.4) -> Figure:
    """The share of inter-token gaps longer than x, on logarithmic axes: the tail is what hurts."""
    figure, ax = _single(width, 3.6)
    for k, (name, trace) in enumerate(as_named(traces).items()):
        itl = sorted(
            b - a
            for record in trace.requests.values()
            for a, b in zip(record.token_times, record.token_times[1:], strict=False)
        )
        if not itl:
            continue
        share = [1 - i / len(itl) for i in range(len(itl))]
        label = f"{_label(name)}: p50 {duration(itl[len(itl) // 2])}, max {duration(itl[-1])}"
        style: Any = STYLES[k % len(STYLES)]
        ax.step(
            [1e3 * gap for gap in itl],
            share,
            where="pre",
            color=LINES[k % len(LINES)],
            ls=style,
            lw=1.8,
            label=label,
        )
    ax.set(xscale="log", yscale="log")
    ax.set_xlabel("gap between two tokens (ms)")
    ax.set_ylabel("share of gaps at least this long")
    _finish(ax, traces)
    return figure


def tradeoff_figure(traces: Mapping[str, Trace] | Sequence[Trace], width: float = 6.4) -> Figure:
    """TTFT against ITL, a point per trace, labelled with its chunk size and joined in that order.

    x: the longest gap between two tokens; y: the longest time to a first token. Both are the worst
    that anybody waited, which is what a chunk size trades.
    """
    rows = list(traces.values()) if isinstance(traces, Mapping) else list(traces)
    points = []
    for trace in rows:
        metrics = trace.metrics()
        if metrics.itl.max is not None and metrics.ttft.max is not None:
            size = trace.meta.get("chunk_size")
            points.append((size or float("inf"), metrics.itl.max * 1e3, metrics.ttft.max * 1e3))
    points.sort()
    figure, ax = _single(width, 3.8)
    ax.plot([p[1] for p in points], [p[2] for p in points], "-o", color=LINES[0], lw=1.2, ms=5)
    for size, x, y in points:
        label = "whole prompts" if size == float("inf") else f"{size:,.0f}"
        ax.annotate(
            label, (x, y), textcoords="offset points", xytext=(7, 5), fontsize=8, color=TEXT
        )
    ax.margins(0.14)
    ax.set_xlabel("longest gap between two tokens (ms)")
    ax.set_ylabel("longest time to first token (ms)")
    _finish(ax, {str(i): trace for i, trace in enumerate(rows)}, legend=False)
    ax.set_title(f"a point per chunk size, in tokens\n{ax.get_title(loc='left')}", **_TITLE)
    return figure


# Hardware -----------------------------------------------------------------------------------------


def roofline_figure(trace: Trace, width: float = 6.4) -> Figure:
    """A dot per step: FLOPs per byte against FLOP/s, below the device's roof where it is known."""
    figure, ax = _single(width, 3.8)
    for label, mixed in (("decode only", False), ("with prefill", True)):
        steps = [
            step
            for step in trace.steps
            if step.flops
            and step.bytes
            and step.duration > 0
            and bool(step.prefill_tokens) is mixed
        ]
        x = [(step.flops or 0) / (step.bytes or 1) for step in steps]
        y = [(step.flops or 0) / step.duration for step in steps]
        colour = PALETTE["prefill" if mixed else "decode"]
        ax.scatter(x, y, s=16, color=colour, marker="s" if mixed else "o", alpha=0.7, label=label)
    flops, bandwidth = trace.meta.get("peak_flops"), trace.meta.get("peak_bandwidth")
    if flops and bandwidth:
        ridge = flops / bandwidth
        low = min([*ax.get_xlim(), ridge / 1e3])
        edge = [max(low, ridge / 1e3), ridge, max(ridge * 10, ax.get_xlim()[1])]
        ax.plot(edge, [edge[0] * bandwidth, flops, flops], color=TEXT, lw=1.4, label="roof")
    ax.set(xscale="log", yscale="log")
    ax.set_xlabel("FLOPs per byte")
    ax.set_ylabel("FLOP/s")
    _finish(ax, trace)
    return figure


def utilisation_figure(trace: Trace, width: float = 8.0) -> Figure:
    """Per step over time: share of the budget, of the peak FLOP/s and of the peak bandwidth."""
    figure, ax = _single(width, 3.0)
    steps = trace.steps
    flops, bandwidth = trace.meta.get("peak_flops"), trace.meta.get("peak_bandwidth")
    rows = {"token budget": [(s.prefill_tokens + s.decode_tokens) / s.budget for s in steps]}
    if flops and all(s.flops is not None for s in steps):
        rows["peak FLOP/s"] = [(s.flops or 0) / s.duration / flops for s in steps]
    if bandwidth and all(s.bytes is not None for s in steps):
        rows["peak bandwidth"] = [(s.bytes or 0) / s.duration / bandwidth for s in steps]
    edges = [s.start for s in steps] + ([steps[-1].end] if steps else [])
    for k, (label, values) in enumerate(rows.items()):
        style: Any = STYLES[k]
        line = [100 * v for v in values] + [100 * v for v in values[-1:]]
        ax.step(edges, line, where="post", color=LINES[k], ls=style, lw=1.3, label=label)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time (s)")
    ax.set_ylabel("share used (%)")
    _finish(ax, trace)
    return figure


def fairness_figure(trace: Trace, width: float = 8.0) -> Figure:
    """Tokens served to each tenant over time, prompt and output tokens together."""
    figure, ax = _single(width, 3.2)
    tenant_of = {request_id: record.tenant for request_id, record in trace.requests.items()}
    served: dict[str, list[tuple[float, int]]] = {tenant: [] for tenant in tenant_of.values()}
    for span in trace.spans:
        rows = served[tenant_of[span.request_id]]
        if span.kind == "prefill":
            rows.append((trace.steps[span.last_step].end, span.tokens))
        else:
            rows += [(step.end, 1) for step in trace.steps[span.first_step : span.last_step + 1]]
    for k, (tenant, rows) in enumerate(served.items()):
        times, total = [0.0], [0]
        for time, tokens in sorted(rows):
            times.append(time)
            total.append(total[-1] + tokens)
        style: Any = STYLES[k % len(STYLES)]
        ax.step(
            times,
            total,
            where="post",
            color=LINES[k % len(LINES)],
            ls=style,
            lw=1.6,
            label=_label(tenant),
        )
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time (s)")
    ax.set_ylabel("tokens served")
    _finish(ax, trace)
    return figure


def _single(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _frame(ax: Axes, grid: str) -> None:
    ax.grid(axis=grid, color=GRID, lw=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#cbd2da")


def _finish(ax: Axes, traces: Traces, legend: bool = True) -> None:
    """Grid, legend, and where the numbers come from: said once if all traces agree."""
    _frame(ax, "both")
    ax.tick_params(labelsize=8.5, colors=MUTED)
    sources = dict.fromkeys(headline(trace.meta) for trace in as_named(traces).values())
    title = " / ".join(sources)
    if isinstance(traces, Trace):
        title += f" · {policy_line(traces.meta)}"
    ax.set_title(textwrap.fill(title, _letters(ax)), **_TITLE)
    if legend and ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8.5)


def _short(text: str, most: int = 18) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _label(text: str) -> str:
    """A user's text as a legend label: `$` is no mathematics, a leading `_` hides nothing."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def _letters(ax: Axes) -> int:
    """About how many letters of a title fit across the figure."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return max(30, int(figure.get_figwidth() * 14.5) - 8)
