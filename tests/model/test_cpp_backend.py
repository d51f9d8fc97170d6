"""The decoder on the C++ kernels: the default on a CPU, built when a model is loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minichunk.core.request import SamplingParams
from minichunk.kernels import _cpp, backend
from minichunk.llm import LLM
from minichunk.model.errors import ModelError
from tests.required import needs

from .tiny import config_of, random_prompt

pytestmark = needs("compiler", _cpp.cpp_problem())
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def load(**options: object) -> LLM:
    fixed = {"device": "cpu", "num_blocks": 40, "seed": 7, "check_invariants": True, "quiet": True}
    return LLM(config_of("llama"), **{**fixed, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_default_on_a_cpu(dtype: str) -> None:
    assert load(dtype=dtype).executor.backend == "cpp"
    assert load(dtype="float16").executor.backend == "torch"


def test_tokens_equal_those_of_the_torch_backend(rng: random.Random) -> None:
    """Long answers beside chunks of prompts, so that most steps mix both."""
    prompts = [random_prompt(rng, rng.randrange(1, 120)) for _ in range(4)]
    tokens = [
        [output.token_ids for output in load(dtype="float32", backend=b, chunk_size=9).generate(
            prompts, GREEDY
        )]
        for b in ("torch", "cpp")
    ]  # fmt: skip
    assert tokens[0] == tokens[1]


@pytest.fixture
def nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As on a machine that has just been set up; gives the folder where kernels will be kept."""
    cached = (_cpp.library, _cpp._function, _cpp.cpp_problem, backend._check_cpp)
    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path / "cache"))
    for function in cached:
        function.cache_clear()
    yield tmp_path / "cache" / "kernels"
    for function in cached:
        function.cache_clear()


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_builds_the_kernels_and_the_first_request_none(
    dtype: str, nothing_is_built: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    llm = load(dtype=dtype, chunk_size=9)
    built = {path.name.split("-")[0] for path in nothing_is_built.iterdir()}
    assert {"decode_attention", "rms_norm", "rope_and_cache", "swiglu"} <= built
    monkeypatch.setattr(_cpp, "_build", None)  # which it would call
    prompts = [random_prompt(rng, length) for length in (1, 2, 50)]
    outputs = llm.generate(prompts, GREEDY)
    assert [len(output.token_ids) for output in outputs] == [GREEDY.max_tokens] * 3


def test_a_kernel_that_cannot_be_built_is_one_line_when_the_model_is_loaded(
    nothing_is_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _cpp.cpp_problem()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(
            ModelError, match=r"kernel \w+ cannot be built: .*; use backend='torch'"
        ):
            load(dtype="float32")
    assert load(dtype="float32").executor.backend == "cpp"


# What is said where torch serves instead ----------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], **options: object) -> str:
    llm = load(**{"dtype": "float32", "quiet": False, **options})
    assert llm.executor.backend == "torch"
    return " ".join(capsys.readouterr().err.split())


def test_a_missing_compiler_is_said_once(
    nothing_is_built: Path, no_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "slower than it could be: the C++ kernels need g++, which is not installed here"
    assert said(capsys).count(expected) == 1


def test_a_cache_folder_that_takes_nothing_is_said(
    nothing_is_built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_is_built.parent.write_text("in the way")
    line = said(capsys)
    assert "slower than it could be: the C++ kernel swiglu cannot be built: " in line
    assert "MINICHUNK_CACHE" in line


def test_nothing_is_said_where_no_compiler_would_help(
    nothing_is_built: Path,
    no_compiler: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "slower" not in said(capsys, backend="torch")
    assert "slower" not in said(capsys, dtype="float16")
    assert "slower" not in said(capsys, quiet=True)
    monkeypatch.setattr(sys, "platform", "darwin")
    _cpp.cpp_problem.cache_clear()
    assert "slower" not in said(capsys)
