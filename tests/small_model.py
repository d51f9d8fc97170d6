"""A model folder for tests of the commands: random weights, a tokenizer, quick to load and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_small_model(folder: Path, seed: int, **changes: Any) -> Path:
    """A two-layer Llama over 600 tokens, with a tokenizer that reads bytes and a chat template.

    `changes` replace entries of its configuration.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from minichunk.model.tokenizer import stand_in_tokenizer

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 600,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = LlamaConfig(**{**shape, **changes})
    LlamaForCausalLM(config).save_pretrained(folder)
    stand_in_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder
