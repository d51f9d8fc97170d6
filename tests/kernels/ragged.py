"""Random ragged batches for the attention tests, and attention written out from its definition."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from minichunk.kernels.attention import AttentionMetadata

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@dataclass
class RaggedBatch:
    """Sequences with known contexts, scattered over a cache whose other slots hold NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    keys: list[Tensor]  # of each sequence, [seq_len, num_kv_heads, head_dim]
    values: list[Tensor]

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata.build(
            self.cu_seqlens_q, self.seq_lens, self.block_tables, self.block_size, DEVICE
        )


def ragged_batch(
    lengths: list[tuple[int, int]],
    *,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> RaggedBatch:
    """`lengths`: (query tokens, tokens computed before) of each sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    query_lens = [new for new, _ in lengths]
    seq_lens = [new + before for new, before in lengths]
    num_blocks = sum(-(-length // block_size) for length in seq_lens) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    v_cache = k_cache.clone()
    block_tables, keys, values = [], [], []
    for length in seq_lens:
        table = [free.pop() for _ in range(-(-length // block_size))]
        k, v = normal(length, num_kv_heads, head_dim), normal(length, num_kv_heads, head_dim)
        for position in range(length):
            block, offset = table[position // block_size], position % block_size
            k_cache[block, offset], v_cache[block, offset] = k[position], v[position]
        block_tables.append(table)
        keys.append(k)
        values.append(v)
    starts = [0]
    for count in query_lens:
        starts.append(starts[-1] + count)
    q = normal(starts[-1], num_kv_heads * group_size, head_dim)
    return RaggedBatch(q, k_cache, v_cache, starts, seq_lens, block_tables, keys, values)


def attention_by_definition(batch: RaggedBatch) -> Tensor:
    """Softmax over the keys up to each token's own position, in float64, one token at a time."""
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    group_size = batch.q.shape[1] // batch.k_cache.shape[2]
    for seq, length in enumerate(batch.seq_lens):
        start, stop = batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1]
        keys = batch.keys[seq].double().repeat_interleave(group_size, dim=1)
        values = batch.values[seq].double().repeat_interleave(group_size, dim=1)
        for row in range(start, stop):
            position = length - (stop - row)
            scores = torch.einsum("hd,khd->hk", batch.q[row].double(), keys[: position + 1])
            weights = (scores * batch.scale).softmax(dim=-1)
            out[row] = torch.einsum("hk,khd->hd", weights, values[: position + 1])
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; NaN (which fails any bound) if actual holds one."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
