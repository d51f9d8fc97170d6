"""Figures from a trace alone: they say what the trace says, and are PNGs of a sensible size."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from minichunk.core.trace import Trace
from minichunk.viz import figures
from tests.viz.scenes import big_trace, stall_scene

WHOLE, CHUNKED = stall_scene(), stall_scene(1000)


def texts(figure: object) -> str:
    return "\n".join(
        text.get_text() for text in figure.findobj(match=lambda a: hasattr(a, "get_text"))
    )


def test_timeline_names_source_stalls_and_every_kind() -> None:
    figure = figures.timeline_figure({"whole prompts": WHOLE, "chunked": CHUNKED})
    said = texts(figure)
    assert said.count("simulated llama-2-7b on a100-80g-sxm") == 2
    stalls = WHOLE.stalls()
    assert f"{len(stalls)} stalls, the longest {max(s.gap for s in stalls) * 1e3:.0f} ms" in said
    for kind in figures.PALETTE:
        assert kind in said
    png = figures.to_png(figure)
    assert png.startswith(b"\x89PNG")
    assert len(png) < 150_000


def test_timeline_of_very_many_spans_is_quick_and_says_what_it_leaves_out() -> None:
    figure = figures.timeline_figure(big_trace(200, 4000))
    assert "140 other requests not shown" in texts(figure)
    assert len(figures.to_png(figure, dpi=60)) > 5_000


def test_itl_curve_ends_at_the_longest_gap() -> None:
    figure = figures.itl_figure({"whole": WHOLE, "chunked": CHUNKED})
    for line, trace in zip(figure.axes[0].lines, (WHOLE, CHUNKED), strict=True):
        longest = trace.metrics().itl.max
        assert max(line.get_xdata()) == pytest.approx(longest * 1e3)
        assert line.get_linestyle() in ("-", "--")


def test_tradeoff_has_a_labelled_point_per_chunk_size() -> None:
    sizes = (2000, 500, 1000)
    figure = figures.tradeoff_figure([stall_scene(size) for size in sizes] + [WHOLE])
    line = figure.axes[0].lines[0]
    expected = [stall_scene(size).metrics().itl.max * 1e3 for size in sorted(sizes)]
    assert list(line.get_xdata()[:3]) == pytest.approx(expected)
    said = texts(figure)
    assert all(label in said for label in ("500", "1,000", "2,000", "whole prompts"))


def test_roofline_draws_the_roof_only_where_it_is_known() -> None:
    assert len(figures.roofline_figure(CHUNKED).axes[0].lines) == 0
    known = stall_scene(1000)
    known.meta |= {"peak_flops": 312e12, "peak_bandwidth": 2.0e12}
    figure = figures.roofline_figure(known)
    assert len(figure.axes[0].lines) == 1
    dots = sum(len(points.get_offsets()) for points in figure.axes[0].collections)
    assert dots == len(known.steps)
    lines = figures.utilisation_figure(known).axes[0].lines
    assert [line.get_label() for line in lines] == ["token budget", "peak FLOP/s", "peak bandwidth"]
    assert max(lines[0].get_ydata()) <= 100


def test_fairness_ends_at_what_each_tenant_was_served() -> None:
    trace = stall_scene(1000)
    for i, record in enumerate(trace.requests.values()):
        record.tenant = "_hidden $x$" if i % 2 else "b"
    lines = figures.fairness_figure(trace).axes[0].lines
    ends = sorted(line.get_ydata()[-1] for line in lines)
    served = {"_hidden $x$": 0, "b": 0}
    for span in trace.spans:
        served[trace.requests[span.request_id].tenant] += span.tokens
    assert ends == sorted(served.values())
    figures.to_png(figures.fairness_figure(trace))


@pytest.mark.parametrize(
    "draw",
    [
        figures.timeline_figure,
        figures.itl_figure,
        figures.roofline_figure,
        figures.utilisation_figure,
        figures.fairness_figure,
    ],
)
def test_an_empty_trace_and_odd_names_are_no_error(draw: object) -> None:
    figures.to_png(draw(Trace(meta={"clock": "wall"})))
    odd = stall_scene(1000, names=["$a$", "_b", "c_{", *map(str, range(8))])
    odd.meta["policy"] = "$\\frac{"
    figures.to_png(draw(odd))


def test_the_palette_is_the_timelines() -> None:
    css = files("minichunk.viz").joinpath("static", "timeline.css").read_text()
    light = css[: css.index('[data-theme="dark"]')]
    declared = dict(re.findall(r"--mc-([\w-]+): (#\w+);", light))
    for kind, colour in figures.PALETTE.items():
        assert declared[kind] == colour
    assert declared["stall-tint"] == figures.STALL_TINT
