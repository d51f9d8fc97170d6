"""The torch path of paged attention: against the definition, and what chunking must not change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from minichunk.kernels.attention import AttentionMetadata, paged_attention
from minichunk.kernels.attention_torch import QUERY_TILE, plan_chunks, plan_decodes

from .ragged import attention_by_definition, ragged_batch, relative_error


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_equals_the_definition_on_random_ragged_batches(rng, dtype, bound):
    for _ in range(8):
        block_size = rng.choice([4, 16])
        near_a_block = [1, block_size - 1, block_size, block_size + 1]
        lengths = [
            (rng.choice([1, 1, *near_a_block]), rng.choice([0, *near_a_block, rng.randrange(90)]))
            for _ in range(rng.randint(1, 6))
        ]
        print(lengths)
        batch = ragged_batch(
            lengths,
            num_kv_heads=rng.choice([1, 3]),
            group_size=rng.choice([1, 3, 4]),
            head_dim=rng.choice([32, 80]),
            block_size=block_size,
            dtype=dtype,
            seed=rng.randrange(2**32),
        )
        out = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale)
        assert out.dtype == dtype
        assert relative_error(out, attention_by_definition(batch)) < bound


def test_a_chunk_longer_than_a_tile_and_decodes_of_very_different_lengths(rng):
    lengths = [(QUERY_TILE + 7, 300), (1, 0), (1, 299), (1, 1100), (QUERY_TILE, 0), (1, 255)]
    rng.shuffle(lengths)
    batch = ragged_batch(
        lengths,
        num_kv_heads=1,
        group_size=2,
        head_dim=8,
        block_size=16,
        dtype=torch.float64,
        seed=rng.randrange(2**32),
    )
    metadata = batch.metadata()
    out = paged_attention(batch.q, batch.k_cache, batch.v_cache, metadata, batch.scale)
    assert relative_error(out, attention_by_definition(batch)) < 1e-12
    all_rows = torch.arange(len(batch.q))
    calls = (*plan_chunks(metadata, batch.q.dtype), *plan_decodes(metadata, batch.q.dtype))
    rows = torch.cat([all_rows[call.rows] for call in calls])
    assert sorted(rows.tolist()) == list(range(len(batch.q)))


def test_any_cutting_into_chunks_gives_the_same_output(rng):
    total, block_size = rng.randint(30, 80), 8
    batch = ragged_batch(
        [(total, 0)],
        num_kv_heads=2,
        group_size=3,
        head_dim=16,
        block_size=block_size,
        dtype=torch.float64,
        seed=rng.randrange(2**32),
    )
    whole = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale)
    cuts = sorted({0, total, *(rng.randrange(total) for _ in range(3))})
    print(cuts)
    pieces = []
    for start, stop in itertools.pairwise(cuts):
        metadata = AttentionMetadata.build(
            [0, stop - start], [stop], batch.block_tables, block_size
        )
        q = batch.q[start:stop]
        pieces.append(paged_attention(q, batch.k_cache, batch.v_cache, metadata, batch.scale))
    assert torch.allclose(torch.cat(pieces), whole, rtol=0, atol=1e-12)


def test_a_padding_row_without_keys_gives_zero():
    batch = ragged_batch(
        [(1, 4)],
        num_kv_heads=1,
        group_size=1,
        head_dim=8,
        block_size=4,
        dtype=torch.float32,
        seed=0,
    )
    metadata = AttentionMetadata.build([0, 1, 2], [5, 0], [batch.block_tables[0], []], 4)
    q = torch.cat((batch.q, batch.q))
    out = paged_attention(q, batch.k_cache, batch.v_cache, metadata, 1.0)
    assert out[0].abs().sum() > 0
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_block_tables_as_lists_are_padded_with_minus_one():
    metadata = AttentionMetadata.build([0, 1, 3], [3, 9], [[7], [2, 5, 1]], block_size=4)
    assert metadata.block_tables.tolist() == [[7, -1, -1], [2, 5, 1]]
    assert (metadata.max_query_len, metadata.max_seq_len, metadata.num_seqs) == (2, 9, 2)


def test_metadata_that_does_not_fit_together_is_refused():
    with pytest.raises(
        ValueError, match=r"2 sequences, so cu_seqlens_q needs 3 .* they have 2 and 2"
    ):
        AttentionMetadata.build([0, 1], [3, 9], [[7], [2]], block_size=16)
    with pytest.raises(ValueError, match="17 tokens does not fit a block table of 1 blocks of 16"):
        AttentionMetadata.build([0, 1], [17], [[7]], block_size=16)


def test_heads_that_do_not_divide_are_refused():
    q, cache = torch.zeros(1, 4, 8), torch.zeros(1, 4, 3, 8)
    metadata = AttentionMetadata.build([0, 1], [1], [[0]], block_size=4)
    with pytest.raises(ValueError, match="4 heads of 8, the cache 3 heads of 8"):
        paged_attention(q, cache, cache, metadata, 1.0)
