"""The demo: a real stall, measured; tokens compared honestly; files whole or not there.

Most tests run the demo's own code on a small random model. The last ones run the command itself on
the real one and check the claim that this project is about.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_model import save_small_model

from minichunk import LLM, demo, demo_report
from minichunk.cli import main
from minichunk.core.engine import Engine
from minichunk.core.trace import Trace

CHUNK = 64
RUNS = {name: demo.knobs_for(name, CHUNK) for name in ("continuous", "decode-first")}
POOL = {"max_num_seqs": 11, "check_invariants": True}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.SystemRandom().randrange(2**31)
    print(f"weights seed {seed}")
    return save_small_model(tmp_path_factory.mktemp("small-model"), seed)


@pytest.fixture(scope="module")
def llm(small_model: Path) -> LLM:
    return LLM(small_model, device="cpu", num_blocks=1, quiet=True)


@pytest.fixture(scope="module")
def scene(llm: LLM) -> demo.Scene:
    return demo.make_scene(llm, CHUNK, prompt_tokens=500)


def served(llm: LLM, scene: demo.Scene, policy: str) -> Trace:
    knobs = {**POOL, **RUNS[policy], "num_blocks": scene.num_blocks()}
    return demo.serve(llm.new_engine(**knobs), scene)


@pytest.mark.parametrize("policy", RUNS)
def test_the_document_meets_ten_chats_that_decode_before_and_after_it(
    llm: LLM, scene: demo.Scene, policy: str
) -> None:
    trace = served(llm, scene, policy)
    trace.validate()
    assert trace.meta["clock"] == "wall"
    document = trace.requests[demo.DOCUMENT]
    chats = [record for name, record in trace.requests.items() if name != demo.DOCUMENT]
    assert len(chats) == 10
    for chat in chats:
        assert chat.token_times[scene.decoded_before - 1] <= document.arrival
        assert chat.token_times[-1] > document.token_times[0]
        assert len(chat.token_times) == scene.chat_output_tokens
    assert len(document.token_times) == scene.document_output_tokens
    assert not any(event.kind == "preempt" for event in trace.events)
    chunks = [s.tokens for s in trace.spans if s.request_id == "document" and s.kind == "prefill"]
    assert sum(chunks) == len(scene.document)
    assert max(chunks) == (len(scene.document) if policy == "continuous" else CHUNK)


def test_every_repeat_makes_the_same_plans(llm: LLM, scene: demo.Scene) -> None:
    traces = demo.measure(llm, scene, RUNS, repeats=2)
    for first, second in traces.values():
        assert [vars_of(span) for span in first.spans] == [vars_of(span) for span in second.spans]
        assert first.block_events == second.block_events


def vars_of(span: Any) -> tuple[Any, ...]:
    return tuple(getattr(span, name) for name in span.__slots__)


def test_other_policies_serve_the_scene_too(llm: LLM, scene: demo.Scene) -> None:
    for policy in ("static", "prefill-first", "balanced(share=0.5)", "alternating", "split-fuse"):
        knobs = {**POOL, **demo.knobs_for(policy, CHUNK), "num_blocks": scene.num_blocks()}
        figures = demo_report.run_figures(demo.serve(llm.new_engine(**knobs), scene))
        # A static batch lets the document in only when the chats are over; the figures say so.
        assert figures["chats_outlive_the_prefill"] == (policy != "static")


def test_the_median_run_is_one_of_the_runs() -> None:
    traces = [trace_with_gap(gap) for gap in (0.3, 0.9, 0.5)]
    assert demo.median_run(traces) is traces[2]
    assert demo.longest_chat_gap(traces[1]) == pytest.approx(0.9)
    assert demo.median_run(traces[:1]) is traces[0]


def trace_with_gap(gap: float) -> Trace:
    """Two chats and a document whose own gap is longer and must not count."""
    from minichunk.core.trace import RequestRecord

    trace = Trace()
    for name, longest in (("chat 1", gap), ("chat 2", gap / 2), (demo.DOCUMENT, 9.0)):
        record = RequestRecord(name, 0.0, 5, 3, token_times=[0.1, 0.1 + longest, 0.2 + longest])
        trace.requests[name] = record
    return trace


def test_a_document_of_ones_own(llm: LLM, rng: random.Random) -> None:
    text = "".join(rng.choices("abcdefgh \n", k=700))
    whole = demo.make_scene(llm, CHUNK, text)
    assert llm.tokenizer is not None
    assert text.strip() in llm.tokenizer.decode(whole.document)
    cut = demo.make_scene(llm, CHUNK, text, prompt_tokens=300)
    assert 290 <= len(cut.document) <= 310
    with pytest.raises(
        ValueError, match=r"the document has \d+ tokens .* takes 4096.*--prompt-tok"
    ):
        demo.make_scene(llm, CHUNK, "x" * 5000)


# Tokens -------------------------------------------------------------------------------------------


def test_float32_gives_the_same_tokens_and_another_outcome_would_be_told(
    llm: LLM, small_model: Path, scene: demo.Scene
) -> None:
    traces = demo.recheck_in_float32(str(small_model), "cpu", scene, RUNS)
    figures = demo_report.recheck_figures(traces)
    assert figures["differences"] == {}
    assert figures["requests"] == 4
    assert figures["document_tokens"] == 200

    flipped = traces["decode-first"].requests["chat 2"].output_token_ids
    assert flipped is not None
    flipped[5] += 1
    assert demo_report.recheck_figures(traces)["differences"] == {"chat 2": 5}


def test_a_difference_is_explained_by_the_logits_of_both_tokens(
    llm: LLM, scene: demo.Scene, rng: random.Random
) -> None:
    first, second = served(llm, scene, "continuous"), served(llm, scene, "continuous")
    name, place = rng.choice(["chat 4", demo.DOCUMENT]), rng.randrange(3, 10)
    one, two = first.requests[name].output_token_ids, second.requests[name].output_token_ids
    assert one is not None
    assert two is not None
    assert one == two
    two[place] = (two[place] + 1) % 600

    tokens = demo_report.compare_tokens(llm, scene, {"a": first, "b": second})["b"]
    difference = tokens["first_difference"]
    assert tokens["same_requests"] == 10
    assert (difference["request"], difference["position"]) == (name, place)
    prompt = scene.document if name == demo.DOCUMENT else scene.chats[3]
    logits = llm.executor.prompt_logits([*prompt, *one[:place]]).float()
    assert difference["logits"] == [float(logits[one[place]]), float(logits[two[place]])]
    assert difference["gap"] == pytest.approx(difference["logits"][0] - difference["logits"][1])

    figures = {
        "tokens": {"requests": 11, "outputs": 99, "b": tokens},
        "model": {"dtype": "bfloat16"},
        "runs": {"a": {}, "b": {}},
        "float32": None,
    }
    line = next(demo_report.token_lines(figures))
    assert f"The first to differ is {name}, at output token {place + 1}" in line
    assert f"{abs(difference['gap']):.3g} apart" in line


def test_the_spacing_of_bfloat16_is_that_of_its_mantissa(llm: LLM) -> None:
    import torch

    for logit in (0.7, 1.0, 17.4, 250.0):
        here = torch.tensor(logit, dtype=torch.bfloat16)
        after = torch.nextafter(here, torch.tensor(1e9, dtype=torch.bfloat16))
        assert demo_report.spacing_at(float(here), "bfloat16") == float(after) - float(here)


# The command --------------------------------------------------------------------------------------


def arguments(model: Path, out: Path) -> list[str]:
    return [
        "demo", "--model", str(model), "--device", "cpu", "--repeats", "1",
        "--chunk-size", str(CHUNK), "--prompt-tokens", "400", "--out", str(out),
        "--json", str(out / "figures.json"),
    ]  # fmt: skip


def test_the_command_prints_a_table_and_names_the_files_it_wrote(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(small_model, tmp_path)) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = ["continuous", f"decode-first, chunks of {CHUNK}"]
    assert list(figures["runs"]) == names
    for name in names:
        run = figures["runs"][name]
        assert run["longest_stall_cause"] in out
        assert run["chats_outlive_the_prefill"]
        assert max(run["longest_chat_gaps"]) == run["chat_itl"]["max"]
    assert "document: time to first token" in out
    assert figures["float32"]["differences"] == {}
    assert "exactly the same in every run" in out or figures["model"]["dtype"] == "float32"

    written = {path.name for path in tmp_path.iterdir()} - {"figures.json"}
    traces = {"continuous.jsonl", f"decode-first-chunks-of-{CHUNK}.jsonl"}
    assert written == {"timeline.html", "timeline.png"} | traces
    assert all(name in out for name in written)
    for name in traces:
        trace = Trace.load(tmp_path / name)
        trace.validate()
        assert demo.longest_chat_gap(trace) == pytest.approx(
            figures["runs"][trace.meta["name"]]["chat_itl"]["max"]
        )
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_more_stalls_are_explained_where_the_longest_became_shorter() -> None:
    def lines(ratio: float, stalls: int) -> list[str]:
        runs = {"continuous": {"stalls": 10}, "chunks": {"stalls": stalls}}
        return demo_report.stall_lines({"runs": runs, "longest_gap_ratios": {"chunks": ratio}})

    assert lines(9.0, 0) == ["A stall is a gap above 2 decode steps and 50 ms."]
    assert "chunks has more of them (176 against 10)" in lines(9.0, 176)[1]
    assert len(lines(0.5, 176)) == 1


def test_an_interruption_leaves_no_file(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rng: random.Random,
) -> None:
    step, left = Engine.step, rng.randrange(1, 60)

    def interrupted(engine: Engine) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert main(arguments(small_model, tmp_path)) == 130
    assert capsys.readouterr().err.endswith("minichunk: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_writing_leaves_whole_files_only(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: str, target: Any) -> None:
        if str(target).endswith(".jsonl"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    assert main(arguments(small_model, tmp_path)) == 130
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.html", "timeline.png"}


def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("minichunk.llm.LLM", loaded)
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "picture").write_bytes(bytes([0xFF, 0xD8, 0xFF, 0xE0]))
    for wrong, expected in (
        (["--out", str(tmp_path / "file")], "file: File exists"),
        (["--document", str(tmp_path / "picture")], "picture is not a text file in UTF-8"),
        (["--policy", "balanced(part=3)"], "policy 'balanced' has no parameter part"),
    ):
        given = wrong if "--out" in wrong else [*wrong, "--out", str(tmp_path / "out")]
        assert main(["demo", *given]) == 1
        assert expected in capsys.readouterr().err


# The real model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`minichunk demo --json` as a newcomer runs it, in a process of its own."""
    out = tmp_path_factory.mktemp("real")
    before = os.times()
    command = [sys.executable, "-m", "minichunk", "demo", "--device", "cpu"]
    command += ["--out", str(out), "--json", str(out / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    figures: dict[str, Any] = json.loads((out / "figures.json").read_text())
    after = os.times()
    figures["processor_seconds"] = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    figures["stderr"] = done.stderr
    return figures


def test_the_longest_gap_is_at_least_four_times_as_long_without_chunks(
    real: dict[str, Any],
) -> None:
    whole, chunked = real["runs"].values()
    assert whole["knobs"]["policy"] == "continuous"
    assert chunked["knobs"]["chunk_size"] == 256
    assert whole["chats_outlive_the_prefill"]
    assert chunked["chats_outlive_the_prefill"]
    assert 1900 <= real["scene"]["document_tokens"] <= 2300
    # The quietest run of each: what else the machine does adds to the longest of nine short steps
    # more often than to one long step.
    assert min(whole["longest_chat_gaps"]) / min(chunked["longest_chat_gaps"]) >= 4.0
    assert real["longest_gap_ratios"]["decode-first, chunks of 256"] >= 3.0
    assert "chunk 1/1 of request document" in whole["longest_stall_cause"]


def test_float32_tokens_of_the_real_model_are_the_same(real: dict[str, Any]) -> None:
    if real["model"]["dtype"] == "float32":
        chunked = real["tokens"]["decode-first, chunks of 256"]
        assert chunked["same_requests"] == real["tokens"]["requests"]
    else:
        assert real["float32"]["differences"] == {}
        assert real["float32"]["outputs"] > 50


def test_the_real_demo_stays_within_two_minutes_of_two_cores(real: dict[str, Any]) -> None:
    # Processor time, because other work on the machine may slow the clock but not the demo.
    assert real["processor_seconds"] < 2 * 120
    assert "warning" not in real["stderr"].lower()
