"""SwiGLU: the gated activation in the middle of each MLP.

Stands between the MLP's two matrix products. Shows the gated unit of Shazeer (2020, "GLU variants
improve transformer"): silu(gate) * up. Both come from one matrix product, side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from minichunk.kernels._cpp import kernel
from minichunk.kernels._triton import jit, tl
from minichunk.kernels.backend import runs_on_cpp, runs_on_triton

TILE = 2048  # elements of one program


def swiglu(gate_up: Tensor, *, backend: str = "torch") -> Tensor:
    """silu(gate) * up, computed in float32. gate_up [num_tokens, 2 * F], gate first -> [.., F]."""
    if runs_on_triton(backend, gate_up):
        return swiglu_triton(gate_up)
    return swiglu_cpp(gate_up) if runs_on_cpp(backend, gate_up) else swiglu_torch(gate_up)


def swiglu_torch(gate_up: Tensor) -> Tensor:
    """`swiglu` in torch; fed with float64 it is the kernel's reference."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def swiglu_cpp(gate_up: Tensor) -> Tensor:
    """`swiglu` in C++ (`cpp/swiglu.cpp`)."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("the rows of gate_up must be contiguous")
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype)
    kernel("swiglu", "piiip", gate_up.dtype)(
        gate_up.data_ptr(), gate_up.stride(0), num_tokens, size, out.data_ptr()
    )
    return out


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """`swiglu` on Triton."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("the rows of gate_up must be contiguous")
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, -(-size // TILE))
        swiglu_kernel[grid](
            out,
            gate_up,
            gate_up.stride(0),
            SIZE=size,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@jit()
def swiglu_kernel(out_ptr, gate_up_ptr, stride, SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: TILE columns of one token. gate_up [num_tokens, 2 * SIZE], out [.., SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    row_ptr = gate_up_ptr + token * stride
    gate = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    out_ptrs = out_ptr + token * SIZE + column
    tl.store(out_ptrs, activated.to(out_ptr.dtype.element_ty), mask=mask)
