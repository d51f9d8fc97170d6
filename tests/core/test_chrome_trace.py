"""The Chrome trace opens: slices nest, arrows start and end inside slices, counters count."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from minichunk.core.chrome_trace import ENGINE, REQUESTS, chrome_trace, to_chrome
from minichunk.core.stalls import find_stalls
from minichunk.core.trace import Trace
from tests.viz.crowded import crowded_trace
from tests.viz.scenes import stall_scene


@pytest.fixture
def trace() -> Trace:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return crowded_trace(seed)
    return stall_scene(
        rng.choice([None, 300, 1000, 2500]), rng.randint(2, 12), rng.randint(2000, 9000)
    )


def events(trace: Trace, phase: str) -> list[dict]:
    return [event for event in chrome_trace(trace)["traceEvents"] if event["ph"] == phase]


def test_every_request_has_a_named_track(trace: Trace) -> None:
    named = [e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"]
    assert named == list(trace.requests)


def test_slices_of_a_track_nest(trace: Trace) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(trace, "X"):
        edge = (event["ts"], round(event["ts"] + event["dur"], 1))
        tracks.setdefault((event["pid"], event["tid"]), []).append(edge)
    for slices in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda edge: (edge[0], -edge[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices overlap without nesting"
            open_ends.append(end)


def test_decodes_and_chunks_are_all_there(trace: Trace) -> None:
    names = [event["name"] for event in events(trace, "X") if event["pid"] == REQUESTS]
    assert names.count("decode") == sum(s.tokens for s in trace.spans if s.kind == "decode")
    chunks = [name for name in names if name.startswith("chunk ")]
    assert len(chunks) == sum(span.kind == "prefill" for span in trace.spans)


def test_arrows_lead_from_each_stall_to_the_chunk_that_caused_it() -> None:
    trace = stall_scene(1000)
    stalls = find_stalls(trace)
    starts = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(stalls) > 0
    slices = events(trace, "X")
    threads = {request_id: i for i, request_id in enumerate(trace.requests, start=1)}

    def around(event: dict, name: str) -> bool:
        return any(
            s["tid"] == event["tid"] and s["pid"] == event["pid"] and s["name"].startswith(name)
            and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            for s in slices
        )  # fmt: skip

    for key, start in starts.items():
        assert around(start, "stall")
        assert around(ends[key], "chunk")
        assert ends[key]["tid"] == threads["10"]


def test_counters_follow_the_steps(trace: Trace) -> None:
    counters = events(trace, "C")
    use = [event["args"] for event in counters if event["name"] == "budget use"]
    assert use == [{"prefill": s.prefill_tokens, "decode": s.decode_tokens} for s in trace.steps]
    free = [event["args"]["free"] for event in counters if event["name"] == "free blocks"]
    assert free == [step.free_blocks for step in trace.steps]
    assert {event["pid"] for event in counters} == {ENGINE}


def test_writes_json_whole(trace: Trace, tmp_path: Path) -> None:
    path = to_chrome(trace, tmp_path / "run.json")
    assert json.loads(path.read_text()) == chrome_trace(trace)
    assert trace.to_chrome(tmp_path / "again.json").read_text() == path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.json", "run.json"]


def test_a_failed_write_leaves_the_old_file(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = to_chrome(trace, tmp_path / "run.json")
    before = path.read_text()

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("minichunk.core.chrome_trace.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        to_chrome(stall_scene(500), path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
