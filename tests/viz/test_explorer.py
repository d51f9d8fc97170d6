"""The explorer: every control simulates anew into the same widget, quickly, and never breaks."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from pathlib import Path

import pytest

from minichunk import workloads
from minichunk.sim.run import simulate
from minichunk.viz import explorer as module
from minichunk.viz.curve import Point, curve_svg
from minichunk.viz.explorer import WHOLE_PROMPTS, Explorer, Scene, Setting, run


def names(explorer: Explorer) -> list[str]:
    return list(explorer.timeline.traces)


def test_a_control_changes_what_the_same_timeline_shows() -> None:
    explorer = Explorer(b=None)
    timeline, before = explorer.timeline, explorer.timeline.payload
    explorer.controls["A"]["chunk_size"].value = 256
    assert explorer.timeline is timeline
    assert timeline.payload != before
    trace = timeline.traces[names(explorer)[0]]
    assert trace.meta["chunk_size"] == 256
    chunks = [span.tokens for span in trace.spans if span.kind == "prefill"]
    assert max(chunks) == 256


def test_shows_what_the_simulator_says() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    scene = Scene(rng.randint(1, 20), rng.choice(module.PROMPTS[:5]))
    setting = Setting("decode-first", "fcfs", rng.choice([128, 512, None]), rng.choice([512, 2048]))
    explorer = Explorer(scene, setting, None)
    expected = simulate(
        workloads.stall_scene(num_decodes=scene.num_decodes, prompt_tokens=scene.prompt_tokens),
        model=scene.model, gpu=scene.gpu, policy=setting.policy, chunk_size=setting.chunk_size,
        max_num_batched_tokens=setting.budget,
    )  # fmt: skip
    shown = explorer.timeline.traces[names(explorer)[0]]
    # The time that scheduling took is wall time, and differs from run to run.
    steps = [step._replace(scheduling_time=0.0) for step in shown.steps]
    assert steps == [step._replace(scheduling_time=0.0) for step in expected.steps]
    metrics = expected.metrics()
    assert f"{metrics.itl.p50 * 1e3:.1f} ms" in explorer.table.value
    assert f"{metrics.throughput:,.0f}" in explorer.table.value


def test_compares_two_schedulers_and_hides_the_second_on_request() -> None:
    explorer = Explorer()
    assert len(names(explorer)) == 2
    assert "continuous" in names(explorer)[1]
    explorer.compare.value = False
    assert len(names(explorer)) == 1
    assert explorer._row_b.layout.display == "none"


def test_recomputes_the_chapters_scene_within_150_ms() -> None:
    explorer = Explorer(Scene(10, 8000))
    busy, seconds = [], []
    for chunk_size in (256, 64, 1024, 2048, 4096, 1000, 128):
        began = time.process_time()
        explorer.controls["A"]["chunk_size"].value = chunk_size
        busy.append(time.process_time() - began)
        seconds.append(explorer.recompute_seconds)
    print(f"recompute in ms: {sorted(round(1e3 * s) for s in seconds)}")
    assert statistics.median(busy) <= 0.150
    # On a crowded machine the clock tells about the crowd; then processor time has to do.
    if os.getloadavg()[0] <= (os.cpu_count() or 1):
        assert min(seconds) <= 0.150


def test_an_impossible_choice_is_explained_and_the_picture_stays() -> None:
    explorer = Explorer(b=None)
    before = names(explorer)
    explorer.scene_controls["model"].value = "gpt-3-175b"
    assert "gpt-3-175b" in explorer.message.value.lower() or "GPT-3" in explorer.message.value
    assert names(explorer) == before
    explorer.scene_controls["model"].value = "llama-2-7b"
    assert explorer.message.value == ""


def test_several_controls_at_once_simulate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer()
    runs: list[Setting] = []
    monkeypatch.setattr(module, "run", lambda scene, s: (runs.append(s), run(scene, s))[1])
    explorer.set(num_decodes=4, chunk_size=256, b_policy="prefill-first")
    assert [s.policy for s in runs] == ["decode-first", "prefill-first"]
    assert len(next(iter(explorer.timeline.traces.values())).requests) == 5
    with pytest.raises(ValueError, match="unknown control 'colour'"):
        explorer.set(colour="red")


def test_a_trace_file_stands_in_for_a(tmp_path: Path) -> None:
    saved = run(Scene(3, 1000), Setting()).save(tmp_path / "run.jsonl")
    explorer = Explorer(trace=saved)
    assert names(explorer)[0] == "from the file"
    assert len(explorer.timeline.traces["from the file"].requests) == 4
    explorer.path.value = str(tmp_path / "<missing>.jsonl")
    assert "&lt;missing&gt;" in explorer.message.value
    assert names(explorer)[0].startswith("A: ")


def test_the_curve_has_a_point_per_chunk_size_and_todays_on_it() -> None:
    explorer = Explorer(Scene(10, 8000), Setting("decode-first", "fcfs", 512, 8192))
    assert explorer.curve.value.count('r="6.5"') == 2  # today's A and B, at once
    assert explorer.curve.value.count('r="3"') == 0
    points = explorer.finish_curve()
    assert [p.chunk_size for p in points] == list(module.CHUNK_SIZES)
    assert explorer.curve.value.count('r="3"') == len(points)
    # Larger chunks: longer gaps, and the long prompt starts sooner.
    gaps = [p.longest_gap for p in points if p.chunk_size != 1000]  # not a multiple of a tile
    assert gaps == sorted(gaps)
    assert points[0].longest_ttft > points[-1].longest_ttft
    known = next(p for p in points if p.chunk_size == 512)
    today = explorer._metrics[names(explorer)[0]]
    assert (known.longest_gap, known.longest_ttft) == (today.itl.max, today.ttft.max)
    # Another chunk size lies on the same curve: nothing is simulated again for it.
    explorer.controls["A"]["chunk_size"].value = 1024
    assert explorer._points == points


def test_in_a_notebook_the_curve_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CURVE_DELAY", 0.0)

    async def look() -> int:
        explorer = Explorer(Scene(2, 500), b=None)
        for _ in range(400):
            await asyncio.sleep(0.02)
            if not explorer._pending:
                break
        return explorer.curve.value.count('r="3"')

    expected = sum(c is None or c <= 500 for c in module.CHUNK_SIZES)
    assert asyncio.run(look()) == expected


def test_displays_with_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Explorer()._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "image/png" in data
    monkeypatch.setenv("MINICHUNK_WIDGETS", "0")
    bundle = Explorer()._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/html"].startswith("<iframe")


def test_knows_every_policy_and_order_and_whole_prompts() -> None:
    explorer = Explorer()
    for policy in explorer.controls["A"]["policy"].options:
        explorer.set(policy=policy, num_decodes=3, prompt_tokens=1000)
        assert explorer.message.value == ""
    assert explorer.setting("B") == WHOLE_PROMPTS


def test_curve_survives_no_points_and_names_with_markup() -> None:
    assert "no gap to trade" in curve_svg([], {})
    svg = curve_svg([], {"<b": Point(None, 0.1, 0.2)})
    assert "<b" not in svg.replace("<b ", "")
    assert "&lt;" in svg
