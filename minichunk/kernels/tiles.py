"""Tile sizes of the attention kernel, in one table per (target, width of dtype, head dimension).

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
    """rows: (token, query head) pairs of a tile; keys: visited at once; warps and pipeline stages.

    A key's address comes out of the block table, so fetching it takes two loads, one after the
    other. Each of them wants a pipeline stage: with 5 stages the keys of the next tile are on their
    way while this one is computed, with 3 they are not.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Shared memory that one program may have, in bytes (CUDA C++ programming guide, "Technical
# specifications per compute capability"; CDNA3: 64 KB of local data share per workgroup).
SHARED_MEMORY = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}

# For chunks and for decodes: target -> bytes per element -> padded head dimension -> tile. Chosen
# as the largest that neither spill registers nor exceed the shared memory; not tuned on hardware.
# There are no tensor-core instructions for exact float32, and tiles for it are small.
CHUNK_FLOAT32 = {32: (32, 32, 4, 5), 64: (32, 32, 8, 5), 128: (16, 32, 8, 5), 256: (16, 16, 8, 5)}
DECODE_FLOAT32 = {32: (16, 32, 4, 5), 64: (16, 32, 4, 5), 128: (16, 16, 4, 5), 256: (16, 16, 8, 5)}
CHUNK_TILES = {
    "sm_75": {
        2: {32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
        4: {32: (32, 32, 4, 1), 64: (32, 32, 8, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
    },
    "sm_80": {
        2: {32: (128, 64, 8, 5), 64: (128, 64, 8, 5), 128: (128, 32, 8, 5), 256: (64, 32, 8, 5)},
        4: CHUNK_FLOAT32,
    },
    "sm_89": {
        2: {32: (128, 64, 8, 5), 64: (128, 64, 8, 5), 128: (128, 32, 8, 5), 256: (64, 16, 8, 5)},
        4: CHUNK_FLOAT32,
    },
    "sm_90": {
        2: {32: (128, 128, 8, 5), 64: (128, 128, 8, 5), 128: (128, 64, 8, 5), 256: (128, 32, 8, 5)},
        4: CHUNK_FLOAT32,
    },
    "sm_100": {
        2: {32: (128, 128, 8, 5), 64: (128, 128, 8, 5), 128: (128, 64, 8, 5), 256: (128, 32, 8, 5)},
        4: CHUNK_FLOAT32,
    },
    "gfx942": {
        2: {32: (128, 64, 4, 2), 64: (128, 64, 4, 2), 128: (128, 64, 4, 2), 256: (64, 32, 4, 2)},
        4: {32: (32, 64, 4, 2), 64: (32, 64, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 2)},
    },
}
DECODE_TILES = {
    "sm_75": {
        2: {32: (16, 32, 4, 1), 64: (16, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
        4: {32: (16, 32, 4, 1), 64: (16, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
    },
    "sm_80": {
        2: {32: (16, 64, 4, 5), 64: (16, 64, 4, 5), 128: (16, 64, 4, 5), 256: (16, 32, 4, 5)},
        4: DECODE_FLOAT32,
    },
    "gfx942": {
        2: {32: (16, 64, 4, 2), 64: (16, 64, 4, 2), 128: (16, 64, 4, 2), 256: (16, 32, 4, 2)},
        4: {32: (16, 64, 4, 2), 64: (16, 32, 4, 2), 128: (16, 32, 4, 2), 256: (16, 16, 4, 2)},
    },
}
for _target in ("sm_89", "sm_90", "sm_100"):
    DECODE_TILES[_target] = DECODE_TILES["sm_80"]


def table_row(target: str) -> str:
    """The target whose tiles serve `target`: the newest known one that is not newer than it.

    Consumer Blackwell (sm_120) has the shared memory of sm_89 and no tcgen05, hence its tiles; the
    interpreter ("cpu") runs the tiles of sm_80.
    """
    if target in SHARED_MEMORY:
        return target
    if target.startswith("gfx"):
        return "gfx942"
    if not target.startswith("sm_"):
        return "sm_80"
    capability = int(target[3:])
    if capability >= 120 or 80 < capability < 90:
        return "sm_89"
    known = [int(name[3:]) for name in SHARED_MEMORY if name.startswith("sm_")]
    return f"sm_{max((value for value in known if value <= capability), default=75)}"


def attention_tile(
    target: str, dtype: torch.dtype, head_dim: int, group_size: int, is_decode: bool
) -> AttentionTile:
    """The tile for a launch. Raises ValueError for a head dimension that no tile serves.

    A tile has room for one token with all the query heads of a KV head at least.
    """
    padded_dim = max(next_power_of_2(head_dim), 32)
    tiles = (DECODE_TILES if is_decode else CHUNK_TILES)[table_row(target)][dtype.itemsize]
    if head_dim % 16 or padded_dim not in tiles:
        raise ValueError(
            f"head_dim={head_dim} is not served by the Triton kernel, which takes multiples of 16 "
            f"up to {max(tiles)}; use backend='torch'"
        )
    rows, keys, num_warps, num_stages = tiles[padded_dim]
    return AttentionTile(max(rows, next_power_of_2(group_size)), keys, num_warps, num_stages)
