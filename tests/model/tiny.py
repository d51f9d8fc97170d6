"""Small random models made by Transformers, as model folders, and ways to run them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from minichunk.kernels._cpp import cpp_problem
from tests.required import needs

CPU_BACKENDS = (
    "torch",
    pytest.param("cpp", marks=needs("compiler", cpp_problem())),
)
VOCAB_SIZE = 301
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough for logits that differ
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    """A Transformers configuration by the name of what is special about it."""
    sizes = {**SIZES, **changes}
    if name == "llama":
        return LlamaConfig(**sizes)
    if name == "llama-3-rope":
        return LlamaConfig(**sizes, rope_parameters=dict(LLAMA3_ROPE))
    if name == "llama-biases-tied":
        return LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    if name == "mistral":
        return MistralConfig(**sizes, sliding_window=None, head_dim=40)
    if name == "qwen2":
        return Qwen2Config(**sizes)
    if name == "qwen2-yarn":
        return Qwen2Config(**sizes, rope_parameters=dict(YARN_ROPE))
    if name == "qwen3":
        return Qwen3Config(**sizes, head_dim=32)
    raise KeyError(name)


ARCHITECTURES = (
    "llama",
    "llama-3-rope",
    "llama-biases-tied",
    "mistral",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
)


def build(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Transformers' own model with random weights, eager attention, float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():  # biases start at 0 and norms at 1, where mistakes would not show
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def reference_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation by Transformers' `generate`, end-of-text ignored."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
