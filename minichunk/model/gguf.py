"""GGUF files: llama.cpp's single-file format, read into the same shape as a Hugging Face folder.

Weights are dequantised when they are read. Two things differ from Hugging Face and are undone here:
tensor names, and the order of the rows of q and k in Llama files, where llama.cpp interleaves the
two halves of each head because its rotary embedding turns neighbouring pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minichunk.model.config import one_line
from minichunk.model.errors import ModelError
from minichunk.model.tokenizer import PIECES, byte_level_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files call themselves llama
INTERLEAVED = ("llama",)  # architectures whose q and k rows llama.cpp reorders

OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Factors that llama.cpp stores for Llama 3.1 and later; the configuration says the same in words.
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GGUFFile:
    """A GGUF file as a source of tensors (`weights.TensorSource`), configuration and tokenizer."""

    def __init__(self, path: str | Path) -> None:
        import gguf

        self.description = str(path)
        if not Path(path).is_file():
            raise ModelError(f"{path} is missing")
        try:
            self._reader = gguf.GGUFReader(str(path))
        except Exception as error:  # the reader has no error type of its own
            raise ModelError(f"{path} is damaged or not a GGUF file: {one_line(error)}") from None
        self.architecture = self._field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture {self.architecture!r} of {path} is not supported; "
                f"choose a GGUF file of one of: {', '.join(ARCHITECTURES)}"
            )
        self._rope_factors: Any = None
        self._tensors = {}
        for tensor in self._reader.tensors:
            if tensor.name == ROPE_FACTORS:
                self._rope_factors = tensor
            else:
                self._tensors[hugging_face_name(tensor.name)] = tensor

    def _field(self, key: str, default: Any = None) -> Any:
        """A metadata value; without a default it must be there."""
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self.description} lacks the metadata field {key}")
            return default
        return field.contents()

    # Tensors -----------------------------------------------------------------------------------

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def get(self, name: str) -> Tensor:
        values = self._dequantised(self._tensors[name])
        if self.architecture in INTERLEAVED and ".self_attn." in name:
            if "q_proj" in name:
                return halves_apart(values, self._field("llama.attention.head_count"))
            if "k_proj" in name:
                return halves_apart(values, self._num_kv_heads())
        return values

    def _dequantised(self, tensor: Any) -> Tensor:
        from gguf.quants import dequantize

        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except Exception as error:
            raise ModelError(
                f"tensor {tensor.name} of {self.description} cannot be dequantised "
                f"({tensor.tensor_type.name}): {one_line(error)}"
            ) from None

    # Configuration -----------------------------------------------------------------------------

    def _num_kv_heads(self) -> int:
        heads = self._field(f"{self.architecture}.attention.head_count")
        return int(self._field(f"{self.architecture}.attention.head_count_kv", heads))

    def hf_config(self) -> dict[str, Any]:
        """What the model's `config.json` would say."""
        arch = self.architecture
        heads = int(self._field(f"{arch}.attention.head_count"))
        hidden_size = int(self._field(f"{arch}.embedding_length"))
        scaling = self._reader.get_field(f"{arch}.rope.scaling.type")
        if scaling is not None and scaling.contents() != "none":
            raise ModelError(
                f"RoPE scaling {scaling.contents()!r} of {self.description} is not supported for "
                "GGUF files; use the model's safetensors"
            )
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelError(f"{self.description} holds no token embedding (token_embd.weight)")
        config = {
            "model_type": arch,
            "architectures": [f"{arch.capitalize()}ForCausalLM"],
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": int(self._field(f"{arch}.feed_forward_length")),
            "num_hidden_layers": int(self._field(f"{arch}.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": self._num_kv_heads(),
            "head_dim": int(self._field(f"{arch}.attention.key_length", hidden_size // heads)),
            "rms_norm_eps": float(f"{self._field(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}"),
            "max_position_embeddings": int(self._field(f"{arch}.context_length")),
            "rope_theta": float(self._field(f"{arch}.rope.freq_base", 10000.0)),
            "rope_scaling": self._llama3_rope(),
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self._tensors,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "hidden_act": "silu",
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": self._token_id("eos"),
            "dtype": "bfloat16",
        }
        if arch == "qwen2":
            del config["attention_bias"]  # it always has biases on q, k and v
        return config

    def transformers_config(self) -> PretrainedConfig:
        """The same as a Transformers configuration object."""
        from transformers import AutoConfig

        values = self.hf_config()
        return AutoConfig.for_model(values.pop("model_type"), **values)

    def _token_id(self, which: str) -> int | None:
        field = self._reader.get_field(f"tokenizer.ggml.{which}_token_id")
        return None if field is None else int(field.contents())

    def _llama3_rope(self) -> dict[str, Any] | None:
        """Llama 3's scaling in the words of a configuration, checked against the stored factors."""
        if self._rope_factors is None:
            return None
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors = self._dequantised(self._rope_factors)
        theta = float(self._field("llama.rope.freq_base", 10000.0))
        head_dim = 2 * len(factors)
        rope = {**LLAMA3_ROPE, "factor": float(factors.max())}
        probe = LlamaConfig(  # type: ignore[call-arg]  # rope_theta: any version knows it
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=131072,
            rope_theta=theta,
            rope_scaling=dict(rope),
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](probe, torch.device("cpu"))
        plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if not torch.allclose(plain / factors, scaled, rtol=1e-3):
            raise ModelError(
                f"the RoPE factors of {self.description} are not those of Llama 3; "
                "use the model's safetensors"
            )
        return rope

    # Tokenizer ---------------------------------------------------------------------------------

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A fast tokenizer with special tokens and chat template, from the metadata.

        Byte-level BPE is built by us, since the cutting into pieces must be exact; other kinds are
        left to Transformers.
        """
        if self._field("tokenizer.ggml.model") != "gpt2":
            from transformers import AutoTokenizer

            path = Path(self.description)
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

        tokens = self._field("tokenizer.ggml.tokens")
        pairs = (merge.partition(" ") for merge in self._field("tokenizer.ggml.merges"))
        merges = [(first, second) for first, _, second in pairs]
        kinds = self._field("tokenizer.ggml.token_type", [1] * len(tokens))
        pre = self._field("tokenizer.ggml.pre", "gpt-2")
        if pre not in PIECES:
            raise ModelError(
                f"the pre-tokenizer {pre!r} of {self.description} is not known; "
                f"known are: {', '.join(PIECES)}"
            )
        template = self._reader.get_field("tokenizer.chat_template")
        roles = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        return byte_level_tokenizer(
            tokens,
            merges,
            pieces=PIECES[pre],
            control={text for text, kind in zip(tokens, kinds, strict=True) if kind == CONTROL},
            added={text for text, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED},
            roles={
                f"{role}_token": tokens[token_id]
                for role, key in roles
                if (token_id := self._token_id(key)) is not None
            },
            chat_template=None if template is None else template.contents(),
        )


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; others as they are."""
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{suffix}"
    return name


def halves_apart(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k, for weights [heads * dim, ...] and biases.

    There, row 2i of a head is the first of the pair that is rotated together and row 2i + 1 the
    second; in Hugging Face's order they are rows i and i + dim / 2.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
