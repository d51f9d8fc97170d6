"""RMS norm, fused with the addition of the residual stream.

Stands before attention and before the MLP of each layer. Shows RMSNorm (Zhang and Sennrich, 2019)
and the simplest case for fusion: the operation is all memory traffic, so adding the residual in the
same pass saves a whole read and write of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    return rms_norm_torch(x, weight, eps, residual)


def rms_norm_torch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` in torch; fed with float64 it is the kernel's reference."""
    if residual is not None:
        x = x + residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype), x
