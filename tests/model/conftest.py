"""Model folders that several tests share, and a seed that is fresh in each run and printed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from transformers.utils import logging

from . import tiny

logging.disable_progress_bar()


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # shown by pytest if the test fails
    return random.Random(seed)


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """`tiny_model("qwen3")`: Transformers' model and the folder it was saved to."""
    built: dict[str, tuple[PreTrainedModel, Path]] = {}

    def get(name: str) -> tuple[PreTrainedModel, Path]:
        if name not in built:
            model = tiny.build(tiny.config_of(name), seed=random.randrange(2**32))
            built[name] = (model, tiny.save(model, tmp_path_factory.mktemp(name)))
        return built[name]

    return get
