"""Rotary position embedding, fused with the write into the KV cache (and with QK-norm if any).

The first thing a layer does with its projections: q and k are rotated by their positions, and k and
v go to the slots that the block table names. Shows rotary embeddings (Su et al., 2021, section
3.4.2) in the "rotate half" layout of Hugging Face's Llama, and why fusing pays: k is read once
instead of three times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minichunk.kernels._triton import jit, next_power_of_2, tl
from minichunk.kernels.backend import runs_on_triton


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
    implementation = rope_and_cache_triton if runs_on_triton(backend, q) else rope_and_cache_torch
    return implementation(
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


def rope_and_cache_triton(
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
    """`rope_and_cache` on Triton. q, k and v may be slices of one fused projection."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_q_heads // num_kv_heads
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"each token of {name} must be contiguous; strides are {x.stride()}")
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight must be given both or neither")
    q_out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    rope_and_cache_kernel[(num_tokens, num_kv_heads)](
        q_out,
        k_cache,
        v_cache,
        q,
        k,
        v,
        cos,
        sin,
        slot_mapping,
        q_norm_weight,
        k_norm_weight,
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_Q_HEADS=num_q_heads,
        GROUP_SIZE=group_size,
        PADDED_GROUP=next_power_of_2(group_size),
        HALF_DIM=head_dim // 2,
        PADDED_HALF=next_power_of_2(head_dim // 2),
        BLOCK_SIZE=k_cache.shape[1],
        HAS_NORM=q_norm_weight is not None,
        num_warps=1 if group_size * head_dim <= 1024 else 4,
        enable_fp_fusion=True,
    )
    return q_out


@jit()
def rope_and_cache_kernel(  # type: ignore[no-untyped-def]
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    slot_stride,
    head_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program: one token, one KV head and the GROUP_SIZE query heads that read it.

    q_out    [num_tokens, NUM_Q_HEADS, 2 * HALF_DIM]
    k_cache, v_cache [num_blocks, BLOCK_SIZE, num_kv_heads, 2 * HALF_DIM], written in place
    q        [num_tokens, NUM_Q_HEADS, 2 * HALF_DIM]; k, v [num_tokens, num_kv_heads, 2 * HALF_DIM]
    cos, sin [num_tokens, HALF_DIM] float32
    slot_mapping [num_tokens] int32 or int64; q_norm, k_norm [2 * HALF_DIM], or None

    The two halves of a head are loaded apart, for each element needs the one half a head away.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dim = tl.arange(0, PADDED_HALF)
    in_dim = dim < HALF_DIM
    cos = tl.load(cos_ptr + token * HALF_DIM + dim, mask=in_dim, other=0.0)
    sin = tl.load(sin_ptr + token * HALF_DIM + dim, mask=in_dim, other=0.0)

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        source = kv_head * (2 * HALF_DIM) + dim
        k_first = tl.load(k_ptr + token * k_stride + source, mask=in_dim, other=0.0)
        k_second = tl.load(k_ptr + token * k_stride + source + HALF_DIM, mask=in_dim, other=0.0)
        v_first = tl.load(v_ptr + token * v_stride + source, mask=in_dim, other=0.0)
        v_second = tl.load(v_ptr + token * v_stride + source + HALF_DIM, mask=in_dim, other=0.0)
        k_first, k_second = k_first.to(tl.float32), k_second.to(tl.float32)
        if HAS_NORM:
            sum_of_squares = tl.sum(k_first * k_first + k_second * k_second, axis=0)
            inverse_rms = tl.rsqrt(sum_of_squares / (2 * HALF_DIM) + eps)
            weight_first = tl.load(k_norm_ptr + dim, mask=in_dim, other=0.0)
            weight_second = tl.load(k_norm_ptr + HALF_DIM + dim, mask=in_dim, other=0.0)
            k_first = k_first * inverse_rms * weight_first.to(tl.float32)
            k_second = k_second * inverse_rms * weight_second.to(tl.float32)
        target = (
            slot // BLOCK_SIZE * block_stride
            + slot % BLOCK_SIZE * slot_stride
            + kv_head * head_stride
            + dim
        )
        dtype = k_cache_ptr.dtype.element_ty
        k_low = (k_first * cos - k_second * sin).to(dtype)
        k_high = (k_second * cos + k_first * sin).to(dtype)
        tl.store(k_cache_ptr + target, k_low, mask=in_dim)
        tl.store(k_cache_ptr + target + HALF_DIM, k_high, mask=in_dim)
        tl.store(v_cache_ptr + target, v_first, mask=in_dim)
        tl.store(v_cache_ptr + target + HALF_DIM, v_second, mask=in_dim)

    member = tl.arange(0, PADDED_GROUP)
    head = kv_head * GROUP_SIZE + member
    offset = head[:, None] * (2 * HALF_DIM) + dim[None, :]
    mask = (member < GROUP_SIZE)[:, None] & in_dim[None, :]
    q_first = tl.load(q_ptr + token * q_stride + offset, mask=mask, other=0.0).to(tl.float32)
    q_second = tl.load(q_ptr + token * q_stride + offset + HALF_DIM, mask=mask, other=0.0)
    q_second = q_second.to(tl.float32)
    if HAS_NORM:
        sum_of_squares = tl.sum(q_first * q_first + q_second * q_second, axis=1)
        inverse_rms = tl.rsqrt(sum_of_squares / (2 * HALF_DIM) + eps)[:, None]
        weight_first = tl.load(q_norm_ptr + dim, mask=in_dim, other=0.0).to(tl.float32)
        weight_second = tl.load(q_norm_ptr + HALF_DIM + dim, mask=in_dim, other=0.0).to(tl.float32)
        q_first = q_first * inverse_rms * weight_first[None, :]
        q_second = q_second * inverse_rms * weight_second[None, :]
    q_low = q_first * cos[None, :] - q_second * sin[None, :]
    q_high = q_second * cos[None, :] + q_first * sin[None, :]
    out_ptrs = q_out_ptr + token * (NUM_Q_HEADS * 2 * HALF_DIM) + offset
    tl.store(out_ptrs, q_low.to(q_out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF_DIM, q_high.to(q_out_ptr.dtype.element_ty), mask=mask)
