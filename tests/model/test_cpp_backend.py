"""The decoder on the C++ kernels: the default on a CPU, and what happens if one cannot be built."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from minichunk.core.request import SamplingParams
from minichunk.kernels import _cpp
from minichunk.llm import LLM
from minichunk.model.errors import ModelError

from .tiny import config_of, random_prompt

pytestmark = pytest.mark.skipif(bool(_cpp.cpp_problem()), reason=_cpp.cpp_problem())
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def load(**options: object) -> LLM:
    return LLM(
        config_of("llama"), device="cpu", num_blocks=40, seed=7, check_invariants=True, quiet=True,
        **options,
    )  # fmt: skip


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
def nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has just been set up: an empty cache folder."""
    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path))
    for forget in (_cpp.library.cache_clear, _cpp.kernel.cache_clear):
        forget()
    yield
    for forget in (_cpp.library.cache_clear, _cpp.kernel.cache_clear):
        forget()


def test_a_kernel_that_cannot_be_built_is_one_line_and_the_engine_goes_on(
    nothing_is_built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    llm = load(dtype="float32")
    prompt = random_prompt(rng, 20)
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(ModelError, match=r"kernel \w+ cannot be built: .*use backend='torch'"):
            llm.generate([prompt], GREEDY)
    llm.engine.step()  # says that the request was cancelled
    assert not llm.engine.has_unfinished_requests()
    [output] = llm.generate([prompt], GREEDY)
    [expected] = load(dtype="float32", backend="torch").generate([prompt], GREEDY)
    assert output.token_ids == expected.token_ids
