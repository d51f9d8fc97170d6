"""Matrix products with their weights in the layout that the hardware reads fastest.

Four of these are nearly all the time of a layer. On a CPU, oneDNN multiplies from a blocked layout;
given a plain matrix it re-orders it in every call, which for the ten rows of a decode step costs as
much as the product itself. So the weight is re-ordered once, when it is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from minichunk.kernels.swiglu import swiglu

PACK_ROWS = 16  # the layout is chosen for about this many rows of x: a batch of decodes


class Linear:
    """y = x Wᵀ + b, for x [rows, inputs], W [outputs, inputs] and b [outputs].

    `packed` is a wish: it is granted on CPUs for bfloat16 and float32 where torch has oneDNN, and
    `weight` is then the blocked tensor, which only this file can read.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool = False) -> None:
        self.bias = bias
        self.packed = packed and can_pack(weight)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)


class GatedLinear:
    """silu(x Wgᵀ) * (x Wuᵀ), the first half of an MLP. Rows of `weight`: the gate's Wg, then Wu.

    It is one product and then `swiglu`. With `activates`, where it is packed, it is two products
    that do the activation themselves, on results that are still in registers: without a kernel for
    `swiglu` that takes two thirds of the time.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        packed: bool = False,
        activates: bool = False,
    ) -> None:
        self.activates = activates and packed and can_pack(weight)
        if self.activates:
            biases = (None, None) if bias is None else bias.chunk(2)
            self.gate, self.up = (
                Linear(part, part_bias, packed=True)
                for part, part_bias in zip(weight.chunk(2), biases, strict=True)
            )
        else:
            self.both = Linear(weight, bias, packed=packed)

    def __call__(self, x: Tensor, *, backend: str = "torch") -> Tensor:
        if not self.activates:
            return swiglu(self.both(x), backend=backend)
        gate, up = self.gate, self.up
        ops = torch.ops.mkldnn
        activated = ops._linear_pointwise(x, gate.weight, gate.bias, "swish", [], "")
        return ops._linear_pointwise.binary(x, activated, up.weight, up.bias, "mul")


def can_pack(weight: Tensor) -> bool:
    """Whether torch can multiply by this weight from oneDNN's own layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float32)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
