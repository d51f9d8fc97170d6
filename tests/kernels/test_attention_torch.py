"""The dense calls for chunks of prompts: padded keys, newest first, and a mask that is one line."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from minichunk.kernels.attention import AttentionMetadata, paged_attention
from minichunk.kernels.attention_torch import KEY_MULTIPLE, QUERY_TILE, plan_chunks

from .ragged import DEVICE, RaggedBatch, attention_by_definition, ragged_batch, relative_error

DTYPES_AND_BOUNDS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def random_chunks(rng: random.Random, dtype: torch.dtype) -> RaggedBatch:
    """Chunks and decodes whose lengths lie around a block and around the padding of keys."""
    block_size = rng.choice([4, 16])
    edges = [edge + step for edge in (block_size, KEY_MULTIPLE) for step in (-1, 0, 1)]
    lengths = [
        (rng.choice([1, 2, *edges]), rng.choice([0, 1, *edges, rng.randrange(150)]))
        for _ in range(rng.randint(2, 5))
    ]
    print(lengths)
    return ragged_batch(
        lengths,
        num_kv_heads=rng.choice([1, 3]),
        group_size=rng.choice([1, 3, 4]),
        head_dim=rng.choice([16, 64]),
        block_size=block_size,
        dtype=dtype,
        seed=rng.randrange(2**32),
    )


@pytest.mark.parametrize(("dtype", "bound"), DTYPES_AND_BOUNDS)
def test_chunks_around_blocks_and_padding_equal_the_definition(rng, dtype, bound):
    for _ in range(6):
        batch = random_chunks(rng, dtype)
        out = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale)
        assert relative_error(out, attention_by_definition(batch)) < bound


def test_the_bias_shows_each_token_the_keys_up_to_itself_once(rng):
    new, before, block_size = QUERY_TILE + rng.randint(2, 90), rng.randint(1, 200), 16
    print(new, before)
    blocks = rng.sample(range(90), -(-(new + before) // block_size))
    metadata = AttentionMetadata.build([0, new], [new + before], [blocks], block_size, DEVICE)
    position_of = torch.full((90 * block_size,), -1)
    for position in range(new + before):
        position_of[blocks[position // block_size] * block_size + position % block_size] = position
    calls = plan_chunks(metadata, torch.bfloat16)
    assert [call.rows for call in calls] == [slice(0, QUERY_TILE), slice(QUERY_TILE, new)]
    for call in calls:
        positions = position_of[call.slots.cpu()]
        assert (positions >= 0).all()
        for row in range(call.rows.start, call.rows.stop):
            seen = positions[call.bias[row - call.rows.start].cpu() == 0]
            assert seen.sort().values.equal(torch.arange(before + row + 1))


@pytest.mark.parametrize(("dtype", "bound"), DTYPES_AND_BOUNDS)
def test_the_bias_as_a_view_gives_what_the_same_bias_written_out_gives(rng, dtype, bound):
    batch = ragged_batch(
        [(rng.randint(2, 150), rng.randint(1, 300))],
        num_kv_heads=2,
        group_size=3,
        head_dim=64,
        block_size=16,
        dtype=dtype,
        seed=rng.randrange(2**32),
    )
    print(batch.cu_seqlens_q, batch.seq_lens)
    keys, values = batch.k_cache.flatten(0, 1), batch.v_cache.flatten(0, 1)
    (call,) = plan_chunks(batch.metadata(), dtype)
    if DEVICE == "cpu":
        assert call.bias.untyped_storage().nbytes() <= 8 * sum(call.bias.shape)
    written_out = replace(call, bias=call.bias.to(dtype).contiguous())
    out = call(batch.q, keys, values, batch.scale)
    assert relative_error(out, written_out(batch.q, keys, values, batch.scale)) < bound
    oldest_first = replace(written_out, slots=call.slots.flip(0), bias=call.bias.flip(1).to(dtype))
    assert relative_error(out, oldest_first(batch.q, keys, values, batch.scale)) < bound


@pytest.mark.parametrize(("dtype", "bound"), DTYPES_AND_BOUNDS)
def test_a_chunk_behind_a_prefix_equals_those_rows_of_the_whole_prompt(rng, dtype, bound):
    total = QUERY_TILE + rng.randint(100, 300)
    batch = ragged_batch(
        [(total, 0)],
        num_kv_heads=1,
        group_size=3,
        head_dim=64,
        block_size=16,
        dtype=dtype,
        seed=rng.randrange(2**32),
    )
    metadata = batch.metadata()
    assert [call.bias for call in plan_chunks(metadata, dtype)] == [None]
    whole = paged_attention(batch.q, batch.k_cache, batch.v_cache, metadata, batch.scale)
    prefix = rng.randrange(1, total - QUERY_TILE)
    print(total, prefix)
    metadata = AttentionMetadata.build(
        [0, total - prefix], [total], batch.block_tables, batch.block_size, DEVICE
    )
    rest = paged_attention(batch.q[prefix:], batch.k_cache, batch.v_cache, metadata, batch.scale)
    assert relative_error(rest, whole[prefix:]) < bound
