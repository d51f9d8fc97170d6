"""The decoder computes what Transformers computes, whatever the architecture and the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from minichunk.core.request import SamplingParams
from minichunk.kernels._cpp import cpp_problem
from minichunk.llm import LLM
from minichunk.model.config import ModelConfig
from minichunk.model.executor import ModelExecutor
from minichunk.model.weights import SafetensorsFolder, load_weights
from tests.required import needs

from .tiny import ARCHITECTURES, CPU_BACKENDS, random_prompt, reference_tokens

TinyModel = Callable[[str], tuple[PreTrainedModel, Path]]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_transformers(
    name: str, backend: str, tiny_model: TinyModel, rng: random.Random
) -> None:
    reference, folder = tiny_model(name)
    llm = LLM(
        folder, dtype="float32", device="cpu", backend=backend, chunk_size=19, num_blocks=200,
        quiet=True, check_invariants=True,
    )  # fmt: skip
    prompts = [random_prompt(rng, length) for length in (1, 2, 33, 150)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        assert (llm.executor.prompt_logits(prompt) - expected).abs().max() < 1e-4
        assert list(output.token_ids) == reference_tokens(reference, prompt, 20)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_logits_do_not_depend_on_chunks_or_batch_mates(
    backend: str, tiny_model: TinyModel, rng: random.Random
) -> None:
    """The logits that the engine samples from, not only their argmax."""
    _, folder = tiny_model("qwen3")
    llm = LLM(folder, dtype="float32", device="cpu", backend=backend, num_blocks=200, quiet=True)
    prompt = random_prompt(rng, 61)
    seen: list[torch.Tensor] = []
    original = llm.executor.decoder.logits

    def recording(batch: object, kv_layers: object) -> torch.Tensor:
        logits = original(batch, kv_layers)  # type: ignore[arg-type]
        for chunk, row in zip(batch.sampled, logits, strict=True):  # type: ignore[attr-defined]
            if chunk.request_id == "watched":
                seen.append(row)
        return logits

    llm.executor.decoder.logits = recording  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    for chunk_size, mates in ((None, 0), (7, 0), (16, 3), (1, 1)):
        engine = llm.new_engine(chunk_size=chunk_size, check_invariants=True)
        for _ in range(mates):
            engine.add_request(random_prompt(rng, 40), params)
        engine.add_request(prompt, params, request_id="watched")
        while engine.has_unfinished_requests():
            engine.step()
    runs = torch.stack(seen).view(4, 5, -1)
    assert (runs - runs[0]).abs().max() < 1e-4


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_bfloat16_runs_and_stays_close_to_float32(
    backend: str, tiny_model: TinyModel, rng: random.Random
) -> None:
    _, folder = tiny_model("llama")
    prompt = random_prompt(rng, 50)
    exact, rounded = (
        LLM(folder, dtype=dtype, device="cpu", backend=backend, num_blocks=20, quiet=True)
        .executor.prompt_logits(prompt)
        .float()
        for dtype in ("float32", "bfloat16")
    )
    assert (rounded - exact).norm() / exact.norm() < 0.05


def test_packed_and_plain_weights_multiply_alike(tiny_model: TinyModel, rng: random.Random) -> None:
    """Packed weights are opaque: compare through the whole decoder."""
    _, folder = tiny_model("llama-biases-tied")
    config = ModelConfig.from_folder(folder)
    cpu = torch.device("cpu")
    plain, packed = (
        load_weights(SafetensorsFolder(folder), config, cpu, torch.float32, packed=packed)
        for packed in (False, True)
    )
    assert not plain.lm_head.packed
    assert packed.lm_head.packed == torch.backends.mkldnn.is_available()
    prompt = random_prompt(rng, 70)
    first, second = (
        ModelExecutor(config, weights).prompt_logits(prompt) for weights in (plain, packed)
    )
    assert (first - second).abs().max() < 1e-4


def test_compiled_pieces_compute_the_same(
    tiny_model: TinyModel, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    """With plain weights as on a GPU; a graph over shapes serves long and short steps."""
    reference, folder = tiny_model("llama")
    llm = LLM(folder, dtype="float32", device="cpu", backend="torch", compile=True, num_blocks=50)
    assert "the first steps are slow" in capsys.readouterr().err
    prompts = [random_prompt(rng, length) for length in (5, 130)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with mock.patch.object(
        llm.executor.decoder, "_after", wraps=llm.executor.decoder._after
    ) as used:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference_tokens(reference, prompt, 8)
    assert used.call_count >= 8


@needs("compiler", cpp_problem())
def test_the_cpp_backend_has_nothing_left_to_compile(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = tiny_model("llama")
    llm = LLM(folder, dtype="float32", device="cpu", backend="cpp", compile=True, num_blocks=50)
    assert "changes nothing here" in capsys.readouterr().err
    assert llm.executor.decoder._after is None
    assert llm.executor.decoder.weights.lm_head.packed == torch.backends.mkldnn.is_available()
