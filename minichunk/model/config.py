"""What the decoder must know about a model: sizes, biases, norms and rotary frequencies.

Read once from a Hugging Face configuration; nothing after this file sees one. Llama, Mistral, Qwen2
and Qwen3 (dense) are one and the same decoder with four switches, which is the idea shown here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minichunk.model.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

# "dynamic" and "longrope" change their frequencies with the length of the sequence, so that keys
# already in the cache would have to be rotated again.
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder-only transformer, in the words that the code uses.

    `inv_freq` holds the head_dim / 2 rotary frequencies in radians per position, and `rope_scale`
    multiplies both cosine and sine (1.0 except for YaRN). `sliding_window` is None where every
    token sees all tokens before it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    inv_freq: tuple[float, ...]
    rope_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied LM head counts once, biases and norms not at all."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + vocabulary

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes that one token's keys and values take in all layers together."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` (and the end-of-text tokens of `generation_config.json`)."""
        return cls.from_hf(read_hf_config(folder), eos_token_ids=read_eos_token_ids(folder))

    @classmethod
    def from_hf(cls, hf: PretrainedConfig, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
        """Translate a Transformers configuration; refuses what the decoder would compute wrongly.

        Raises:
            ModelError: an architecture, activation or kind of RoPE that is not supported.
        """
        model_type = hf.model_type
        if model_type not in SUPPORTED:
            raise ModelError(
                f"architecture {model_type!r} is not supported; "
                f"choose a dense model of one of: {', '.join(SUPPORTED)}"
            )
        if hf.hidden_act not in ("silu", "swish"):
            raise ModelError(f"activation {hf.hidden_act!r} is not supported, only 'silu' (SwiGLU)")
        num_heads = hf.num_attention_heads
        num_kv_heads = hf.num_key_value_heads or num_heads
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise ModelError(
                f"num_attention_heads={num_heads} is no multiple of "
                f"num_key_value_heads={num_kv_heads}; the configuration is broken"
            )
        inv_freq, rope_scale = rotary_frequencies(hf, head_dim)
        return cls(
            model_type=model_type,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=hf.rms_norm_eps,
            max_model_len=hf.max_position_embeddings,
            inv_freq=inv_freq,
            rope_scale=rope_scale,
            # Qwen2 always has biases on q, k, v; the others say so, for o as well.
            qkv_bias=model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
            output_bias=model_type != "qwen2" and bool(getattr(hf, "attention_bias", False)),
            mlp_bias=bool(getattr(hf, "mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            sliding_window=sliding_window(hf),
            eos_token_ids=eos_token_ids or as_token_ids(hf.eos_token_id),
            initializer_range=getattr(hf, "initializer_range", 0.02),
        )


def rotary_frequencies(hf: PretrainedConfig, head_dim: int) -> tuple[tuple[float, ...], float]:
    """The rotary frequencies [head_dim / 2] and the scale of cosine and sine.

    Scaled kinds come from Transformers' own initialisers. Raises ModelError for kinds that depend
    on the length of the sequence or rotate only a part of the head.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(getattr(hf, "rope_parameters", None) or {})
    if not rope:  # Transformers before version 5
        rope = {**(getattr(hf, "rope_scaling", None) or {}), "rope_theta": hf.rope_theta}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in SUPPORTED_ROPE:
        raise ModelError(
            f"RoPE type {kind!r} is not supported; supported are: {', '.join(SUPPORTED_ROPE)}"
        )
    partial = rope.get("partial_rotary_factor") or getattr(hf, "partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor={partial} is not supported, only whole heads")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def sliding_window(hf: PretrainedConfig) -> int | None:
    """How many tokens back a token can see, or None for all of them."""
    window = getattr(hf, "sliding_window", None)
    if window is None or not getattr(hf, "use_sliding_window", True):
        return None
    kinds = getattr(hf, "layer_types", None)
    return None if kinds and "sliding_attention" not in kinds else int(window)


def check_sliding_window(config: ModelConfig, max_model_len: int) -> None:
    """Refuse sequences longer than the window: attention here always looks at the whole past."""
    if config.sliding_window is not None and max_model_len > config.sliding_window:
        raise ModelError(
            f"this model attends to the last {config.sliding_window} tokens only, which is not "
            f"supported beyond that length; set max_model_len={config.sliding_window} or less "
            f"(it is {max_model_len})"
        )


def read_hf_config(folder: str | Path) -> PretrainedConfig:
    """Transformers' configuration object of a model folder. Remote code is never run."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder") from None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if kind not in SUPPORTED:  # asked first: AutoConfig may want remote code for unknown kinds
        raise ModelError(
            f"architecture {kind!r} of {path} is not supported; "
            f"choose a dense model of one of: {', '.join(SUPPORTED)}"
        )
    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Transformers raises many kinds for a damaged configuration
        raise ModelError(f"{path} is not a usable configuration: {one_line(error)}") from None


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """The tokens that end a text according to `generation_config.json`; empty if it says none."""
    try:
        text = (Path(folder) / "generation_config.json").read_text(encoding="utf-8")
        return as_token_ids(json.loads(text).get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return ()


def as_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's message squeezed into one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
