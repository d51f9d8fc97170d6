"""The whole engine on the Triton kernels gives the tokens that it gives on torch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minichunk.core.request import SamplingParams
from minichunk.llm import LLM

from ..tiny import build, config_of, random_prompt, save

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 4

# What attention, norms, RoPE, the cache write, SwiGLU and sampling would be in torch.
TORCH_WAYS = (
    "scaled_dot_product", "softmax", "bmm", "rsqrt", "pow", "mean", "cos", "sin", "index_put",
    "silu", "sigmoid", "argmax", "layer_norm", "rms_norm", "scatter", "index_copy", "addcmul",
    "linalg_vector_norm", "max", "mkldnn",
)  # fmt: skip


@pytest.fixture(params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, rng: random.Random) -> Path:
    """Three query heads on one KV head, head dim 80: neither a power of two."""
    changes = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = config_of(request.param, **changes)
    config.head_dim = 80
    return save(build(config, rng.randrange(2**32)), tmp_path / "model")


def load(folder: Path, backend: str, **knobs: Any) -> LLM:
    return LLM(
        folder, dtype="float32", device=DEVICE, backend=backend, quiet=True,
        block_size=16, num_blocks=40, check_invariants=True, **knobs,
    )  # fmt: skip


def shuffled(llm: LLM, rng: random.Random) -> LLM:
    """The same, with block tables in random order."""
    queue = llm.engine.scheduler.pool.free_queue
    blocks = list(queue)
    rng.shuffle(blocks)
    queue.clear()
    queue.update(dict.fromkeys(blocks))
    return llm


def test_tokens_equal_those_of_the_torch_backend(folder: Path, rng: random.Random) -> None:
    """Chunks of 7 start in the middle of blocks and share steps with decodes."""
    prompts = [random_prompt(rng, length) for length in (1, 16, 17, 30)]
    params = [
        SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True),
        *[SamplingParams(max_tokens=COUNT, temperature=0.8, seed=i) for i in range(3)],
    ]
    tokens = []
    for backend in ("torch", "triton"):
        llm = shuffled(load(folder, backend, chunk_size=7, max_num_batched_tokens=16), rng)
        llm.executor.kv.storage.fill_(float("nan"))
        tokens.append([output.token_ids for output in llm.generate(prompts, params)])
        steps = llm.trace.steps
        assert any(step.prefill_tokens and step.decode_tokens for step in steps)
    assert tokens[0] == tokens[1]


class Recorder(TorchDispatchMode):
    """Notes the name of every torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def operations(llm: LLM, prompt: list[int]) -> set[str]:
    with Recorder() as recorder:
        llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    names = {name.split(".")[0].strip("_") for name in recorder.names}
    return {name for name in names if name.startswith(TORCH_WAYS)}


def test_no_torch_operation_does_a_kernels_work(folder: Path, rng: random.Random) -> None:
    prompt = random_prompt(rng, 20)
    assert operations(load(folder, "triton", cuda_graphs=False), prompt) == set()
    assert operations(load(folder, "torch"), prompt) >= {
        "scaled_dot_product_attention",
        "rsqrt",
        "addcmul",
        "index_copy",
        "max",
        "mkldnn::_linear_pointwise",
    }


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_graphs_give_the_tokens_of_eager_steps(folder: Path, rng: random.Random) -> None:
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(5)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    eager, graphs = (
        [
            output.token_ids
            for output in load(folder, "triton", cuda_graphs=on).generate(prompts, params)
        ]
        for on in (False, True)
    )
    assert graphs == eager
