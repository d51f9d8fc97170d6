"""Weights that do not fit are refused by name, and only safetensors are ever read."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from minichunk.llm import LLM
from minichunk.model.config import ModelConfig
from minichunk.model.errors import ModelError
from minichunk.model.weights import RandomTensors, SafetensorsFolder, check_source, load_weights

from .tiny import random_prompt, save

TinyModel = Callable[[str], tuple[PreTrainedModel, Path]]


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a tiny model that may be damaged."""
    return Path(shutil.copytree(tiny_model("llama")[1], tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    """The one line that a user sees."""
    with pytest.raises(ModelError) as caught:
        LLM(folder, device="cpu", num_blocks=4, quiet=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_and_a_single_file_are_the_same(
    tiny_model: TinyModel, tmp_path: Path, rng: random.Random
) -> None:
    model, single = tiny_model("llama")
    sharded = save(model, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    prompt = random_prompt(rng, 20)
    first, second = (
        LLM(path, dtype="float32", device="cpu", num_blocks=4, quiet=True).executor.prompt_logits(
            prompt
        )
        for path in (single, sharded)
    )
    assert torch.equal(first, second)


def test_a_missing_shard_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    sharded = save(tiny_model("llama")[0], tmp_path / "sharded", max_shard_size="100KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    assert victim.name in refusal(sharded)


def test_an_index_cannot_point_outside_its_folder(tiny_model: TinyModel, tmp_path: Path) -> None:
    sharded = save(tiny_model("llama")[0], tmp_path / "sharded", max_shard_size="100KB")
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    assert "outside" in refusal(sharded)


def test_tensors_that_do_not_fit_are_all_named(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(5)

    edit(folder, change)
    message = refusal(folder)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.9.mlp.up_proj.weight" in message
    assert "model.norm.weight is [5] instead of [96]" in message


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "header"])
def test_a_damaged_file_is_one_clear_line(folder: Path, damage: str, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: rng.randrange(100, len(content))],
            "garbage": rng.randbytes(1000),
            "empty": b"",
            "header": content[:8] + b"!" + content[9:],
        }[damage]
    )
    assert "model.safetensors" in refusal(folder)


def test_pickles_are_never_read(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return (Path.touch, (marker,))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "safetensors" in refusal(folder)
    assert not marker.exists()


def test_random_weights_are_seeded_and_have_every_tensor(tiny_model: TinyModel) -> None:
    config = ModelConfig.from_folder(tiny_model("qwen3")[1])
    check_source(RandomTensors(config), config)
    cpu = torch.device("cpu")
    first, again, other = (
        load_weights(RandomTensors(config, seed), config, cpu, torch.float32) for seed in (5, 5, 6)
    )
    assert torch.equal(first.layers[2].down.weight, again.layers[2].down.weight)
    assert not torch.equal(first.layers[2].down.weight, other.layers[2].down.weight)
    assert not torch.equal(first.layers[1].down.weight, first.layers[2].down.weight)


def test_names_match_what_transformers_saves(tiny_model: TinyModel) -> None:
    for name in ("llama-biases-tied", "qwen2", "qwen3"):
        _, path = tiny_model(name)
        check_source(SafetensorsFolder(path), ModelConfig.from_folder(path))


def test_a_folder_without_weights_says_what_it_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert re.search(r"no model\.safetensors", refusal(folder))
