"""GGUF files give the same model as the safetensors they were made from."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minichunk.llm import LLM
from minichunk.model.errors import ModelError
from minichunk.model.gguf import LAYER_NAMES, OUTER_NAMES, halves_apart
from minichunk.model.tokenizer import byte_level_tokenizer, stand_in_tokenizer

from .tiny import build, config_of, random_prompt

VOCAB_SIZE = 320  # a stand-in tokenizer needs a token for every byte
NAMES = {hf: name for name, hf in {**OUTER_NAMES, **LAYER_NAMES}.items()}


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k: the two rows that are rotated together stand side by side."""
    halves = rows.view(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: PreTrainedModel, quantised: bool = False) -> Path:
    """A file as llama.cpp's converter would write it."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        factors = plain / LlamaRotaryEmbedding(config).inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    tokenizer = stand_in_tokenizer(config.vocab_size)
    tokens = [*tokenizer.convert_ids_to_tokens(range(config.vocab_size - 1)), "hi"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = value
        if arch == "llama" and "q_proj" in name:
            rows = interleaved(value, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            rows = interleaved(value, config.num_key_value_heads)
        array = rows.detach().numpy().copy()
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(**changes: object) -> PreTrainedModel:
    seed = random.randrange(2**32)
    return build(config_of("llama", vocab_size=VOCAB_SIZE, **changes), seed)


def load(path: Path) -> LLM:
    return LLM(path, dtype="float32", device="cpu", num_blocks=8, quiet=True)


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "qwen2", "qwen3"])
def test_logits_equal_the_original(name: str, tmp_path: Path, rng: random.Random) -> None:
    model = build(config_of(name, vocab_size=VOCAB_SIZE), rng.randrange(2**32))
    llm = load(write_gguf(tmp_path / "model.gguf", model))
    prompt = random_prompt(rng, 60)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert (llm.executor.prompt_logits(prompt) - expected).abs().max() < 1e-4


def test_quantised_weights_are_close_to_the_original(tmp_path: Path, rng: random.Random) -> None:
    model = tiny_llama()
    llm = load(write_gguf(tmp_path / "model.gguf", model, quantised=True))
    prompt = random_prompt(rng, 30)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    difference = llm.executor.prompt_logits(prompt) - expected
    assert 0 < difference.norm() / expected.norm() < 0.1


def test_llama_3_rope_is_recognised_by_its_factors(tmp_path: Path, rng: random.Random) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_llama(rope_parameters=rope, max_position_embeddings=131072, head_dim=64)
    llm = load(write_gguf(tmp_path / "model.gguf", model))
    prompt = random_prompt(rng, 100)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert (llm.executor.prompt_logits(prompt) - expected).abs().max() < 1e-4


def test_the_tokenizer_is_the_files_own(tmp_path: Path) -> None:
    llm = load(write_gguf(tmp_path / "model.gguf", tiny_llama()))
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    text = "hi~ 12  34\n\n5 🎉 你好"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    tokens = tokenizer.convert_ids_to_tokens(token_ids)
    assert tokens[0] == "hi"  # merged
    assert tokens[2:7] == ["Ġ", "1", "2", "Ġ", "Ġ"]
    assert tokenizer.encode("<|im_end|>") == [2] == [tokenizer.eos_token_id]
    assert llm.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode("hi")
    assert llm.model_config.eos_token_ids == (2,)


def test_halves_apart_undoes_the_interleaving() -> None:
    rows = torch.randn(6 * 16, 5)
    assert torch.equal(halves_apart(interleaved(rows, 6), 6), rows)
    assert torch.equal(halves_apart(interleaved(rows[:, 0], 6), 6), rows[:, 0])


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "cut header", "cut tensors"])
def test_a_damaged_file_is_one_clear_line(damage: str, tmp_path: Path, rng: random.Random) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama())
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "garbage": rng.randbytes(5000),
                "cut header": content[: rng.randrange(4, 3000)],
                "cut tensors": content[: len(content) - rng.randrange(1000, 50000)],
            }[damage]
        )
    with pytest.raises(ModelError, match=r"model\.gguf") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_merges_of_tokens_that_do_not_exist_are_one_clear_line() -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        byte_level_tokenizer(["a", "b"], [("a", "b")])


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="mamba"):
        load(tmp_path / "model.gguf")
