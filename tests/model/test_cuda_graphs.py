"""What can be shown of CUDA graphs without a GPU: the padding that every replay relies on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minichunk.core.plan import ScheduledChunk, StepPlan
from minichunk.core.request import SamplingParams
from minichunk.llm import LLM
from minichunk.model.batch import BatchBuilder
from minichunk.model.cuda_graphs import LARGEST_BUCKET, bucket_for, fill, padded_inputs
from minichunk.model.memory import default_num_blocks, full_step, gpu_room

TinyModel = Callable[[str], tuple[PreTrainedModel, Path]]
GREEDY = SamplingParams(temperature=0.0, seed=0)
BLOCK = 4


def test_buckets_hold_their_requests_and_waste_little() -> None:
    for count in range(1, LARGEST_BUCKET + 1):
        bucket = bucket_for(count)
        assert bucket is not None
        assert count <= bucket < max(count + 8, 2 * count)
    assert bucket_for(LARGEST_BUCKET + 1) is None


def decodes(lengths: list[int], rng: random.Random, num_blocks: int) -> StepPlan:
    """A step in which sequences of these lengths decode, their blocks shuffled."""
    free = rng.sample(range(num_blocks), num_blocks)
    chunks = []
    for index, length in enumerate(lengths):
        table = tuple(free.pop() for _ in range(-(-length // BLOCK)))
        token = (rng.randrange(3, 300),)
        chunks.append(ScheduledChunk(f"{index}", length - 1, 1, token, table, GREEDY, True, 1))
    return StepPlan(step=0, chunks=tuple(chunks), budget=512, block_size=BLOCK)


def test_a_padded_step_computes_the_same_and_writes_nothing_else(
    tiny_model: TinyModel, rng: random.Random
) -> None:
    """The same inputs are refilled for steps of different sizes, as in a replay."""
    llm = LLM(
        tiny_model("llama")[1],
        dtype="float32", device="cpu", backend="torch", block_size=BLOCK, num_blocks=60, quiet=True,
    )  # fmt: skip
    decoder, kv = llm.executor.decoder, llm.executor.kv
    kv.storage.normal_()
    layers = kv.layers(BLOCK)
    inputs = None
    for count in (5, 8, 2, 7):
        plan = decodes([rng.randrange(1, 25) for _ in range(count)], rng, 60)
        batch = BatchBuilder(torch.device("cpu")).build(plan)
        before = kv.storage.clone()
        expected = decoder.logits(batch, layers)
        after = kv.storage.clone()
        kv.storage.copy_(before)
        if inputs is None:
            inputs = padded_inputs(512, batch, bucket=8)
        fill(inputs, batch)
        # The torch backend keeps host-side index work in the metadata, so it needs a fresh one.
        fresh = replace(inputs, attention=replace(inputs.attention))
        assert torch.allclose(decoder.logits(fresh, layers)[:count], expected, atol=1e-5)
        assert torch.allclose(kv.storage, after, atol=1e-5)


def test_recorded_bounds_hold_for_every_later_step(rng: random.Random) -> None:
    batch = BatchBuilder(torch.device("cpu")).build(decodes([3, 9], rng, 20))
    inputs = padded_inputs(500, batch, bucket=4)
    assert inputs.attention.max_seq_len >= 500
    assert inputs.attention.block_tables.shape == (4, 125)
    assert inputs.slot_mapping.tolist() == [-1] * 4
    assert inputs.attention.seq_lens.tolist() == [0] * 4


def test_the_pool_gets_what_weights_and_activations_leave() -> None:
    gigabyte = 2**30
    room = gpu_room(
        80 * gigabyte, free=60 * gigabyte, activations=5 * gigabyte, memory_fraction=0.9
    )
    assert room == (72 - 20 - 5) * gigabyte


def test_a_pool_is_never_larger_than_useful(tiny_model: TinyModel) -> None:
    executor = LLM(tiny_model("llama")[1], device="cpu", num_blocks=4, quiet=True).executor
    sizes = {"max_num_batched_tokens": 64, "memory_fraction": 0.9}
    blocks = default_num_blocks(executor, block_size=16, max_num_seqs=3, max_model_len=100, **sizes)
    assert blocks == 3 * 7
    with pytest.raises(Exception, match="memory_fraction"):
        default_num_blocks(
            executor, block_size=16, max_num_seqs=3, max_model_len=100,
            max_num_batched_tokens=64, memory_fraction=1.5,
        )  # fmt: skip


def test_no_room_for_a_single_block_says_what_to_change(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minichunk.model.memory.free_cpu_bytes", lambda: 1000)
    with pytest.raises(Exception, match=r"memory_fraction.*max_num_batched_tokens"):
        LLM(tiny_model("llama")[1], device="cpu", quiet=True)


@pytest.mark.parametrize("num_tokens", [1, 16, 100, 512, 1300])
def test_the_measured_step_is_a_full_one(num_tokens: int, tiny_model: TinyModel) -> None:
    llm = LLM(tiny_model("qwen3")[1], device="cpu", block_size=16, num_blocks=90, quiet=True)
    plan = full_step(llm.model_config, num_tokens)
    assert plan.num_tokens == num_tokens
    assert len(llm.executor.execute(plan).token_ids) == len(plan.chunks)


def test_block_tables_are_rewritten_only_where_they_changed(rng: random.Random) -> None:
    """Whatever the order and the mixture, the batch shows each request's own table."""
    builder = BatchBuilder(torch.device("cpu"))
    tables = {str(i): tuple(rng.sample(range(500), rng.randrange(1, 40))) for i in range(30)}
    for _ in range(200):
        names = rng.sample(sorted(tables), rng.randrange(1, 8))
        for name in names:
            if rng.random() < 0.3:
                tables[name] = tuple(rng.sample(range(500), rng.randrange(1, 60)))
        chunks = tuple(
            ScheduledChunk(
                name, len(tables[name]) * BLOCK - 1, 1, (5,), tables[name], GREEDY, True, 1
            )
            for name in names
        )
        batch = builder.build(StepPlan(step=0, chunks=chunks, budget=64, block_size=BLOCK))
        for row, name in zip(batch.attention.block_tables.tolist(), names, strict=True):
            width = len(tables[name])
            assert tuple(row[:width]) == tables[name]
            assert set(row[width:]) <= {-1}


def test_a_plan_of_lengths_only_is_refused() -> None:
    chunk = ScheduledChunk("r", 0, 3, (), (0,), None, False, 3)
    plan = StepPlan(step=0, chunks=(chunk,), budget=8, block_size=BLOCK)
    with pytest.raises(ValueError, match="token ids"):
        BatchBuilder(torch.device("cpu")).build(plan)
