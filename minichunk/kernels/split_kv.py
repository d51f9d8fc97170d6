"""Split-KV decode: several programs share one long context, and a second kernel adds them up.

Used by `attention.paged_attention` when a decode step has too few sequences to fill the GPU: one
program per (sequence, KV head) would leave most multiprocessors idle while a few walk through
thousands of keys. Shows Flash-Decoding (Dao et al., 2023): softmax averages over parts of the keys
combine exactly, weighted by the sums of their exponentials.
"""

from __future__ import annotations

from torch import Tensor

from minichunk.kernels._triton import jit, next_power_of_2, tl

MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 64


def choose_num_splits(num_programs: int, max_seq_len: int, num_multiprocessors: int) -> int:
    """Into how many parts each context of a decode step is split.

    The rule: as many as it takes to give each multiprocessor two programs, but at least
    MIN_KEYS_PER_SPLIT keys in each part and at most MAX_SPLITS parts; rounded down to a power of
    two, because every number is a kernel of its own. `max_seq_len` may be an upper bound: each
    sequence is split evenly by its own length, and a part without keys costs next to nothing.
    """
    to_fill_the_gpu = -(-2 * num_multiprocessors // max(num_programs, 1))
    worth_splitting = max_seq_len // MIN_KEYS_PER_SPLIT
    most = max(1, min(to_fill_the_gpu, worth_splitting, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


def combine_splits(partial: Tensor, log_sums: Tensor, out: Tensor) -> None:
    """Writes the weighted average of the parts to out [num_tokens, num_q_heads, head_dim].

    partial [num_splits, num_tokens, num_q_heads, head_dim] float32, each part's average;
    log_sums [num_splits, num_tokens, num_q_heads] float32, log2 of its sum of exponentials.
    """
    num_splits, num_tokens, num_q_heads, head_dim = partial.shape
    combine_kernel[(num_tokens * num_q_heads,)](
        out,
        partial,
        log_sums,
        num_tokens * num_q_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_2(head_dim),
        NUM_SPLITS=num_splits,
        num_warps=2,  # few threads, so that each loads four numbers at once, with 64 lanes too
        enable_fp_fusion=True,
    )


@jit(do_not_specialize=["num_rows"])
def combine_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One program: one row, that is one (token, query head).

    out [num_rows, HEAD_DIM]; partial float32 [NUM_SPLITS, num_rows, HEAD_DIM];
    log_sum float32 [NUM_SPLITS, num_rows], -1e30 for a part without keys, whose weight is then 0.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, PADDED_DIM)
    split_row = split.to(tl.int64) * num_rows + row
    log_sum = tl.load(log_sum_ptr + split_row)
    weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    part = tl.load(
        partial_ptr + split_row[:, None] * HEAD_DIM + dim[None, :],
        mask=(dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    average = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    out_ptrs = out_ptr + row * HEAD_DIM + dim
    tl.store(out_ptrs, average.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
