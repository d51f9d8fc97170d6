"""The decoder: one transformer for all supported architectures, over ragged, paged batches.

Called once per step with whatever the scheduler mixed: chunks of prompts and single decode tokens
are rows of the same matrix products, and only attention asks which row belongs to whom. That is why
mixing them costs little: a chunk's rows ride along with the weights that the decodes read anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from minichunk.kernels.attention import paged_attention
from minichunk.kernels.rms_norm import rms_norm
from minichunk.kernels.rope import rope_and_cache
from minichunk.model.batch import Batch
from minichunk.model.config import ModelConfig
from minichunk.model.weights import DecoderWeights, LayerWeights


class Decoder:
    """Llama, Mistral, Qwen2 and Qwen3 (dense). Stateless but for its weights.

    `backend` chooses the kernels ("torch", "cpp" or "triton"); matrix products are torch's on all.
    `compiled` passes the pieces between the attention calls through torch.compile. It is for plain
    weights, which packed ones are not, and changes nothing with "cpp": those kernels are compiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        backend: str = "torch",
        compiled: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        self._cos, self._sin = rotary_tables(config, weights.embedding.device)
        self._before = self._after = None
        if compiled and backend != "cpp":
            self._before = torch.compile(self._before_attention, dynamic=True)
            self._after = torch.compile(self._after_attention, dynamic=True)

    @torch.inference_mode()
    def logits(self, batch: Batch, kv_layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run a step; returns the logits [num_samples, vocab_size] of the rows that sample.

        `kv_layers` holds (keys, values) of each layer, [num_blocks, block_size, num_kv_heads,
        head_dim] each; the step's keys and values are written into them.
        """
        before = self._before_attention  # the first layer is eager: without a residual it would
        after = self._after or self._after_attention  # be one more variant to compile
        cos = self._cos.index_select(0, batch.positions)
        sin = self._sin.index_select(0, batch.positions)
        hidden: Tensor = embedding(batch.input_ids, self.weights.embedding)
        residual: Tensor | None = None
        for layer, (k_cache, v_cache) in zip(self.weights.layers, kv_layers, strict=True):
            q, k, v, residual = before(layer, hidden, residual)
            q = rope_and_cache(
                q, k, v, cos, sin, k_cache, v_cache, batch.slot_mapping,
                layer.q_norm, layer.k_norm, self.config.rms_norm_eps, backend=self.backend,
            )  # fmt: skip
            scale = self.config.head_dim**-0.5
            attended = paged_attention(
                q, k_cache, v_cache, batch.attention, scale, backend=self.backend
            )
            hidden, residual = after(layer, attended, residual)
            before = self._before or before
        rows = batch.sample_rows  # the vocabulary is wide: no logits that nobody samples from
        assert residual is not None
        hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
        return self.weights.lm_head(self._norm(hidden, self.weights.final_norm, residual)[0])

    def _before_attention(
        self, layer: LayerWeights, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norm and projection: q [tokens, heads, dim], k, v [tokens, kv heads, dim], residual."""
        config = self.config
        normed, residual = self._norm(hidden, layer.input_norm, residual)
        heads = layer.qkv(normed).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        return q, k, v, residual

    def _after_attention(
        self, layer: LayerWeights, attended: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output projection and MLP; returns the MLP's output and the residual stream before it."""
        hidden = layer.output(attended.flatten(1))
        normed, residual = self._norm(hidden, layer.mlp_norm, residual)
        return layer.down(layer.gate_up(normed, backend=self.backend)), residual

    def _norm(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, self.config.rms_norm_eps, residual, backend=self.backend)


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of every position, [max_model_len, head_dim / 2] float32."""
    inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=device)
    positions = torch.arange(config.max_model_len, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq
    return angles.cos() * config.rope_scale, angles.sin() * config.rope_scale
