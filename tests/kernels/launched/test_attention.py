"""The attention kernel, against attention by definition in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minichunk.kernels import attention
from minichunk.kernels.attention import (
    AttentionMetadata,
    paged_attention,
    paged_attention_triton,
)
from minichunk.kernels.tiles import CHUNK_TILES, DECODE_TILES, AttentionTile

from ..ragged import DEVICE, RaggedBatch, attention_by_definition, ragged_batch, relative_error

BOUND = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
random_seeds = st.integers(0, 2**32 - 1)


@st.composite
def batches(draw, decodes_only: bool = False, longest: int = 70) -> RaggedBatch:
    block_size = draw(st.sampled_from([8, 16, 64]))
    boundary = st.sampled_from([1, block_size - 1, block_size, block_size + 1])
    query_len = st.just(1) if decodes_only else st.one_of(st.just(1), boundary, st.integers(1, 40))
    before = st.one_of(st.just(0), boundary, st.integers(0, longest))
    return ragged_batch(
        draw(st.lists(st.tuples(query_len, before), min_size=1, max_size=4)),
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group_size=draw(st.sampled_from([1, 3, 4, 8])),
        head_dim=draw(st.sampled_from([32, 64, 80, 96, 128])),
        block_size=block_size,
        dtype=draw(st.sampled_from(sorted(BOUND, key=str))),
        seed=draw(random_seeds),
    )


def run(batch: RaggedBatch, **options) -> torch.Tensor:
    return paged_attention_triton(
        batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale, **options
    )


@settings(max_examples=40, deadline=None, database=None)
@given(batches())
def test_chunks_and_decodes_in_one_launch(batch):
    out = run(batch)
    assert relative_error(out, attention_by_definition(batch)) < BOUND[batch.q.dtype]


@settings(max_examples=15, deadline=None, database=None)
@given(batches(decodes_only=True))
def test_decodes_alone(batch):
    assert relative_error(run(batch), attention_by_definition(batch)) < BOUND[batch.q.dtype]


@settings(max_examples=15, deadline=None, database=None)
@given(batches(decodes_only=True, longest=700), st.sampled_from([2, 4, 16]))
def test_split_contexts(batch, num_splits):
    out = run(batch, num_splits=num_splits)
    assert relative_error(out, attention_by_definition(batch)) < BOUND[batch.q.dtype]


@settings(max_examples=5, deadline=None, database=None)
@given(random_seeds)
def test_the_rule_splits_a_lone_long_context(seed):
    """What `paged_attention` itself chooses must be right too, not only what a test asks for."""
    batch = ragged_batch(
        [(1, 1500)],
        num_kv_heads=1,
        group_size=3,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        seed=seed,
    )
    with mock.patch.object(attention, "combine_splits", wraps=attention.combine_splits) as combine:
        out = paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale, backend="triton"
        )
    combine.assert_called_once()
    assert relative_error(out, attention_by_definition(batch)) < BOUND[torch.float32]


def all_tiles() -> list[tuple[bool, tuple[int, ...]]]:
    """Every distinct (rows, keys) of the two tables, for decodes and for chunks."""
    found = set()
    for is_decode, table in ((False, CHUNK_TILES), (True, DECODE_TILES)):
        for widths in table.values():
            for dims in widths.values():
                found |= {(is_decode, tile[:2]) for tile in dims.values()}
    return sorted(found)


@pytest.mark.parametrize(("is_decode", "shape"), all_tiles())
def test_every_tile_of_the_table(is_decode, shape):
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    lengths = [(1, 150), (1, 0), (1, 63)] if is_decode else [(70, 77), (1, 150), (3, 0), (64, 0)]
    batch = ragged_batch(
        lengths,
        num_kv_heads=1,
        group_size=3,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
        seed=seed,
    )
    out = run(batch, tile=AttentionTile(*shape, num_warps=4, num_stages=1))
    assert relative_error(out, attention_by_definition(batch)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("scores", [1e4, -1e4])
def test_huge_scores_do_not_overflow(scores):
    """One key, or many equal ones, with a score far outside the range of exp in float32."""
    batch = ragged_batch(
        [(1, 0), (4, 60)],
        num_kv_heads=1,
        group_size=1,
        head_dim=32,
        block_size=16,
        dtype=torch.float32,
        seed=0,
    )
    batch.q.fill_(1.0)
    batch.k_cache.fill_(scores / 32 / batch.scale)
    batch.keys = [torch.full_like(k, scores / 32 / batch.scale) for k in batch.keys]
    assert relative_error(run(batch), attention_by_definition(batch)) < 1e-3


def test_padding_rows_of_a_cuda_graph_give_zero():
    batch = ragged_batch(
        [(1, 20)],
        num_kv_heads=2,
        group_size=3,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        seed=1,
    )
    tables = [batch.block_tables[0], [], []]
    metadata = AttentionMetadata.build([0, 1, 2, 3], [21, 0, 0], tables, 16, DEVICE)
    q = batch.q.expand(3, -1, -1).contiguous()
    for num_splits in (1, 2):
        out = paged_attention_triton(
            q, batch.k_cache, batch.v_cache, metadata, batch.scale, num_splits
        )
        assert relative_error(out[:1], attention_by_definition(batch)) < 1e-3
        assert torch.equal(out[1:], torch.zeros_like(out[1:]))


def test_queries_may_be_a_slice_of_a_fused_projection():
    batch = ragged_batch(
        [(5, 9), (1, 3)],
        num_kv_heads=2,
        group_size=2,
        head_dim=32,
        block_size=8,
        dtype=torch.float32,
        seed=2,
    )
    fused = torch.randn(6, 8 * 32, device=DEVICE)
    fused[:, : 4 * 32] = batch.q.flatten(1)
    batch.q = fused[:, : 4 * 32].view(6, 4, 32)
    assert relative_error(run(batch), attention_by_definition(batch)) < 1e-3


def test_no_tokens_give_an_empty_output():
    q, cache = torch.empty(0, 2, 32, device=DEVICE), torch.zeros(1, 16, 1, 32, device=DEVICE)
    metadata = AttentionMetadata.build([0], [], [], 16, DEVICE)
    assert paged_attention(q, cache, cache, metadata, 1.0, backend="triton").shape == (0, 2, 32)


def test_a_head_dimension_without_a_tile_is_refused():
    q, cache = torch.zeros(1, 1, 40, device=DEVICE), torch.zeros(1, 16, 1, 40, device=DEVICE)
    metadata = AttentionMetadata.build([0, 1], [1], [[0]], 16, DEVICE)
    with pytest.raises(ValueError, match="head_dim=40 is not served"):
        paged_attention(q, cache, cache, metadata, 1.0, backend="triton")
