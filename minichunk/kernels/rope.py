"""Rotary position embedding, fused with the write into the KV cache (and with QK-norm if any).

The first thing a layer does with its projections: q and k are rotated by their positions, and k and
v go to the slots that the block table names. Shows rotary embeddings (Su et al., 2021, section
3.4.2) in the "rotate half" layout of Hugging Face's Llama, and why fusing pays: k is read once
instead of three times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minichunk.kernels._cpp import address, kernel
from minichunk.kernels._triton import jit, next_power_of_2, tl
from minichunk.kernels.backend import runs_on_cpp, runs_on_triton


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
    implementation = rope_and_cache_torch
    if runs_on_triton(backend, q):
        implementation = rope_and_cache_triton
    elif runs_on_cpp(backend, q):
        implementation = rope_and_cache_cpp
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
    # Both at once: at the few rows of a decode step each operation costs about the same.
    heads = torch.cat((_normalise(q, q_norm_weight, eps), _normalise(k, k_norm_weight, eps)), dim=1)
    rotated = _rotate(heads, cos, sin).to(q.dtype)
    rotated_q, rotated_k = rotated.split((q.shape[1], k.shape[1]), dim=1)
    written = slot_mapping >= 0
    if not written.all():
        slot_mapping, rotated_k, v = slot_mapping[written], rotated_k[written], v[written]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping.long(), rotated_k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping.long(), v.to(v_cache.dtype))
    return rotated_q


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Per-head RMS norm (Qwen3), in float32 at least; without a weight there is none."""
    if weight is None:
        return x
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + head_dim / 2]) by its angle, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_and_cache_cpp(
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
    """`rope_and_cache` in C++ (`cpp/rope_and_cache.cpp`). q, k, v may be slices of a projection."""
    num_tokens, num_q_heads, head_dim = q.shape
    _check_contiguous(q, k, v)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the blocks of both caches must be contiguous")
    for angles in (cos, sin):
        if angles.dtype != torch.float32 or not angles.is_contiguous():
            raise ValueError("cos and sin must be contiguous float32 tensors")
    slot_mapping = slot_mapping.long()
    q_out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype)
    kernel("rope_and_cache", "pipipipppppfiiippp", q.dtype, HEAD_DIM=head_dim)(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        address(q_norm_weight),
        address(k_norm_weight),
        eps,
        num_tokens,
        num_q_heads,
        k.shape[1],
        q_out.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
    )
    return q_out


def _check_contiguous(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            raise ValueError(f"each token of {name} must be contiguous; strides are {x.stride()}")


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
    _check_contiguous(q, k, v)
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight must be given both or neither")
    q_out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    padded_half, padded_heads = next_power_of_2(head_dim // 2), next_power_of_2(num_q_heads)
    rope_and_cache_kernel[(num_tokens,)](
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
        NUM_KV_HEADS=num_kv_heads,
        PADDED_Q_HEADS=padded_heads,
        PADDED_KV_HEADS=next_power_of_2(num_kv_heads),
        HALF_DIM=head_dim // 2,
        PADDED_HALF=padded_half,
        BLOCK_SIZE=k_cache.shape[1],
        HAS_NORM=q_norm_weight is not None,
        num_warps=min(max(padded_heads * padded_half // 1024, 1), 8),
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
    NUM_KV_HEADS: tl.constexpr,
    PADDED_Q_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program: one token with all its heads.

    q_out    [num_tokens, NUM_Q_HEADS, 2 * HALF_DIM]
    k_cache, v_cache [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF_DIM], written in place
    q        [num_tokens, NUM_Q_HEADS, 2 * HALF_DIM]; k, v [num_tokens, NUM_KV_HEADS, 2 * HALF_DIM]
    cos, sin [num_tokens, HALF_DIM] float32
    slot_mapping [num_tokens] int32 or int64; q_norm, k_norm [2 * HALF_DIM], or None
    """
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_HALF)
    cos = tl.load(cos_ptr + token * HALF_DIM + dim, mask=dim < HALF_DIM, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF_DIM + dim, mask=dim < HALF_DIM, other=0.0)[None, :]

    head = tl.arange(0, PADDED_Q_HEADS)
    offset = head[:, None] * (2 * HALF_DIM) + dim[None, :]
    mask = (head < NUM_Q_HEADS)[:, None] & (dim < HALF_DIM)[None, :]
    low, high = _rotated(
        q_ptr + token * q_stride + offset, mask, cos, sin, q_norm_ptr, eps, HALF_DIM, HAS_NORM
    )
    out_ptrs = q_out_ptr + token * (NUM_Q_HEADS * 2 * HALF_DIM) + offset
    tl.store(out_ptrs, low.to(q_out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF_DIM, high.to(q_out_ptr.dtype.element_ty), mask=mask)

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        kv_head = tl.arange(0, PADDED_KV_HEADS)
        source = kv_head[:, None] * (2 * HALF_DIM) + dim[None, :]
        kv_mask = (kv_head < NUM_KV_HEADS)[:, None] & (dim < HALF_DIM)[None, :]
        slot_offset = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        target = slot_offset + kv_head[:, None] * head_stride + dim[None, :]
        dtype = k_cache_ptr.dtype.element_ty
        k_ptrs = k_ptr + token * k_stride + source
        k_low, k_high = _rotated(k_ptrs, kv_mask, cos, sin, k_norm_ptr, eps, HALF_DIM, HAS_NORM)
        tl.store(k_cache_ptr + target, k_low.to(dtype), mask=kv_mask)
        tl.store(k_cache_ptr + target + HALF_DIM, k_high.to(dtype), mask=kv_mask)
        v_ptrs = v_ptr + token * v_stride + source
        v_low = tl.load(v_ptrs, mask=kv_mask)
        v_high = tl.load(v_ptrs + HALF_DIM, mask=kv_mask)
        tl.store(v_cache_ptr + target, v_low, mask=kv_mask)
        tl.store(v_cache_ptr + target + HALF_DIM, v_high, mask=kv_mask)


@jit()
def _rotated(ptrs, mask, cos, sin, norm_ptr, eps, HALF_DIM: tl.constexpr, HAS_NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves [heads, half] of the heads at `ptrs`, normalised and rotated, in float32.

    The halves are loaded apart, because each element needs the one half a head away.
    """
    low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptrs + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        dim = tl.arange(0, low.shape[1])
        sum_of_squares = tl.sum(low * low + high * high, axis=1)
        inverse_rms = tl.rsqrt(sum_of_squares / (2 * HALF_DIM) + eps)[:, None]
        norm_low = tl.load(norm_ptr + dim, mask=dim < HALF_DIM, other=0.0)
        norm_high = tl.load(norm_ptr + HALF_DIM + dim, mask=dim < HALF_DIM, other=0.0)
        low = low * inverse_rms * norm_low.to(tl.float32)[None, :]
        high = high * inverse_rms * norm_high.to(tl.float32)[None, :]
    return low * cos - high * sin, high * cos + low * sin
