"""RMS norm, fused with the addition of the residual stream.

Stands before attention and before the MLP of each layer. Shows RMSNorm (Zhang and Sennrich, 2019)
and the simplest case for fusion: the operation is all memory traffic, so adding the residual in the
same pass saves a whole read and write of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minichunk.kernels._cpp import address, kernel
from minichunk.kernels._triton import jit, next_power_of_2, tl
from minichunk.kernels.backend import runs_on_cpp, runs_on_triton


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Returns (norm(x + residual) * weight, x + residual), or (norm(x) * weight, x) without one.

    x, residual [num_tokens, hidden_size]; weight [hidden_size]. Computed in float32; the sum is
    rounded to x's dtype before it is normalised, for that is what the next layer will read.
    """
    if runs_on_triton(backend, x):
        return rms_norm_triton(x, weight, eps, residual)
    if runs_on_cpp(backend, x):
        return rms_norm_cpp(x, weight, eps, residual)
    return rms_norm_torch(x, weight, eps, residual)


def rms_norm_torch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` in torch; fed with float64 it is the kernel's reference."""
    if residual is not None:
        x = x + residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse_rms = torch.rsqrt(length.square() / x.shape[-1] + eps)
    return (wide * inverse_rms).mul_(weight).to(x.dtype), x


def rms_norm_cpp(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` in C++ (`cpp/rms_norm.cpp`). Neither input is changed."""
    num_tokens, hidden_size = x.shape
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the rows of x and residual must be contiguous")
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype)
    total = x if residual is None else torch.empty_like(out)
    kernel("rms_norm", "pipipfiipp", x.dtype)(
        x.data_ptr(),
        x.stride(0),
        address(residual),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        eps,
        num_tokens,
        hidden_size,
        out.data_ptr(),
        total.data_ptr(),
    )
    return out, total


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` on Triton. Neither input is changed."""
    num_tokens, hidden_size = x.shape
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the rows of x and residual must be contiguous")
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(out)
    if num_tokens == 0:
        return out, new_residual
    padded_size = next_power_of_2(hidden_size)
    rms_norm_kernel[(num_tokens,)](
        out,
        new_residual,
        x,
        residual,
        weight,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        HIDDEN_SIZE=hidden_size,
        PADDED_SIZE=padded_size,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(max(padded_size // 512, 1), 16),
        enable_fp_fusion=True,
    )
    return out, new_residual


@jit()
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    new_residual_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    x_stride,
    residual_stride,
    HIDDEN_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program: one token, whose whole row stays in registers between the sum and the scaling.

    out, new_residual, x, residual [num_tokens, HIDDEN_SIZE]; weight [HIDDEN_SIZE].
    Without HAS_RESIDUAL, residual is None and new_residual is not written.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    mask = column < HIDDEN_SIZE
    x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + token * HIDDEN_SIZE + column, total, mask=mask)
        x = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN_SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = (x * inverse_rms * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN_SIZE + column, normed, mask=mask)
