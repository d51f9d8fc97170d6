"""Model shapes by slug: the handful of numbers that fix what a step computes and moves.

Weights, KV bytes and operations of a decoder-only transformer follow from its widths alone; the
cost model needs no weights. Figures are those of the published model configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

from minichunk.sim.hardware import unknown_slug

BYTES_PER_ELEMENT = 2  # bfloat16 or float16, for weights, activations and KV cache alike


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. `gated_mlp`: three MLP matrices (SwiGLU) instead of two."""

    slug: str
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied_embeddings: bool = False
    gated_mlp: bool = True

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[str, int, int], ...]:
        """The matrix products of one layer as (name, inputs, outputs)."""
        up = 2 * self.ffn_size if self.gated_mlp else self.ffn_size
        return (
            ("qkv_proj", self.hidden_size, self.query_size + 2 * self.kv_size),
            ("o_proj", self.query_size, self.hidden_size),
            ("up_proj", self.hidden_size, up),
            ("down_proj", self.ffn_size, self.hidden_size),
        )

    @property
    def linear_params(self) -> int:
        """Parameters of the matrix products of all layers."""
        return self.num_layers * sum(inputs * outputs for _, inputs, outputs in self.matrices)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding and, unless they are tied, the LM head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_params(self) -> int:
        return self.linear_params + self.embedding_params

    @property
    def weight_bytes(self) -> int:
        return self.num_params * BYTES_PER_ELEMENT

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_size * BYTES_PER_ELEMENT


_TABLE = (
    ModelShape("smollm2-135m", "SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True),
    ModelShape("qwen2.5-0.5b", "Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, True),
    ModelShape("qwen3-0.6b", "Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True),
    ModelShape("qwen2.5-7b", "Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    ModelShape("qwen3-8b", "Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
    ModelShape("llama-2-7b", "Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000),
    ModelShape("llama-2-13b", "Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000),
    ModelShape("llama-33b", "LLaMA-33B", 60, 6656, 52, 52, 128, 17920, 32000),
    ModelShape("llama-2-70b", "Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000),
    ModelShape("llama-3-8b", "Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    ModelShape("llama-3-70b", "Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    ModelShape("mistral-7b", "Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000),
    ModelShape("yi-34b", "Yi-34B", 60, 7168, 56, 8, 128, 20480, 64000),
    ModelShape("falcon-180b", "Falcon-180B", 80, 14848, 232, 8, 64, 59392, 65024, True, False),
    ModelShape("gpt-3-175b", "GPT-3-175B", 96, 12288, 96, 96, 128, 49152, 50257, True, False),
)
MODELS: dict[str, ModelShape] = {shape.slug: shape for shape in _TABLE}


def get_shape(model: str | ModelShape) -> ModelShape:
    """The shape of that slug; a `ModelShape` passes through."""
    if isinstance(model, ModelShape):
        return model
    if model not in MODELS:
        raise ValueError(unknown_slug("model", model, MODELS))
    return MODELS[model]
