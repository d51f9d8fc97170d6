"""SwiGLU: the gated activation in the middle of each MLP.

Stands between the MLP's two matrix products. Shows the gated unit of Shazeer (2020, "GLU variants
improve transformer"): silu(gate) * up. Both come from one matrix product, side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate_up: Tensor, *, backend: str = "torch") -> Tensor:
    """silu(gate) * up, computed in float32. gate_up [num_tokens, 2 * F], gate first -> [.., F]."""
    return swiglu_torch(gate_up)


def swiglu_torch(gate_up: Tensor) -> Tensor:
    """`swiglu` in torch; fed with float64 it is the kernel's reference."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)
