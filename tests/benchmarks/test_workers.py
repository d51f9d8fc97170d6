"""Engines in real worker processes, on a tiny model: the same tokens, valid traces, clear ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.client import Worker, WorkerError
from benchmarks.side_by_side.command import with_compiled
from benchmarks.side_by_side.engines import (
    VLLM_PYTHON,
    chosen_engines,
    environment,
    interpreter,
    usable_cores,
)
from benchmarks.side_by_side.runner import Results, run
from benchmarks.side_by_side.worker import compile_seconds
from benchmarks.side_by_side.workloads import AFTER_TOKENS, Case
from minichunk.cli import main
from minichunk.core.trace import Trace
from tests.required import unavailable

Making = Callable[[str], Options]
HERE = ["minichunk", "transformers", "transformers-cb"]


@pytest.fixture(scope="module")
def vllm_python() -> str | None:
    return os.environ.get(VLLM_PYTHON)


@pytest.fixture(scope="module")
def results(
    options: Making, scene: Case, tmp_path_factory: pytest.TempPathFactory, vllm_python: str | None
) -> Results:
    """One round of the small scene on every engine that is here, vLLM among those named."""
    return run(
        [*HERE, "vllm"],
        [scene],
        options,
        repeats=1,
        out=tmp_path_factory.mktemp("bench"),
        vllm_python=vllm_python,
        say=print,
    )


@pytest.fixture(params=[*HERE, "vllm"])
def trace(request: pytest.FixtureRequest, results: Results, vllm_python: str | None) -> Trace:
    if request.param == "vllm" and not vllm_python:
        unavailable("vllm", f"{VLLM_PYTHON} names no interpreter with vLLM")
    assert request.param in results.engines, results.failures
    (made,) = results.engines[request.param].runs["S"]
    return made


def test_every_request_is_served_to_its_end(trace: Trace, scene: Case) -> None:
    trace.validate()
    specs = [*scene.requests, scene.late]
    assert list(trace.requests) == [str(i) for i in range(len(specs))]
    for spec, record in zip(specs, trace.requests.values(), strict=True):
        assert spec is not None
        assert record.prompt_tokens == len(spec.prompt)
        assert len(record.token_times) == record.max_tokens == spec.output_tokens
        computed = sum(s.tokens for s in trace.spans if s.request_id == record.request_id)
        assert computed == len(spec.prompt) + spec.output_tokens - 1


def test_all_engines_find_the_same_tokens_in_float32(trace: Trace, results: Results) -> None:
    (ours,) = results.engines["minichunk"].runs["S"]
    for request_id, record in ours.requests.items():
        assert record.output_token_ids == trace.requests[request_id].output_token_ids, request_id


def test_the_late_prompt_comes_after_so_many_tokens_and_in_chunks(
    trace: Trace, scene: Case
) -> None:
    *decoding, late = trace.requests.values()
    had = [sum(time <= late.arrival for time in record.token_times) for record in decoding]
    assert min(had) == AFTER_TOKENS
    chunks = [s.tokens for s in trace.spans if s.request_id == "3" and s.kind == "prefill"]
    if trace.meta["name"] == "transformers":  # a static batch: it waits until all have finished
        assert chunks == [90]
        assert late.token_times[0] > max(record.token_times[-1] for record in decoding)
    else:
        assert len(chunks) >= 3
        assert max(s.prefill_tokens + s.decode_tokens for s in trace.steps) <= scene.budget
        assert late.token_times[0] < max(record.token_times[-1] for record in decoding)


def test_steps_do_not_overlap_and_every_token_comes_at_the_end_of_one(trace: Trace) -> None:
    ends = {step.end for step in trace.steps}
    for record in trace.requests.values():
        assert ends.issuperset(record.token_times)


def test_an_engine_that_is_not_here_is_named_and_the_others_go_on(
    results: Results, vllm_python: str | None
) -> None:
    assert [name for name in results.engines if name != "vllm"] == HERE
    if not vllm_python:
        (failure,) = results.failures
        assert "vllm needs an environment of its own" in failure
        assert "make_vllm_environment DIR" in failure
    for measured in results.engines.values():
        assert measured.start_seconds > 0
        assert measured.warm_up_seconds > 0
        assert measured.versions["torch"]


@pytest.fixture
def worker(options: Making, tmp_path: Path) -> Iterator[Worker]:
    made = Worker(options("minichunk"), sys.executable, tmp_path / "log", tmp_path / "cache")
    yield made
    made.close()


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_idles_quietly_and_its_death_is_one_line(
    worker: Worker, scene: Case, tmp_path: Path
) -> None:
    trace = worker.run(scene, tmp_path / "trace.jsonl")
    assert trace.meta["name"] == "minichunk"
    assert Trace.load(tmp_path / "trace.jsonl") == trace
    time.sleep(0.3)  # threads of OpenMP spin for a moment before they sleep
    used = cpu_seconds(worker.process.pid)
    time.sleep(0.5)
    assert cpu_seconds(worker.process.pid) - used < 0.1
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"minichunk, S: its process ended with status -9"):
        worker.run(scene, tmp_path / "trace.jsonl")
    with pytest.raises(WorkerError, match="status -9"):  # and again, without waiting
        worker.run(scene, tmp_path / "trace.jsonl")


def test_a_worker_that_cannot_load_says_why(options: Making, tmp_path: Path) -> None:
    wrong = Options(**{**vars(options("minichunk")), "model": str(tmp_path / "nothing")})
    with pytest.raises(WorkerError, match=r"minichunk, starting: ModelError: no model .*nothing"):
        Worker(wrong, sys.executable, tmp_path / "log", tmp_path / "cache")


def test_a_worker_that_takes_too_long_is_ended(options: Making, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"minichunk, starting: no answer in 0.1 s"):
        Worker(options("minichunk"), sys.executable, tmp_path / "l", tmp_path / "c", timeout=0.1)


def test_an_interpreter_that_lacks_everything_is_told_with_its_last_words(
    options: Making, tmp_path: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'no such module here' >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(WorkerError, match=r"ended with status 3: no such module here .*log"):
        Worker(options("minichunk"), str(fake), tmp_path / "log", tmp_path / "cache")


def test_all_engines_get_the_same_threads_and_no_cache_of_compiled_code(tmp_path: Path) -> None:
    for name in chosen_engines(["minichunk", "vllm-compiled", "transformers-cb"]):
        variables = environment(name, sys.executable, 3, tmp_path)
        assert variables["OMP_NUM_THREADS"] == "3"
        assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


def test_both_ways_of_compiling_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"_compile.compile_inner": [1.0, 2.0], "fullgraph_capture": [4.0], "codegen": [99.0]}
    utils = SimpleNamespace(compilation_time_metrics=times)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    assert compile_seconds() == 7.0
    del times["_compile.compile_inner"]
    assert compile_seconds() == 4.0
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert compile_seconds() == 0.0


def test_without_an_affinity_all_cores_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == [0, 1, 2]


def test_unknown_engines_and_interpreters_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine 'sglang'; known: minichunk, "):
        chosen_engines(["minichunk", "sglang"])
    assert chosen_engines(["vllm", "vllm"]) == ["vllm"]
    with pytest.raises(ValueError, match=r"vllm: /nowhere/python is not a Python interpreter"):
        interpreter("vllm", "/nowhere/python")


def test_the_command_measures_and_writes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["bench", "--engines", "minichunk", "--workloads", "W1", "--repeats=2"]
    command += ["--model", str(model), "--dtype", "float32", "--threads", "1", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "throughput" in printed.out
    assert "round 2 of 2: W1 minichunk: throughput" in printed.err
    assert "W1: 10 requests" in (out / "side-by-side.md").read_text(encoding="utf-8")
    traces = {path.name for path in (out / "traces").iterdir()}
    assert traces == {"minichunk-W1-1.jsonl", "minichunk-W1-2.jsonl"}
    # No compiled code stays behind, or the next bench would not have to compile.
    assert {path.name for path in out.iterdir()} == {"side-by-side.md", "traces", "logs"}


def test_the_command_tells_mistakes_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    given = ["bench", "--model", str(model), "--out", str(tmp_path)]
    for wrong, words in (
        (["--engines", "gguf"], "unknown engine 'gguf'"),
        (["--workloads", "W7"], "unknown workload 'W7'"),
        (["--workloads", "W3"], "the longest request has 2049 tokens, the model has room for 512"),
        (["--engines", "vllm", "--workloads", "W1"], "no engine could be measured: vllm needs an"),
    ):
        assert main([*given, *wrong]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("minichunk: ")
        assert words in error


def test_compiled_adds_the_modes_that_exist() -> None:
    named = ["minichunk", "vllm", "transformers"]
    assert with_compiled(named, False) == named
    assert with_compiled(named, True) == [*named, "minichunk-compiled", "vllm-compiled"]


def test_without_a_checkout_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minichunk.commands.__file__", str(tmp_path / "minichunk" / "commands.py"))
    assert main(["bench"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"minichunk: no folder benchmarks/side_by_side in {tmp_path}")
    assert "use a clone of minichunk" in error
