"""Still pictures from traces alone: ITL distribution, trade-off, roofline, utilisation, fairness.

For a README, a paper or a notebook, where the reader compares runs; `timeline_figure` beside them
draws one run. Every picture says in its title what was simulated or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minichunk.core.trace import Trace
from minichunk.viz.columns import Traces, as_named, duration
from minichunk.viz.figure_style import (
    LINES,
    PALETTE,
    STALL_TINT,
    STYLES,
    TEXT,
    TITLE,
    finish,
    legend_text,
    single,
    to_png,
)
from minichunk.viz.timeline_figure import timeline_figure

__all__ = [
    "PALETTE",
    "STALL_TINT",
    "fairness_figure",
    "itl_figure",
    "roofline_figure",
    "timeline_figure",
    "to_png",
    "tradeoff_figure",
    "utilisation_figure",
]


def itl_figure(traces: Traces, width: float = 6.4) -> Figure:
    """The share of inter-token gaps longer than x, on logarithmic axes: the tail is what hurts."""
    figure, ax = single(width, 3.6)
    for k, (name, trace) in enumerate(as_named(traces).items()):
        itl = sorted(
            b - a
            for record in trace.requests.values()
            for a, b in zip(record.token_times, record.token_times[1:], strict=False)
        )
        if not itl:
            continue
        share = [1 - i / len(itl) for i in range(len(itl))]
        label = f"{legend_text(name)}: p50 {duration(itl[len(itl) // 2])}, max {duration(itl[-1])}"
        ax.step(
            [1e3 * gap for gap in itl],
            share,
            where="pre",
            color=LINES[k % len(LINES)],
            ls=STYLES[k % len(STYLES)],
            lw=1.8,
            label=label,
        )
    ax.set(xscale="log", yscale="log")
    ax.set_xlabel("gap between two tokens (ms)")
    ax.set_ylabel("share of gaps at least this long")
    finish(ax, traces)
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
    figure, ax = single(width, 3.8)
    ax.plot([p[1] for p in points], [p[2] for p in points], "-o", color=LINES[0], lw=1.2, ms=5)
    for size, x, y in points:
        label = "whole prompts" if size == float("inf") else f"{size:,.0f}"
        ax.annotate(
            label, (x, y), textcoords="offset points", xytext=(7, 5), fontsize=8, color=TEXT
        )
    ax.margins(0.14)
    ax.set_xlabel("longest gap between two tokens (ms)")
    ax.set_ylabel("longest time to first token (ms)")
    finish(ax, {str(i): trace for i, trace in enumerate(rows)}, legend=False)
    ax.set_title(f"a point per chunk size, in tokens\n{ax.get_title(loc='left')}", **TITLE)
    return figure


# Hardware -----------------------------------------------------------------------------------------


def roofline_figure(trace: Trace, width: float = 6.4) -> Figure:
    """A dot per step: FLOPs per byte against FLOP/s, below the device's roof where it is known."""
    figure, ax = single(width, 3.8)
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
    if not any(step.flops and step.bytes for step in trace.steps):
        note = "this trace counts no FLOPs and bytes"
        ax.text(0.5, 0.5, note, ha="center", color=TEXT, transform=ax.transAxes)
        finish(ax, trace, legend=False)
        return figure
    flops, bandwidth = trace.meta.get("peak_flops"), trace.meta.get("peak_bandwidth")
    if flops and bandwidth:
        ridge = flops / bandwidth
        low = min([*ax.get_xlim(), ridge / 1e3])
        edge = [max(low, ridge / 1e3), ridge, max(ridge * 10, ax.get_xlim()[1])]
        ax.plot(edge, [edge[0] * bandwidth, flops, flops], color=TEXT, lw=1.4, label="roof")
    ax.set(xscale="log", yscale="log")
    ax.set_xlabel("FLOPs per byte")
    ax.set_ylabel("FLOP/s")
    finish(ax, trace)
    return figure


def utilisation_figure(trace: Trace, width: float = 8.0) -> Figure:
    """Per step over time: share of the budget, of the peak FLOP/s and of the peak bandwidth."""
    figure, ax = single(width, 3.0)
    steps = trace.steps
    flops, bandwidth = trace.meta.get("peak_flops"), trace.meta.get("peak_bandwidth")
    rows = {"token budget": [(s.prefill_tokens + s.decode_tokens) / s.budget for s in steps]}
    if flops and all(s.flops is not None for s in steps):
        rows["peak FLOP/s"] = [(s.flops or 0) / s.duration / flops for s in steps]
    if bandwidth and all(s.bytes is not None for s in steps):
        rows["peak bandwidth"] = [(s.bytes or 0) / s.duration / bandwidth for s in steps]
    edges = [s.start for s in steps] + ([steps[-1].end] if steps else [])
    for k, (label, values) in enumerate(rows.items()):
        line = [100 * v for v in values] + [100 * v for v in values[-1:]]
        ax.step(
            edges,
            line,
            where="post",
            color=LINES[k],
            ls=STYLES[k % len(STYLES)],
            lw=1.3,
            label=label,
        )
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time (s)")
    ax.set_ylabel("share used (%)")
    finish(ax, trace)
    return figure


def fairness_figure(trace: Trace, width: float = 8.0) -> Figure:
    """Tokens served to each tenant over time, prompt and output tokens together."""
    figure, ax = single(width, 3.2)
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
        ax.step(
            times,
            total,
            where="post",
            color=LINES[k % len(LINES)],
            ls=STYLES[k % len(STYLES)],
            lw=1.6,
            label=legend_text(tenant),
        )
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time (s)")
    ax.set_ylabel("tokens served")
    finish(ax, trace)
    return figure
