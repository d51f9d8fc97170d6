"""Figures and tables, from traces whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.side_by_side import report
from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.measures import agreement, measures
from benchmarks.side_by_side.recording import Recording
from benchmarks.side_by_side.runner import Measured, Results, ratio, rotated
from benchmarks.side_by_side.workloads import Case
from minichunk.core.request import RequestSpec
from minichunk.core.trace import Trace

BATCH = Case("B", "two at once", 8, (RequestSpec(0.0, (1, 2), 4),) * 2)
LATE = Case("L", "a late one", 8, (RequestSpec(0.0, (1, 2), 9),) * 2, RequestSpec(0, (5,), 1))


def batch_run(step: float, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> Trace:
    """Both requests together, each step taking `step` seconds."""
    recording = Recording(8, {"name": "x"})
    for name in "01":
        recording.arrive(name, BATCH.requests[0], 0.0)
    for i, token in enumerate(tokens):
        count = 2 if i == 0 else 1
        both = dict.fromkeys("01", token)
        recording.step(i * step, (i + 1) * step, [("0", count), ("1", count)], both)
    return recording.trace


def late_run(long_step: float) -> Trace:
    """Steps of 10 ms, and one of `long_step` in which the late prompt is computed."""
    recording, now = Recording(8, {"name": "x"}), 0.0
    for name in "01":
        recording.arrive(name, LATE.requests[0], 0.0)
    for i in range(9):
        count = 2 if i == 0 else 1
        chunks, tokens = [("0", count), ("1", count)], {"0": i, "1": i}
        took = 0.01
        if i == 8:
            assert LATE.late is not None
            recording.arrive("2", LATE.late, now)
            chunks, tokens, took = [*chunks, ("2", 1)], {**tokens, "2": 5}, long_step
        recording.step(now, now + took, chunks, tokens)
        now += took
    return recording.trace


def measured(engine: str, runs: dict[str, list[Trace]]) -> Measured:
    return Measured({engine.split("-")[0]: "1.0"}, 12.4, 3.6, 0.0, runs)


@pytest.fixture
def results() -> Results:
    options = Options("minichunk", "/models/tiny", "float32", 2, False, 8, 2, 16, 32)
    engines = {
        "minichunk": measured(
            "minichunk",
            {
                "B": [batch_run(step) for step in (0.5, 0.1, 0.25)],
                "L": [late_run(seconds) for seconds in (0.3, 0.2, 0.4)],
            },
        ),
        "vllm": measured(
            "vllm",
            {
                "B": [batch_run(step, (1, 2, 3, 9)) for step in (0.5, 0.5, 0.5)],
                "L": [late_run(0.6), late_run(0.9), late_run(0.5)],
            },
        ),
        "vllm-compiled": measured("vllm-compiled", {}),
    }
    return Results([BATCH, LATE], options, 3, engines, ["transformers, B: it died"])


def test_throughput_counts_output_tokens_from_arrival_to_last_token() -> None:
    (figure,) = measures(BATCH)
    assert figure.label == "throughput"
    assert figure.of(batch_run(0.25)) == pytest.approx(8 / 1.0)


def test_a_stall_scene_is_measured_by_the_gap_of_those_decoding_and_the_late_ones_wait() -> None:
    gap, wait = measures(LATE)
    trace = late_run(0.4)
    trace.validate()
    assert gap.of(trace) == pytest.approx(0.4)
    assert wait.of(trace) == pytest.approx(0.4)
    assert not gap.more_is_better


def test_a_ratio_above_one_is_always_in_minichunks_favour(results: Results) -> None:
    (throughput,), (gap, _) = measures(BATCH), measures(LATE)
    assert ratio(results, "vllm", BATCH, throughput) == pytest.approx(0.5 / 0.25)
    assert ratio(results, "vllm", LATE, gap) == pytest.approx(0.6 / 0.3)
    assert ratio(results, "minichunk", BATCH, throughput) is None
    # Compiled engines are compared with minichunk compiled, which was not measured here.
    assert ratio(results, "vllm-compiled", BATCH, throughput) is None


def test_the_table_has_median_spread_and_ratio(results: Results) -> None:
    head, *body = report.rows(results)
    assert head == ["workload", "figure", "minichunk", "vllm", "vllm-compiled"]
    assert body[0] == [
        "B: two at once", "throughput, tokens/s", "8 (4 to 20)", "4 (4 to 4) 2.00×", "–",
    ]  # fmt: skip
    assert body[1][1:] == ["longest gap, s", "0.3 (0.2 to 0.4)", "0.6 (0.5 to 0.9) 2.00×", "–"]
    named = {line[1]: line[2:] for line in body}
    assert named["start-up, s"] == ["12", "12", "12"]
    assert named["warm-up, s"] == ["4", "4", "4"]
    # 3 of 4 tokens of the batch and all of the scene agree; nothing is known of the last engine.
    assert named["same first 16 tokens as minichunk"] == ["100%", "88%", "–"]


def test_the_median_run_is_the_one_that_is_drawn(results: Results) -> None:
    chosen = results.engines["minichunk"].median_run(LATE)
    assert chosen is results.engines["minichunk"].runs["L"][0]
    assert results.engines["vllm-compiled"].median_run(LATE) is None


def test_agreement_ends_at_the_first_difference() -> None:
    ours = batch_run(1.0, (1, 2, 3, 4))
    assert agreement(ours, batch_run(2.0, (1, 2, 3, 4))) == 1.0
    assert agreement(ours, batch_run(1.0, (1, 9, 3, 4))) == 0.25
    assert agreement(ours, batch_run(1.0, (9, 2, 3, 4))) == 0.0


def test_what_is_written_tells_the_same(results: Results, tmp_path: Path) -> None:
    written = report.write(results, tmp_path, str(tmp_path / "figures.json"))
    assert [path.name for path in written] == ["side-by-side.md", "L.html", "figures.json"]
    text = written[0].read_text(encoding="utf-8")
    assert "| B: two at once | throughput, tokens/s | 8 (4 to 20) | 4 (4 to 4) 2.00× | – |" in text
    assert "2 threads for each engine, float32, model tiny" in text
    assert "Left out: transformers, B: it died" in text
    page = written[1].read_text(encoding="utf-8")
    assert '"name": "vllm"' in page or '"name":"vllm"' in page
    figures = json.loads(written[2].read_text(encoding="utf-8"))
    vllm = figures["engines"]["vllm"]["figures"]["L"]["longest gap"]
    assert median(vllm["values"]) == pytest.approx(0.6)
    assert vllm["times_as_fast"] == pytest.approx(2.0)
    assert figures["engines"]["vllm-compiled"]["compared_with"] is None


def test_two_builds_of_torch_are_both_named(results: Results) -> None:
    results.engines["minichunk"].versions["torch"] = "2.1"
    results.engines["vllm"].versions["torch"] = "2.1+cpu"
    assert "minichunk 1.0, torch 2.1, torch 2.1+cpu, vllm 1.0." in report.circumstances(results)


def test_engines_that_disagree_are_doubted(results: Results) -> None:
    assert report.doubts(results) == []
    results.engines["vllm"].runs["B"] = [batch_run(0.5, (9, 9, 9, 9))]
    results.engines["vllm"].runs["L"] = []
    (doubt,) = report.doubts(results)
    assert doubt.startswith("vllm has only 0% of its first tokens in common with minichunk")


def test_every_engine_is_first_in_some_round() -> None:
    names = ["a", "b", "c"]
    orders = [rotated(names, repeat) for repeat in (1, 2, 3, 4)]
    assert [order[0] for order in orders] == ["b", "c", "a", "b"]
    assert all(sorted(order) == names for order in orders)
    assert rotated([], 2) == []
