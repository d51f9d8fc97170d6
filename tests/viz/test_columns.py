"""The payload says exactly what the trace says."""

from __future__ import annotations

import json
import random

import pytest

from minichunk.core.stalls import find_stalls, gaps
from minichunk.core.trace import BlockEvent, Trace
from minichunk.viz.columns import as_named, columns, headline, pane
from tests.viz.scenes import stall_scene


@pytest.fixture
def trace() -> Trace:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return stall_scene(
        rng.choice([None, 300, 1000, 2500]), rng.randint(2, 14), rng.randint(1000, 9000)
    )


def test_rows_become_columns_of_equal_length(trace: Trace) -> None:
    p = pane("x", trace)
    assert p["requests"]["id"] == list(trace.requests)
    for part, rows in (("steps", trace.steps), ("spans", trace.spans), ("events", trace.events)):
        assert {len(column) for column in p[part].values()} == {len(rows)}
    times = [t for record in trace.requests.values() for t in record.token_times]
    assert p["requests"]["token_times"] == pytest.approx(times, abs=1e-7)
    assert p["requests"]["token_offsets"][-1] == len(times)
    json.dumps(p, allow_nan=False)


def test_chunks_are_numbered_from_one_to_n(trace: Trace) -> None:
    spans = pane("x", trace)["spans"]
    long = len(trace.requests) - 1
    numbers = [
        (i, n)
        for lane, i, n in zip(spans["request"], spans["chunk"], spans["chunks"], strict=True)
        if lane == long and i
    ]
    assert numbers == [(i, len(numbers)) for i in range(1, len(numbers) + 1)]


def test_stalls_are_those_of_the_metrics(trace: Trace) -> None:
    stalls, found = pane("x", trace)["stalls"], find_stalls(trace)
    assert stalls["text"] == [stall.describe() for stall in found]
    assert stalls["start"] == pytest.approx([stall.start for stall in found], abs=1e-7)
    for excess, stall in zip(stalls["excess"], found, strict=True):
        assert excess == pytest.approx(stall.gap - stall.floor, abs=1e-6)


def test_gaps_without_a_known_floor_are_not_called_interference(trace: Trace) -> None:
    trace.steps = [step._replace(decode_floor=None, num_decodes=0) for step in trace.steps]
    assert all(gap.floor is None for gap in gaps(trace))
    shown = pane("x", trace)["gaps"]
    for start, end, excess in zip(shown["start"], shown["end"], shown["excess"], strict=True):
        step = next(s for s in trace.steps if abs(s.end - end) < 1e-6)
        assert excess == pytest.approx(end - start - step.duration, abs=1e-6)


def test_block_runs_give_back_the_blocks_in_order() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    trace = stall_scene()
    trace.block_events = [
        BlockEvent(0, "alloc", "0", tuple(rng.sample(range(40), rng.randint(1, 30))))
        for _ in range(20)
    ]
    blocks = pane("x", trace)["blocks"]
    for i, event in enumerate(trace.block_events):
        runs = blocks["runs"][blocks["offsets"][i] : blocks["offsets"][i + 1]]
        unrolled = [
            b
            for first, n in zip(runs[::2], runs[1::2], strict=True)
            for b in range(first, first + n)
        ]
        assert tuple(unrolled) == event.blocks


def test_too_many_blocks_are_left_out_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minichunk.viz.columns.MAX_BLOCK_RUNS", 3)
    p = pane("x", stall_scene())
    assert p["blocks"] is None
    assert any("block pool is not drawn" in note for note in p["notes"])


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"clock": "simulated", "model": "m", "device": "g"}, "simulated m on g"),
        ({"clock": "simulated"}, "simulated"),
        ({"clock": "wall", "device": "cpu", "model": "m"}, "measured on cpu, m"),
        ({"clock": "wall", "device": "cuda", "device_name": "H100"}, "measured on H100"),
        ({}, "measured on an unnamed device"),
    ],
)
def test_the_headline_always_says_measured_or_simulated(meta: dict, words: str) -> None:
    assert headline(meta) == words


def test_refuses_what_is_not_a_trace() -> None:
    with pytest.raises(ValueError, match="non-empty dict"):
        as_named({})
    with pytest.raises(ValueError, match=r"traces\['a'\] is a int"):
        columns({"a": 3})  # type: ignore[dict-item]
