"""The command line: what it prints and writes, and that every mistake is one clear line."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_model import save_small_model

from minichunk.cli import build_parser, main
from minichunk.commands import file_name, split_policies, workload_from
from minichunk.core.request import PromptShape
from minichunk.core.trace import Trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: (exit status, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.SystemRandom().randrange(2**31)
    print(f"weights seed {seed}")
    return save_small_model(tmp_path_factory.mktemp("small-model"), seed)


# Help ---------------------------------------------------------------------------------------------


def test_help_is_quick_and_loads_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from minichunk.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    used = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        after = os.times()
        used.append(
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
        assert "HEAVY []" in done.stdout
        for command in ("demo", "generate", "simulate", "timeline", "export", "lab"):
            assert command in done.stdout
    assert min(used) < 0.5, f"processor seconds: {used}"


def test_python_m_minichunk_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minichunk", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert re.fullmatch(r"minichunk \d+\.\d+\.\d+\n", done.stdout)


def test_a_terminal_without_unicode_gets_question_marks_and_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minichunk", "simulate", "--policy", "continuous"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert b"gap of" in done.stdout
    done.stdout.decode("ascii")


def test_help_tells_each_engine_option_and_its_default(run: Run) -> None:
    from minichunk.core.config import EngineConfig

    status, out, _ = run("simulate", "--help")
    assert status == 0
    text = " ".join(out.split())
    config = EngineConfig()
    for said in (
        f"most tokens in one step (default: {config.max_num_batched_tokens})",
        f"most requests running at once (default: {config.max_num_seqs})",
        f"one block of the KV cache (default: {config.block_size})",
        f"for sampling (default: {config.seed})",
    ):
        assert said in text


# Mistakes -----------------------------------------------------------------------------------------


MISTAKES = {
    "no such command": (["fly"], "invalid choice: 'fly'"),
    "no such option": (["demo", "--colour"], "--colour"),
    "a chunk of nothing": (["demo", "--chunk-size", "0"], "'0' must be a whole number"),
    "an unknown policy": (["demo", "--policy", "hope"], "unknown policy 'hope'; known: "),
    "a policy twice": (["simulate", "--policy", "static,static"], "name each policy once"),
    "a wrong parameter": (["simulate", "--policy", "balanced(part=1)"], "no parameter part"),
    "an unknown GPU": (["simulate", "--gpu", "a1000"], "unknown gpu 'a1000': did you mean"),
    "an unknown shape": (["simulate", "--model", "lama"], "unknown model 'lama': did you mean"),
    "an unknown workload": (["simulate", "--workload", "rain"], "unknown workload 'rain'"),
    "a workload's argument": (
        ["simulate", "--workload", "poisson(speed=3)"],
        "poisson has no parameter speed; it has rate, num_requests,",
    ),
    "a missing workload": (["simulate", "--workload", "azure:gone.csv"], "gone.csv: No such file"),
    "a model too large": (
        ["simulate", "--model", "llama-2-70b", "--gpu", "t4"],
        "raise tensor_parallel",
    ),
    "an unknown order": (["simulate", "--order", "luck"], "unknown order 'luck'"),
    "a missing trace": (["timeline", "gone.jsonl"], "gone.jsonl: No such file"),
    "an unknown engine": (["export", "--engine", "tgi"], "invalid choice: 'tgi'"),
    "an unknown preset": (["export", "--engine", "vllm", "--preset", "x"], "unknown preset 'x'"),
    "a missing document": (["demo", "--document", "gone.txt"], "gone.txt: No such file"),
    "an unknown model": (["generate", "hi", "--model", "no/such"], "no model 'no/such'"),
    "a missing model file": (["generate", "hi", "--model", "gone.gguf"], "gone.gguf"),
    "an impossible temperature": (["generate", "hi", "--temperature", "-1"], "temperature=-1.0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_status_1(
    case: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = MISTAKES[case]
    status, out, err = run(*arguments)
    assert status == 1
    assert out == ""
    assert expected in err
    assert err.startswith("minichunk: ")
    assert err.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_damaged_model_is_one_line_and_status_1(
    run: Run, small_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + rng.randbytes(1000))
    folder = tmp_path / "broken"
    shutil.copytree(small_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: rng.randrange(8, weights.stat().st_size // 2)])
    for model in (gguf, folder):
        for command in (["generate", "hi"], ["demo", "--out", str(tmp_path / "out")]):
            status, _, err = run(*command, "--model", str(model), "--device", "cpu")
            assert status == 1
            assert model.name in err
            assert err.startswith("minichunk: ")
            assert err.count("\n") == 1


def test_a_full_disk_is_one_line_and_leaves_no_half_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minichunk.model import resolve
    from minichunk.model.hub import HubError

    def no_hub(*_: object) -> Path:
        raise HubError("not reachable")

    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "folder_from_hub", no_hub)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    status, _, err = run("generate", "hi", "--max-tokens", "1")
    assert status == 1
    last = err.splitlines()[-1]
    assert last.startswith("minichunk: cannot write the model into")
    assert "1 MB are free" in last
    assert "Traceback" not in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINICHUNK_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(["timeline", "gone.jsonl"])


def test_an_interruption_is_told_and_ends_with_130(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minichunk.commands.workload_from", interrupted)
    status, _, err = run("simulate")
    assert (status, err) == (130, "minichunk: interrupted\n")


# Simulate and timeline ----------------------------------------------------------------------------


def test_simulate_compares_policies_and_writes_page_and_traces(run: Run, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "run.jsonl"
    status, out, _ = run(
        "simulate", "--model", "llama-2-7b", "--gpu", "a100-80g-sxm", "--html", str(page),
        "--trace", str(trace), "--chunk-size", "1000", "--max-num-batched-tokens", "1024",
    )  # fmt: skip
    assert status == 0
    assert "simulated: Llama-2-7B on A100 80 GB SXM" in out
    assert "waiting for chunk 1/1 of request 10" in out
    assert "order fcfs · budget 1,024 · chunk 1,000 · slots 256" in out
    assert "Stall: a gap above 2 decode steps and above 50 ms." in out
    traces = {
        policy: Trace.load(tmp_path / f"run-{policy}.jsonl")
        for policy in ("continuous", "decode-first")
    }
    for policy, loaded in traces.items():
        loaded.validate()
        assert loaded.meta["policy"] == policy
        assert f"{loaded.metrics().itl.max * 1e3:.1f} ms" in out
    chunks = [s for s in traces["decode-first"].spans if s.kind == "prefill" and s.tokens == 1000]
    assert len(chunks) == 8
    text = page.read_text(encoding="utf-8")
    assert "continuous" in text
    assert "decode-first" in text


def test_simulate_one_policy_writes_the_trace_where_it_was_told_to(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "one.jsonl"
    workload = "poisson(rate=4, num_requests=20, prompt=(200, 900), output=30)"
    status, out, _ = run(
        "simulate", "--policy", "balanced(share=0.3)", "--workload", workload,
        "--trace", str(path), "--seed", "5",
    )  # fmt: skip
    assert status == 0
    assert "20 requests" in out
    trace = Trace.load(path)
    assert trace.meta["policy"] == "balanced(share=0.3)"
    assert trace.meta["seed"] == 5
    assert len(trace.requests) == 20


def test_simulate_reads_published_traces_and_notes_bad_rows(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,many,109\n"
        "2023-11-16 18:15:51.2224670,879,55\n"
    )
    status, out, _ = run("simulate", "--policy", "static", "--workload", f"azure:{file}")
    assert status == 0
    assert "2 requests" in out
    assert "1 bad rows left out" in out
    status, out, _ = run(
        "simulate", "--policy", "static", "--workload", f"azure:{file}", "--limit", "1"
    )
    assert "1 requests" in out


def test_workload_spellings() -> None:
    scene = workload_from("scene(num_decodes=3, prompt_tokens=70)")
    assert [len(spec.prompt) for spec in scene][-1] == 70
    assert len(scene) == 4
    drawn = workload_from("bursty(cv=2.0, num_requests=9, prompt=(100, 400), seed=3)")
    assert len(drawn) == 9
    assert all(isinstance(spec.prompt, PromptShape) for spec in drawn)
    assert len({len(spec.prompt) for spec in drawn}) > 1
    assert len(workload_from("closed-loop(num_users=5)")) == 5


def test_policies_are_split_at_commas_outside_of_brackets() -> None:
    text = "static, split-fuse(target=100, context_per_token=inf),decode-first"
    assert split_policies(text) == [
        "static",
        "split-fuse(target=100, context_per_token=inf)",
        "decode-first",
    ]
    assert file_name("decode-first, chunks of 256") == "decode-first-chunks-of-256"


def test_timeline_puts_several_traces_on_one_page(run: Run, tmp_path: Path) -> None:
    paths = []
    for policy in ("static", "continuous"):
        paths.append(str(tmp_path / f"{policy}.jsonl"))
        run("simulate", "--policy", policy, "--trace", paths[-1])
    status, out, _ = run("timeline", *paths)
    page = tmp_path / "static.html"
    assert status == 0
    assert out == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert '"static"' in text
    assert '"continuous"' in text

    other = tmp_path / "same.html"
    run("timeline", paths[0], paths[0], "-o", str(other))
    assert other.exists()


def test_a_file_that_is_no_trace_is_named_with_its_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("dear diary\n")
    status, _, err = run("timeline", str(path))
    assert status == 1
    assert f"{path}, line 1: not a line of a trace" in err
    assert not (tmp_path / "notes.html").exists()


# Export, lab, generate ----------------------------------------------------------------------------


def test_export_prints_flags_and_what_they_cannot_say(run: Run) -> None:
    status, out, _ = run("export", "--engine", "sglang", "--preset", "chat", "--order", "fair")
    assert status == 0
    assert "--chunked-prefill-size 512" in out
    assert "# - order fair: " in out


def test_lab_copies_notebooks_and_keeps_the_students_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shipped"
    source.mkdir()
    for name in ("01.ipynb", "02.ipynb"):
        (source / name).write_text(json.dumps({"cells": [], "nbformat": 4}))
    monkeypatch.setattr("minichunk.commands.notebooks_folder", lambda: source)
    target = tmp_path / "mine"
    target.mkdir()
    (target / "02.ipynb").write_text("my answers")
    status, out, _ = run("lab", "--to", str(target), "--copy-only")
    assert status == 0
    assert (target / "01.ipynb").read_text() == (source / "01.ipynb").read_text()
    assert (target / "02.ipynb").read_text() == "my answers"
    assert "kept" in out


def test_generate_streams_what_the_library_answers(run: Run, small_model: Path) -> None:
    from minichunk import LLM, SamplingParams

    model = str(small_model)
    arguments = ["--model", model, "--device", "cpu", "--dtype", "float32", "--max-tokens", "12"]
    llm = LLM(model, device="cpu", dtype="float32", num_blocks=64, quiet=True)
    params = SamplingParams(max_tokens=12, temperature=0.0)

    status, out, err = run("generate", "A lighthouse", "--raw", *arguments)
    assert status == 0
    answer = llm.generate("A lighthouse", params)[0]
    assert out == answer.text + "\n"
    assert f"[12 + {len(answer.token_ids)} tokens, time to first token" in err

    _, out, _ = run("generate", "A lighthouse", *arguments)
    messages = [{"role": "user", "content": "A lighthouse"}]
    assert out == llm.chat(messages, params).text + "\n"


# The README ---------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_path_in_the_readme_exists() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", README)
    named = re.findall(r"`((?:minichunk|tests|benchmarks|figures|notebooks)/[\w./]*)`", README)
    assert len(linked) > 2
    assert len(named) > 15
    for path in linked + named:
        assert path.startswith("https://") or (ROOT / path).exists(), path


def test_every_command_in_the_readme_parses() -> None:
    import shlex

    lines = re.findall(r"minichunk [a-z]+[^`\n|]*", README)
    known = ("demo", "generate", "simulate", "timeline", "export", "bench", "lab")
    commands = [line for line in lines if line.split()[1] in known]
    assert len(commands) >= 6
    for line in commands:
        build_parser().parse_args(shlex.split(line)[1:])
    for pip in ("pip install -e . && minichunk demo", "pip install -e '.[test]' && pytest"):
        assert f"```bash\n{pip}\n```" in README


def test_the_readmes_python_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minichunk.core import policies

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policies, "REGISTRY", dict(policies.REGISTRY))
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "timeline.html").exists()
    shown = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert len(shown) == 1
    assert capsys.readouterr().out.startswith(shown[0])
    both, trace = namespace["both"], namespace["trace"]
    gaps = [t.metrics().itl.max for t in both.traces.values()]  # type: ignore[attr-defined]
    assert gaps[0] > 4 * gaps[1]
    # The student's policy keeps prompts to 512 - 8 x 10 tokens a step while ten decode.
    chunks = [s.tokens for s in trace.spans if s.kind == "prefill" and s.request_id == "10"]  # type: ignore[attr-defined]
    assert max(chunks) == 432


def test_the_readme_lists_every_policy_and_order() -> None:
    from minichunk.core import orders, policies
    from minichunk.core.config import PRESETS

    listed = set(re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE))
    known = {
        name for name, p in policies.REGISTRY.items() if p.function.__module__ == policies.__name__
    }
    assert listed == known | set(orders.REGISTRY) & {
        "fcfs",
        "priority",
        "fair",
        "shortest",
        "deadline",
    }
    for preset in PRESETS:
        assert f"`{preset}`" in README


@pytest.mark.parametrize("command", [["simulate"], ["simulate", "--help"]])
def test_a_reader_that_goes_away_is_no_error(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has seen enough
    done = subprocess.run(
        [sys.executable, "-m", "minichunk", *command], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr.decode()) == (0, "")
