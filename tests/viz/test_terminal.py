"""The timeline in a terminal: fits the width, shows the stall, copies as plain text."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest

from minichunk.core.trace import Trace
from minichunk.viz.columns import duration
from minichunk.viz.terminal import ASCII, UNICODE, render
from tests.viz.scenes import stall_scene

BOTH = {"whole prompts": stall_scene(), "chunked": stall_scene(300)}


def columns_of(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_asked(ascii: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    names = [
        "a very long request name indeed",
        "短い名前がここにあります長い",
        "x\x1b[2Jy",
        *map(str, range(8)),
    ]
    odd = stall_scene(1000, names=names)
    for width in (40, random.Random(seed).randint(41, 200), 80):
        for traces in (BOTH, odd):
            text = render(traces, width, ascii=ascii)
            assert max(map(columns_of, text.split("\n"))) <= width
            assert "\x1b" not in text
            assert not ascii or text.isascii()


def test_a_stall_is_as_long_as_it_was() -> None:
    width = 100
    text = render(BOTH["whole prompts"], width)
    lane = next(line for line in text.split("\n") if line.lstrip().startswith("0 "))
    stall = BOTH["whole prompts"].stalls()[0]
    share = (stall.gap - stall.floor) / BOTH["whole prompts"].steps[-1].end
    assert lane.count(UNICODE["stall"]) == pytest.approx(share * (width - 7), abs=2)
    assert f"gap of {stall.gap * 1e3:.0f} ms" in text


def test_says_where_the_numbers_come_from_and_what_the_signs_mean() -> None:
    text = render(BOTH, 90)
    assert text.count("simulated llama-2-7b on a100-80g-sxm") == 2
    for kind in ("prefill", "decode", "interference", "stall", "queued", "preempted"):
        assert f"{UNICODE[kind]} {kind}" in text
    assert "measured on NVIDIA A100" in render(stall_scene(clock="wall"), 90)


def test_short_stalls_stay_apart() -> None:
    chunked = stall_scene(1000)
    text = render(chunked, 200, ascii=True)
    lane = next(line for line in text.split("\n") if line.lstrip().startswith("0 "))
    runs = [run for run in lane.split(ASCII["decode"]) if ASCII["stall"] in run]
    assert len(runs) == sum(stall.request_id == "0" for stall in chunked.stalls())


def test_many_requests_show_those_that_stall_longest() -> None:
    text = render(stall_scene(num_decodes=60), 80, max_lanes=5)
    assert "and 56 more requests" in text


def test_colours_only_on_request_and_an_empty_trace_is_no_error() -> None:
    assert "\x1b[" in render(BOTH, 80, colour=True)
    assert "no stalls" in render(Trace(meta={"clock": "wall"}), 80)


def test_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="width=20"):
        render(BOTH, 20)


def moved(trace: Trace, to: float) -> Trace:
    """The same trace, with its first step at another time."""
    by = to - trace.steps[0].start
    trace.steps = [s._replace(start=s.start + by, end=s.end + by) for s in trace.steps]
    trace.events = [e._replace(time=e.time + by) for e in trace.events]
    for record in trace.requests.values():
        record.arrival += by
        record.token_times = [time + by for time in record.token_times]
        record.finish_time = None if record.finish_time is None else record.finish_time + by
    return trace


def times_on_the_axis(trace: Trace) -> list[str]:
    axis = render({"moved": trace}).splitlines()[-2]  # above the legend
    return re.split(r"  +", axis.strip())


def test_a_time_axis_that_begins_late_counts_from_its_start() -> None:
    start, middle, end = times_on_the_axis(moved(stall_scene(), to=1000.0))
    assert start == "1000 s"
    assert middle.startswith("+")
    assert end.startswith("+")
    assert middle != end


@pytest.mark.parametrize("start", [0.0, 0.0042, 0.6])
def test_a_time_axis_that_begins_soon_says_plain_times(start: float) -> None:
    trace = moved(stall_scene(), to=start)
    end = trace.steps[-1].end
    times = (start, (start + end) / 2, end)
    assert times_on_the_axis(trace) == [duration(time) for time in times]
