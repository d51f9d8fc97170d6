"""Paged attention for a ragged batch: chunks of prompts and single decode tokens in one launch.

Every layer of a step calls this right after `rope.rope_and_cache` has written the step's keys and
values. It shows PagedAttention (Kwon et al., SOSP 2023, section 4.1): keys and values lie in blocks
anywhere in the cache, and a block table says where. It shows FlashAttention's online softmax (Dao
et al., 2022, section 3.1; Milakov and Gimelshein, 2018), which never writes the scores to memory,
and Flash-Decoding's split of long contexts (Dao et al., 2023), in `split_kv.py`.

The index work is done once per step, by `metadata = AttentionMetadata.build(...)`; each layer calls
`paged_attention(q, k_cache, v_cache, metadata, scale, backend=...)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minichunk.kernels._triton import dot, jit, next_power_of_2, tl
from minichunk.kernels.attention_cpp import paged_attention_cpp
from minichunk.kernels.attention_metadata import AttentionMetadata
from minichunk.kernels.attention_torch import paged_attention_torch
from minichunk.kernels.backend import num_multiprocessors, runs_on_cpp, runs_on_triton, target_name
from minichunk.kernels.split_kv import choose_num_splits, combine_splits
from minichunk.kernels.tiles import AttentionTile, attention_tile

__all__ = ["AttentionMetadata", "paged_attention"]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    backend: str = "torch",
) -> Tensor:
    """Causal attention of the step's tokens over the cache; returns a tensor like q.

    q [num_tokens, num_q_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads,
    head_dim], which already hold this step's keys and values. Query head h reads KV head
    h // (num_q_heads // num_kv_heads). Slots that no sequence owns may hold anything, even NaN.
    """
    num_q_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
    if num_q_heads % num_kv_heads or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"q has {num_q_heads} heads of {q.shape[2]}, the cache {num_kv_heads} heads of "
            f"{k_cache.shape[3]}: the first pair must be a multiple, the second equal"
        )
    if runs_on_triton(backend, q):
        return paged_attention_triton(q, k_cache, v_cache, metadata, scale)
    if runs_on_cpp(backend, q):
        return paged_attention_cpp(q, k_cache, v_cache, metadata, scale)
    return paged_attention_torch(q, k_cache, v_cache, metadata, scale)


def paged_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    num_splits: int | None = None,
    tile: AttentionTile | None = None,
) -> Tensor:
    """`paged_attention` on Triton: one launch, or two where long contexts are split.

    Everything that shapes the launch is known on the host (sizes of tensors and the metadata's
    upper bounds), so it never waits for the GPU and may be captured in a CUDA graph. `num_splits`
    overrides the rule of `split_kv.choose_num_splits`, and `tile` the table of `tiles.py`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group_size = num_q_heads // num_kv_heads
    if q.stride(2) != 1 or q.stride(1) != head_dim or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"each token of q must be contiguous and both caches laid out alike, but q has strides "
            f"{q.stride()} and the caches {k_cache.stride()} and {v_cache.stride()}"
        )
    is_decode = metadata.max_query_len <= 1
    if tile is None:
        tile = attention_tile(target_name(q.device), q.dtype, head_dim, group_size, is_decode)
    tokens_per_tile = tile.rows // group_size
    if is_decode:
        num_tiles = metadata.num_seqs
    else:  # an upper bound: each sequence may leave one tile partly filled
        num_tiles = num_tokens // tokens_per_tile + metadata.num_seqs
    if num_splits is None:
        num_splits = 1
        if is_decode:
            num_splits = choose_num_splits(
                num_tiles * num_kv_heads, metadata.max_seq_len, num_multiprocessors(q.device)
            )
    out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    partial, log_sums = out, out
    if num_splits > 1:
        shape = (num_splits, num_tokens, num_q_heads)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return out
    attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        partial,
        log_sums,
        q,
        k_cache,
        v_cache,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        metadata.block_tables,
        scale * math.log2(math.e),
        num_tokens,
        metadata.num_seqs,
        metadata.block_tables.stride(0),
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_Q_HEADS=num_q_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_2(head_dim),
        BLOCK_SIZE=metadata.block_size,
        TILE_ROWS=tile.rows,
        TILE_TOKENS=tokens_per_tile,
        TILE_KEYS=tile.keys,
        IS_DECODE=is_decode,
        NUM_SPLITS=num_splits,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    if num_splits > 1:
        combine_splits(partial, log_sums, out)
    return out


@jit(do_not_specialize=["num_tokens", "num_seqs", "block_tables_stride"])
def attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    log_sum_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    scale_log2,
    num_tokens,
    num_seqs,
    block_tables_stride,
    q_stride,
    block_stride,
    slot_stride,
    head_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One program: TILE_TOKENS tokens of one sequence, all query heads of one KV head, one split.

    A tile has a row for each (token, query head), so a key is loaded once for all the heads that
    read it. With a group of 3 a tile of 16 rows holds 5 tokens, and its last row is padding.

    out          [num_tokens, NUM_Q_HEADS, HEAD_DIM], dtype of q; with splits: float32
                 [NUM_SPLITS, num_tokens, NUM_Q_HEADS, HEAD_DIM]
    log_sum      float32 [NUM_SPLITS, num_tokens, NUM_Q_HEADS], written with splits only: log2 of
                 the sum of exponentials of the split's scores
    q            [num_tokens, NUM_Q_HEADS, HEAD_DIM], a token's heads contiguous
    k_cache, v_cache  [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], last dimension contiguous
    cu_seqlens_q [num_seqs + 1], seq_lens [num_seqs], block_tables [num_seqs, max_blocks], int32
    scale_log2   softmax scale * log2(e): exponentials are taken to base 2, the hardware's own

    With IS_DECODE each sequence has at most one token, and tile number = sequence number. Else
    sequence s begins at tile cu_seqlens_q[s] // TILE_TOKENS + s, and a binary search finds s.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # Late tiles of a chunk see the most keys: they start first, so that the launch ends evenly.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if IS_DECODE:
        seq = tile
        first_token = 0
    else:
        seq = _sequence_of_tile(tile, cu_seqlens_q_ptr, num_seqs, TILE_TOKENS)
        first_tile = tl.load(cu_seqlens_q_ptr + seq) // TILE_TOKENS + seq
        first_token = (tile - first_tile) * TILE_TOKENS
    query_start = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - query_start
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first_position = seq_len - query_len + first_token

    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    position = first_position + token
    in_tile = (token < TILE_TOKENS) & (first_token + token < query_len)
    out_row = (query_start + first_token + token).to(tl.int64)
    q_mask = in_tile[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + out_row[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :],
        mask=q_mask,
        other=0.0,
    )

    # The tile's last token sees keys up to itself; keys beyond are never touched. Keys before
    # `all_see` are seen by every row, so they need no causal mask.
    stop = first_position + tl.minimum(TILE_TOKENS, query_len - first_token)
    all_see = (first_position + 1) // TILE_KEYS * TILE_KEYS
    start = 0
    if NUM_SPLITS > 1:
        keys_per_split = tl.cdiv(tl.cdiv(stop, NUM_SPLITS), TILE_KEYS) * TILE_KEYS
        start = split * keys_per_split
        stop = tl.minimum(stop, start + keys_per_split)
    middle = tl.maximum(start, tl.minimum(all_see, stop // TILE_KEYS * TILE_KEYS))

    # A huge negative number instead of -inf: a row that has seen no key yet never meets inf - inf.
    row_max = tl.full([TILE_ROWS], -1.0e30, tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    k_head_ptr = k_cache_ptr + kv_head * head_stride
    v_head_ptr = v_cache_ptr + kv_head * head_stride
    for key_start in range(start, middle, TILE_KEYS):
        acc, row_max, row_sum = _attend_to_keys(
            acc, row_max, row_sum, q, position, key_start, stop, scale_log2, table_ptr,
            k_head_ptr, v_head_ptr, block_stride, slot_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, IS_MASKED=False,
        )  # fmt: skip
    for key_start in range(middle, stop, TILE_KEYS):
        acc, row_max, row_sum = _attend_to_keys(
            acc, row_max, row_sum, q, position, key_start, stop, scale_log2, table_ptr,
            k_head_ptr, v_head_ptr, block_stride, slot_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, IS_MASKED=True,
        )  # fmt: skip

    is_empty = row_sum == 0.0  # a split without keys, or a padding row
    row_sum = tl.where(is_empty, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    out_row = out_row * NUM_Q_HEADS + head
    if NUM_SPLITS > 1:
        out_row += split.to(tl.int64) * num_tokens * NUM_Q_HEADS
        log_sum = tl.where(is_empty, -1.0e30, row_max * scale_log2 + tl.log2(row_sum))
        tl.store(log_sum_ptr + out_row, log_sum, mask=in_tile)
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


@jit()
def _sequence_of_tile(tile, cu_seqlens_q_ptr, num_seqs, TILE_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last sequence whose first tile is not after `tile`."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(cu_seqlens_q_ptr + middle) // TILE_TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def _attend_to_keys(  # type: ignore[no-untyped-def]
    acc,
    row_max,
    row_sum,
    q,
    position,
    key_start,
    stop,
    scale_log2,
    table_ptr,
    k_head_ptr,
    v_head_ptr,
    block_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """One step of the online softmax: keys [key_start, key_start + TILE_KEYS) join the average.

    acc holds sum(2^(score - row_max) * value) of the keys so far, row_sum the same without values.
    A new maximum rescales both. With IS_MASKED, keys from `stop` on are not loaded (their slots may
    hold NaN, or have no block), and keys after a row's own position get no weight.
    """
    key = key_start + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, PADDED_DIM)
    exists = key < stop
    if BLOCK_SIZE % TILE_KEYS == 0:  # the tile lies in one block: one look-up
        block = tl.load(table_ptr + key_start // BLOCK_SIZE).to(tl.int64)
        slot = key_start % BLOCK_SIZE + tl.arange(0, TILE_KEYS)
    else:
        if IS_MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        slot = key % BLOCK_SIZE
    offset = (block * block_stride + slot * slot_stride)[:, None] + dim[None, :]
    if IS_MASKED:
        mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_head_ptr + offset, mask=mask, other=0.0)
        v = tl.load(v_head_ptr + offset, mask=mask, other=0.0)
    elif HEAD_DIM == PADDED_DIM:
        k = tl.load(k_head_ptr + offset)
        v = tl.load(v_head_ptr + offset)
    else:
        k = tl.load(k_head_ptr + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_head_ptr + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)

    score = dot(q, tl.trans(k), tl.zeros([q.shape[0], TILE_KEYS], tl.float32))
    if IS_MASKED:
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, axis=1))
    weight = tl.exp2(score * scale_log2 - (new_max * scale_log2)[:, None])
    rescale = tl.exp2((row_max - new_max) * scale_log2)
    row_sum = row_sum * rescale + tl.sum(weight, axis=1)
    acc = dot(weight.to(v.dtype), v, acc * rescale[:, None])
    return acc, new_max, row_sum
