"""Paged attention on a CPU by C++ kernels that read the cache where it lies.

Decodes and chunks want different things of a CPU. The work of a decode is reading keys and values:
each is read once, in place, where the torch path gathers them first. A chunk is matrix products:
tiles of queries against tiles of keys, for the processor's matrix unit. Where there is none, and in
float32, torch's own attention serves the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minichunk.kernels._cpp import CompileError, kernel, library
from minichunk.kernels.attention_torch import plan_chunks

if TYPE_CHECKING:
    from minichunk.kernels.attention_metadata import AttentionMetadata

SPLIT = 256  # tokens of a sequence that one thread attends to at a time
KEYS = 256  # keys that a tile of a chunk's queries meets at a time


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


@dataclass(frozen=True)
class Chunk:
    """Tokens of one prompt: `rows` of q, the last ones of a sequence of `length` so far."""

    rows: slice
    sequence: int
    length: int


def paged_attention_cpp(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """`paged_attention` on a CPU, in bfloat16 or float32."""
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        raise ValueError(f"each token of q must be contiguous; strides are {q.stride()}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the blocks of both caches must be contiguous")
    chunks = metadata.planned(find_chunks, q.dtype)
    decodes = metadata.planned(plan_decodes, q.dtype)
    covered = len(decodes.rows) + sum(chunk.rows.stop - chunk.rows.start for chunk in chunks)
    out = (torch.empty if covered == len(q) else torch.zeros)(q.shape, dtype=q.dtype)
    if len(decodes.rows):
        _attend_decodes(q, k_cache, v_cache, metadata, decodes, scale, out)
    if chunks and has_tiles(q.dtype, **_shapes(q, k_cache)):
        for chunk in chunks:
            _attend_chunk(q, k_cache, v_cache, metadata, chunk, scale, out)
    elif chunks:
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, kv heads, dim]
        for call in metadata.planned(plan_chunks, q.dtype):
            out[call.rows] = call(q, keys, values, scale)
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
    # Of each split: the largest score, the sum and the weighted values of each head.
    partials = torch.empty((len(work.owner), q.shape[1], q.shape[2] + 2), dtype=torch.float32)
    shapes = _shapes(q, k_cache)
    kernel("decode_attention", "pippipipppppifpp", q.dtype, **shapes, SPLIT=SPLIT)(
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


def _attend_chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    chunk: Chunk,
    scale: float,
    out: Tensor,
) -> None:
    """Runs `cpp/chunk_attention.cpp`: packs the keys and values into tiles, then attends."""
    rows, tables = chunk.rows, metadata.block_tables
    num_tiles, num_kv_heads, head_dim = -(-chunk.length // KEYS), k_cache.shape[2], q.shape[2]
    tiles = torch.empty((num_kv_heads, num_tiles, 2, KEYS, head_dim), dtype=q.dtype)
    shapes = _shapes(q, k_cache)
    kernel("chunk_attention", "piippipifpp", q.dtype, **shapes, KEYS=KEYS)(
        q[rows].data_ptr(),
        q.stride(0),
        rows.stop - rows.start,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        metadata.block_size,
        tables[chunk.sequence].data_ptr(),
        chunk.length,
        scale,
        tiles.data_ptr(),
        out[rows].data_ptr(),
    )


def _shapes(q: Tensor, k_cache: Tensor) -> dict[str, int]:
    """The constants that the attention kernels are compiled with."""
    num_kv_heads = k_cache.shape[2]
    return {
        "HEAD_DIM": q.shape[2],
        "KV_HEADS": num_kv_heads,
        "GROUP": q.shape[1] // num_kv_heads,
    }


def has_tiles(dtype: torch.dtype, **shapes: int) -> bool:
    """Whether this CPU has a matrix unit for `dtype` (AMX), and this torch its small products.

    The products are oneDNN's, which may be switched off at any time (`torch.backends.mkldnn`).
    """
    return bool(torch.backends.mkldnn.enabled) and _has_tiles(dtype, **shapes)


@lru_cache
def _has_tiles(dtype: torch.dtype, **shapes: int) -> bool:
    """`has_tiles` of this CPU and this torch; oneDNN is on.

    The products are no public interface of torch: another version may lack them, or be built such
    that they always fail.
    """
    has_matrix_unit = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if dtype != torch.bfloat16 or has_matrix_unit is None or not has_matrix_unit():
        return False
    try:
        built = library("chunk_attention", dtype, **shapes, KEYS=KEYS)
    except CompileError:
        return False
    return bool(built.has_products())


def find_chunks(metadata: AttentionMetadata, dtype: torch.dtype) -> tuple[Chunk, ...]:
    """The sequences with several query tokens; in any `dtype` they are the same."""
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    return tuple(
        Chunk(slice(start, stop), sequence, length)
        for sequence, (start, stop, length) in enumerate(
            zip(starts, starts[1:], lengths, strict=False)
        )
        if stop - start > 1 and length > 0
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
