"""A model that every engine loads at once, and a small stall scene to serve on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from small_model import save_small_model

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.engines import ENGINES
from benchmarks.side_by_side.workloads import Case
from minichunk.core.request import RequestSpec

VOCAB_SIZE = 600


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Llama with heads of 32, the smallest that vLLM's attention takes."""
    return save_small_model(
        tmp_path_factory.mktemp("model"),
        random.SystemRandom().randrange(2**31),
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="session")
def scene() -> Case:
    """Three decode when a prompt of several chunks arrives."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"scene of seed {seed}")
    rng = random.Random(seed)

    def asked(prompt: int, output: int) -> RequestSpec:
        return RequestSpec(0.0, tuple(rng.choices(range(VOCAB_SIZE), k=prompt)), output)

    decoding = (asked(5, 30), asked(17, 20), asked(40, 25))
    return Case("S", "a small stall scene", 32, decoding, asked(90, 4))


@pytest.fixture(scope="session")
def options(model: Path, scene: Case) -> Callable[[str], Options]:
    """float32, so that every engine must find the same tokens."""

    def made(engine: str) -> Options:
        return Options(
            engine=engine,
            model=str(model),
            dtype="float32",
            threads=1,
            compiled=engine in ENGINES and ENGINES[engine].compiled,
            max_budget=64,
            max_num_seqs=4,
            max_model_len=128,
            kv_tokens=scene.num_tokens,
        )

    return made
