"""A schedule changes when tokens come, never which: the promise on which all the rest stands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minichunk.core.engine import Engine
from minichunk.core.plan import ScheduledChunk, StepPlan, StepResult
from minichunk.core.policies import REGISTRY
from minichunk.core.request import SamplingParams
from minichunk.llm import LLM
from minichunk.model.batch import BatchBuilder
from minichunk.model.executor import ModelExecutor

from .tiny import CPU_BACKENDS, random_prompt, reference_tokens

TinyModel = Callable[[str], tuple[PreTrainedModel, Path]]
BLOCK = 8
COUNT = 6
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=CPU_BACKENDS)
def llm(tiny_model: TinyModel, request: pytest.FixtureRequest) -> LLM:
    """A GQA 3:1 model with blocks of 8 tokens."""
    _, folder = tiny_model("llama")
    return LLM(
        folder, dtype="float32", device="cpu", backend=request.param, block_size=BLOCK,
        num_blocks=64, check_invariants=True, quiet=True,
    )  # fmt: skip


def run(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams] | None = None
) -> list[list[int]]:
    """Serve all prompts, which arrive together; the tokens of each."""
    params = params or [GREEDY] * len(prompts)
    names = [engine.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            break
        engine.step()
    assert not engine.has_unfinished_requests()
    return [engine.trace.requests[name].output_token_ids or [] for name in names]


@pytest.mark.parametrize("policy", sorted(REGISTRY))
def test_tokens_are_the_same_under_every_policy_chunk_size_and_cache(
    policy: str, llm: LLM, tiny_model: TinyModel, rng: random.Random
) -> None:
    reference, _ = tiny_model("llama")
    blocks = rng.randrange(2, 5)
    lengths = [blocks * BLOCK - 1, blocks * BLOCK, blocks * BLOCK + 1]
    shared = random_prompt(rng, lengths[0])
    # The same beginning, so that prefix caching has something to find, and different ends.
    prompts = [shared + random_prompt(rng, length - lengths[0]) for length in lengths]
    expected = [reference_tokens(reference, prompt, COUNT) for prompt in prompts]
    for chunk_size in (1, BLOCK - 1, BLOCK, BLOCK + 1, 7, lengths[-1]):
        for prefix_caching in (False, True):
            engine = llm.new_engine(
                policy=policy,
                chunk_size=chunk_size,
                max_num_batched_tokens=chunk_size + len(prompts),
                prefix_caching=prefix_caching,
            )
            assert run(engine, prompts) == expected, (chunk_size, prefix_caching, "together")
            alone = [run(engine, [prompt])[0] for prompt in prompts]
            assert alone == expected, (chunk_size, prefix_caching, "alone, one after the other")
            hits = sum(event.tokens for event in engine.trace.events if event.kind == "admit")
            assert (hits > 0) == prefix_caching


class Poisoned:
    """An executor that fills every slot nobody may read with NaN before each step."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        self.engine: Engine | None = None
        self.num_poisoned = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.engine is not None
        readable = torch.zeros(self.executor.kv.num_slots, dtype=torch.bool)
        for request in self.engine.requests.values():
            for position in range(request.num_computed_tokens):
                readable[request.table.slot(position, plan.block_size)] = True
        self.executor.kv.storage[:, :, ~readable] = float("nan")
        self.num_poisoned += int((~readable).sum())
        return self.executor.execute(plan)


@pytest.mark.parametrize("chunk_size", [1, 5, BLOCK, 64])
def test_unwritten_slots_are_never_read(
    chunk_size: int, llm: LLM, tiny_model: TinyModel, rng: random.Random
) -> None:
    reference, _ = tiny_model("llama")
    prompts = [random_prompt(rng, rng.randrange(1, 40)) for _ in range(4)]
    engine = llm.new_engine(chunk_size=chunk_size, prefix_caching=False)
    poisoned = Poisoned(llm.executor)
    poisoned.engine, engine.executor = engine, poisoned
    try:
        tokens = run(engine, prompts)
    finally:
        llm.executor.kv.storage.zero_()
    assert poisoned.num_poisoned > 0
    assert tokens == [reference_tokens(reference, prompt, COUNT) for prompt in prompts]


def test_a_chunk_writes_the_slots_that_its_table_names_and_no_others(
    llm: LLM, rng: random.Random
) -> None:
    """Also where it starts in the middle of a block: positions are absolute."""
    num_blocks = llm.executor.kv.num_slots // BLOCK
    for _ in range(10):
        start, count = rng.randrange(0, 30), rng.randrange(1, 30)
        table = tuple(rng.sample(range(num_blocks), -(-(start + count) // BLOCK)))
        chunk = ScheduledChunk(
            "r", start, count, tuple(random_prompt(rng, count)), table, None, False, start + count
        )
        plan = StepPlan(step=0, chunks=(chunk,), budget=count, block_size=BLOCK)
        expected = [
            table[position // BLOCK] * BLOCK + position % BLOCK
            for position in range(start, start + count)
        ]
        batch = BatchBuilder(torch.device("cpu")).build(plan)
        assert batch.slot_mapping.tolist() == expected
        assert batch.positions.tolist() == list(range(start, start + count))
        storage = llm.executor.kv.storage.fill_(7.0)  # a value that no key or value has by chance
        llm.executor.execute(plan)
        written = (storage != 7.0).flatten(3).any(-1)  # [layers, 2, slots]
        for layer in written.flatten(0, 1):
            assert sorted(layer.nonzero().flatten().tolist()) == sorted(expected)


def test_seeded_sampling_ignores_chunks_batch_mates_and_preemption(
    llm: LLM, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 21)
    params = SamplingParams(
        max_tokens=20, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, ignore_eos=True,
        seed=rng.randrange(2**63),
    )  # fmt: skip
    [alone] = run(llm.new_engine(chunk_size=None), [prompt], [params])
    for chunk_size in (1, 5, 16):
        assert run(llm.new_engine(chunk_size=chunk_size), [prompt], [params]) == [alone]

    mates = [random_prompt(rng, rng.randrange(5, 30)) for _ in range(5)]
    mixed = [params] + [SamplingParams(max_tokens=20, temperature=t) for t in (0, 0.5, 1, 2, 3)]
    assert run(llm.new_engine(chunk_size=11), [prompt, *mates], mixed)[0] == alone

    # 25 + 25 + 21 tokens fit into 12 blocks, their answers do not: the last to come is preempted.
    engine = llm.new_engine(num_blocks=12, prefix_caching=False)
    older = [random_prompt(rng, 25) for _ in range(2)]
    longest = replace(params, temperature=1.5)
    assert run(engine, [*older, prompt], [longest, longest, params])[-1] == alone
    preempted = [event.request_id for event in engine.trace.events if event.kind == "preempt"]
    assert "2" in preempted

    other_seed = replace(params, seed=(params.seed or 0) + 1)
    assert run(llm.new_engine(), [prompt], [other_seed]) != [alone]


def test_nothing_leaks_from_run_to_run(llm: LLM, rng: random.Random) -> None:
    """A, B, A on one model: both A have the same plans, prefix cache included."""
    prompts = [random_prompt(rng, length) for length in (30, 17, 41)]

    def plans_of(**knobs: object) -> list[object]:
        engine = llm.new_engine(**knobs)
        run(engine, prompts)
        trace = engine.trace
        work = [(step.prefill_tokens, step.decode_tokens) for step in trace.steps]
        return [work, trace.spans, trace.block_events, trace.requests["2"].output_token_ids]

    first = plans_of(chunk_size=9)
    plans_of(policy="continuous", block_size=4, num_blocks=100)
    assert plans_of(chunk_size=9) == first
