"""Rotary position embedding, fused with the write into the KV cache (and with QK-norm if any).

The first thing a layer does with its projections: q and k are rotated by their positions, and k and
v go to the slots that the block table names. Shows rotary embeddings (Su et al., 2021, section
3.4.2) in the "rotate half" layout of Hugging Face's Llama, and why fusing pays: k is read once
instead of three times.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str = "torch",
) -> Tensor:
    """Rotates q and k, writes k and v into the cache, and returns the rotated q.

    q [num_tokens, num_q_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim];
    cos, sin [num_tokens, head_dim // 2] float32, of each token's position;
    k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim];
    slot_mapping [num_tokens] integer, block * block_size + offset; -1 writes nothing (padding);
    q_norm_weight, k_norm_weight [head_dim]: RMS norm of each head before the rotation (Qwen3).
    """
    return rope_and_cache_torch(
        q, k, v, cos, sin, k_cache, v_cache, slot_mapping, q_norm_weight, k_norm_weight, eps
    )


def rope_and_cache_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`rope_and_cache` in torch; fed with float64 it is the kernel's reference."""
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    rotated_k = _rotate(_normalise(k, k_norm_weight, eps), cos, sin).to(k_cache.dtype)
    k_cache.view(-1, *k_cache.shape[2:])[slots] = rotated_k[written]
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v[written].to(v_cache.dtype)
    return _rotate(_normalise(q, q_norm_weight, eps), cos, sin).to(q.dtype)


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Per-head RMS norm, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + head_dim / 2]) by its angle."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
