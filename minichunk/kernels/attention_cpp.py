"""Paged attention on a CPU: decodes by a C++ kernel that reads the cache where it lies.

The work of a decode step is reading keys and values, so what counts is to read each of them once,
in place: the torch path, which gathers them first, reads and writes them twice more. The chunks of
a mixed step are matrix products instead, and torch's own attention is good at those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minichunk.kernels._cpp import kernel
from minichunk.kernels.attention_torch import plan_chunks

if TYPE_CHECKING:
    from minichunk.kernels.attention_metadata import AttentionMetadata

SPLIT = 256  # tokens of a sequence that one thread attends to at a time


@dataclass(frozen=True)
class DecodeWork:
    """The sequences of a step with one query token each, and the parts that threads take of them.

    rows, sequences  [decodes] int64      decode d is row rows[d] of q, and sequence sequences[d]
    first_split      [decodes + 1] int64  d's parts are first_split[d] .. first_split[d + 1] - 1
    owner            [splits] int64       the decode that a part belongs to
    """

    rows: Tensor
    sequences: Tensor
    first_split: Tensor
    owner: Tensor


def paged_attention_cpp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """`paged_attention` on a CPU, in bfloat16 or float32."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the blocks of both caches must be contiguous")
    chunks = metadata.planned(plan_chunks, q.dtype)
    work = metadata.planned(plan_decodes, q.dtype)
    covered = len(work.rows) + sum(call.rows.stop - call.rows.start for call in chunks)
    out = (torch.empty if covered == len(q) else torch.zeros)(q.shape, dtype=q.dtype)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, kv heads, dim]
    for call in chunks:
        out[call.rows] = call(q, keys, values, scale)
    if len(work.rows):
        _attend_decodes(q, k_cache, v_cache, metadata, work, scale, out)
    return out


def _attend_decodes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    work: DecodeWork,
    scale: float,
    out: Tensor,
) -> None:
    """Runs `cpp/decode_attention.cpp`: the splits of all sequences first, then their sums."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        raise ValueError(f"each token of q must be contiguous; strides are {q.stride()}")
    # Of each split: the largest score, the sum and the weighted values of each head.
    partials = torch.empty((len(work.owner), num_q_heads, head_dim + 2), dtype=torch.float32)
    decode_attention = kernel(
        "decode_attention",
        "pippipipppppifpp",
        q.dtype,
        HEAD_DIM=head_dim,
        KV_HEADS=num_kv_heads,
        GROUP=num_q_heads // num_kv_heads,
        SPLIT=SPLIT,
    )
    decode_attention(
        q.data_ptr(),
        q.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        metadata.block_size,
        metadata.block_tables.data_ptr(),
        metadata.block_tables.shape[1],
        metadata.seq_lens.data_ptr(),
        work.rows.data_ptr(),
        work.sequences.data_ptr(),
        work.first_split.data_ptr(),
        work.owner.data_ptr(),
        len(work.rows),
        scale,
        partials.data_ptr(),
        out.data_ptr(),
    )


def plan_decodes(metadata: AttentionMetadata, dtype: torch.dtype) -> DecodeWork:
    """Who is a decode, and how the decodes are split; in any `dtype` it is the same."""
    starts, seq_lens = metadata.cu_seqlens_q.numpy(), metadata.seq_lens.numpy()
    sequences = np.flatnonzero((np.diff(starts) == 1) & (seq_lens > 0))
    splits = -(-seq_lens[sequences].astype(np.int64) // SPLIT)
    return DecodeWork(
        rows=torch.from_numpy(starts[sequences].astype(np.int64)),
        sequences=torch.from_numpy(sequences),
        first_split=torch.from_numpy(np.concatenate(([0], splits.cumsum()))),
        owner=torch.from_numpy(np.repeat(np.arange(len(sequences)), splits)),
    )
