"""Cases that broke serving engines in the field, each as a small scene with a known outcome."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minichunk.core.plan import StepPlan
from minichunk.core.request import FinishReason, SamplingParams

from .fake_executor import (
    chunks_of,
    drain,
    expected_tokens,
    greedy,
    make_engine,
    random_prompt,
    tokens_of,
    written,
)

BLOCK = 4
POLICIES = (
    "static",
    "continuous",
    "decode-first",
    "prefill-first",
    "balanced",
    "alternating",
    "split-fuse",
)


def allocated(engine: Any, request_id: str) -> dict[int, int]:
    """Blocks that the request took, by step."""
    counts: dict[int, int] = {}
    for event in engine.trace.block_events:
        if event.kind == "alloc" and event.request_id == request_id:
            counts[event.step] = counts.get(event.step, 0) + len(event.blocks)
    return counts


def preemptions(engine: Any) -> list[str]:
    return [event.request_id for event in engine.trace.events if event.kind == "preempt"]


@pytest.mark.parametrize(("prompt", "blocks_by_step"), [(BLOCK, {0: 1, 1: 1}), (BLOCK - 1, {0: 1})])
def test_first_decode_takes_a_block_only_where_the_last_one_is_full(
    rng: random.Random, prompt: int, blocks_by_step: dict[int, int]
) -> None:
    engine = make_engine(block_size=BLOCK)
    rid = engine.add_request(random_prompt(rng, prompt), greedy(10))
    engine.step(), engine.step()
    assert allocated(engine, rid) == blocks_by_step


def test_chunks_that_start_in_the_middle_of_a_block_change_no_token(rng: random.Random) -> None:
    engine = make_engine(block_size=BLOCK, max_num_batched_tokens=7)
    prompts = [random_prompt(rng, 10), random_prompt(rng, 9)]
    rids = [engine.add_request(prompt, greedy(5)) for prompt in prompts]
    events = drain(engine)
    starts = [start for rid in rids for _, start, n in chunks_of(engine, rid) if n > 1]
    assert any(start % BLOCK for start in starts)
    for rid, prompt in zip(rids, prompts, strict=True):
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(5), 5)


@pytest.mark.parametrize("first_is_still_running", [True, False])
def test_a_prompt_wholly_in_the_prefix_cache_still_computes_a_token(
    rng: random.Random, first_is_still_running: bool
) -> None:
    engine = make_engine(block_size=BLOCK)
    prompt = random_prompt(rng, 3 * BLOCK)
    first = engine.add_request(prompt, greedy(20 if first_is_still_running else 1))
    events = engine.step()
    second = engine.add_request(prompt, greedy(3))
    events += engine.step()
    assert chunks_of(engine, second)[0] == (1, 2 * BLOCK, BLOCK)  # two of three blocks were hit
    table = engine.requests[second].table.blocks
    owners = 2 if first_is_still_running else 1
    assert [engine.scheduler.pool.ref_counts[block] for block in table] == [owners, owners, 1]
    events += drain(engine)
    assert tokens_of(events, second) == expected_tokens(prompt, greedy(3), 3)
    assert (
        tokens_of(events, first)[:3]
        == tokens_of(events, second)[:3][: len(tokens_of(events, first))]
    )
    assert engine.scheduler.pool.num_used == 0


def test_a_prompt_that_never_fits_the_pool_is_refused_at_once_and_others_run(
    rng: random.Random,
) -> None:
    engine = make_engine(block_size=BLOCK, num_blocks=8, max_model_len=1000)
    with pytest.raises(ValueError, match=r"33 tokens and needs 9 blocks.*num_blocks=8"):
        engine.add_request(random_prompt(rng, 33), greedy())
    rid = engine.add_request(random_prompt(rng, 30), greedy(2))
    assert len(tokens_of(drain(engine), rid)) == 2


def test_two_prompts_of_60_percent_of_the_pool_both_finish_without_recomputation(
    rng: random.Random,
) -> None:
    engine = make_engine(block_size=BLOCK, num_blocks=20, max_num_batched_tokens=16)
    rids = [engine.add_request(random_prompt(rng, 48), greedy(4)) for _ in range(2)]
    events = drain(engine)
    assert [len(tokens_of(events, rid)) for rid in rids] == [4, 4]
    assert engine.trace.metrics().recomputed_tokens == 0
    assert chunks_of(engine, rids[1])[0][0] > chunks_of(engine, rids[0])[-1][0]


@pytest.mark.parametrize("policy", POLICIES)
def test_when_half_done_prompts_hold_all_blocks_somebody_is_preempted(
    rng: random.Random, policy: str
) -> None:
    engine = make_engine(policy=policy, num_blocks=10, block_size=BLOCK, max_num_batched_tokens=8)
    prompts = {rid: random_prompt(rng, 28) for rid in ("a", "b")}
    for rid, prompt in prompts.items():
        start_half_done(engine, rid, prompt)
    assert engine.scheduler.pool.num_free == 0
    events = drain(engine, max_steps=60)
    assert preemptions(engine) == ["b"]
    for rid, prompt in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(3), 3)


def start_half_done(engine: Any, rid: str, prompt: list[int]) -> None:
    """Run 20 tokens in; admission, which looks at the whole prompt, would not have let both in."""
    engine.add_request(prompt, greedy(3), request_id=rid)
    request = engine.requests[rid]
    engine.scheduler.start(request, (), promised=0)
    engine.scheduler.cache.take(request, 5)
    request.num_computed_tokens = 20
    before = 0
    for position in range(20):
        before = written(before, prompt[position], position)
        engine.executor.slots[request.table.slot(position, BLOCK)] = before


def test_a_chunk_shrinks_to_the_free_blocks_before_anybody_is_evicted(rng: random.Random) -> None:
    engine = make_engine(num_blocks=11, block_size=BLOCK, max_num_batched_tokens=16)
    prompts = {rid: random_prompt(rng, 28) for rid in ("a", "b")}
    for rid, prompt in prompts.items():
        start_half_done(engine, rid, prompt)
    events = engine.step()
    assert chunks_of(engine, "a") == [(0, 20, BLOCK)]  # it wanted 8, and one block was free
    assert preemptions(engine) == ["b"]  # not for a's sake: b itself found no block
    assert engine.trace.why("b", 0).reason == "preempted"
    events += drain(engine)
    for rid, prompt in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(3), 3)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_after_k_outputs_loses_and_repeats_no_token(
    rng: random.Random, prefix_caching: bool
) -> None:
    engine = make_engine(num_blocks=8, block_size=BLOCK, prefix_caching=prefix_caching)
    params = SamplingParams(max_tokens=18, temperature=1.0, seed=rng.randrange(2**40))
    prompts = {rid: random_prompt(rng, 6) for rid in ("first", "second")}
    for rid, prompt in prompts.items():
        engine.add_request(prompt, params, request_id=rid)
    events = drain(engine)
    assert preemptions(engine) == ["second"]
    for rid, prompt in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(prompt, params, 18)
    record = engine.trace.requests["second"]
    assert record.prompt_tokens == 6
    preempt = next(e for e in engine.trace.events if e.kind == "preempt")
    k = sum(time <= preempt.time for time in record.token_times)
    resume = next(e for e in engine.trace.events if e.kind == "resume")
    _, start, tokens = next(c for c in chunks_of(engine, "second") if c[0] >= resume.step)
    assert 0 < k < 18
    assert (start, start + tokens) == (resume.tokens, 6 + k)
    assert resume.tokens == 0 or prefix_caching


@pytest.mark.parametrize("half_first", [False, True])
def test_a_victim_already_in_the_plan_is_rolled_back_and_nobody_is_skipped(
    rng: random.Random, half_first: bool
) -> None:
    def half(view: Any) -> Any:
        """The order's last decodes first, then prompts: the victim leads the plan."""
        for request in reversed(view.decoding[2:]):
            yield request, 1
        for request in view.prefilling:
            yield request, request.num_uncomputed_tokens
        for request in view.decoding[:2]:
            yield request, 1

    engine = make_engine(
        policy=half if half_first else "decode-first",
        order="priority",
        num_blocks=12,
        block_size=BLOCK,
        # The victim's token must come back to the budget, or the last decode would find none.
        max_num_batched_tokens=11 if half_first else 12,
    )
    for i in range(4):
        engine.add_request(random_prompt(rng, 7), greedy(20), request_id=f"low{i}", priority=i)
    while len(engine.scheduler.running) < 4 or engine.scheduler.last_plan.num_prefill_tokens:  # type: ignore[union-attr]
        engine.step()
    engine.add_request(random_prompt(rng, 8), greedy(20), request_id="high", priority=-1)
    free, victim = engine.scheduler.pool.num_free, engine.requests["low3"]
    held = len(victim.table)
    assert free < 2
    engine.step()
    plan = engine.scheduler.last_plan
    assert plan is not None
    assert plan.preempted == ("low3",)
    granted = {chunk.request_id: chunk.num_tokens for chunk in plan.chunks}
    assert granted == {"low0": 1, "low1": 1, "low2": 1, "high": 8}
    assert len(victim.table) == 0
    taken = sum(allocated(engine, rid).get(plan.step, 0) for rid in granted)
    given = allocated(engine, "low3").get(plan.step, 0)
    assert engine.scheduler.pool.num_free == free + held - taken
    assert given in (0, 1)  # the block for its own decode, taken and given back in this step
    assert engine.trace.why("low3", plan.step).reason == "preempted"
    drain(engine)


def test_many_partial_prompts_at_once_all_finish(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=12, chunk_size=3)
    rids = [engine.add_request(random_prompt(rng, 20), greedy(3)) for _ in range(6)]
    engine.step()
    assert len(engine.scheduler.running) == 4  # all of them half done
    events = drain(engine)
    assert all(len(tokens_of(events, rid)) == 3 for rid in rids)


def test_the_next_prompt_uses_what_a_tail_chunk_leaves(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=10)
    first, second = (engine.add_request(random_prompt(rng, n), greedy(1)) for n in (13, 9))
    drain(engine)
    assert chunks_of(engine, first) == [(0, 0, 10), (1, 10, 3)]
    assert chunks_of(engine, second) == [(1, 0, 7), (2, 7, 2)]


def test_decode_first_never_lets_a_decode_wait(rng: random.Random) -> None:
    engine = make_engine(num_blocks=400, max_num_batched_tokens=16)
    for i in range(30):
        prompt = random_prompt(rng, rng.randint(1, 90))
        engine.add_request(prompt, greedy(rng.randint(1, 20)), arrival_time=i * rng.random() * 3)
    drain(engine)
    assert not preemptions(engine)
    gaps = [gap for m in engine.trace.metrics().requests.values() for gap in m.itl]
    assert set(gaps) == {1.0}


@pytest.mark.parametrize("load", [1, 3, 9])
def test_prefill_first_lets_decodes_wait_for_every_prompt_that_comes(
    rng: random.Random, load: int
) -> None:
    engine = make_engine(policy="prefill-first", num_blocks=400, max_num_batched_tokens=16)
    decoding = engine.add_request(random_prompt(rng, 3), greedy(20))
    engine.step()
    lengths = [16 * rng.randint(1, 3) for _ in range(load)]
    for length in lengths:
        engine.add_request(random_prompt(rng, length), greedy(1))
    drain(engine)
    longest = engine.trace.metrics().requests[decoding].max_itl
    assert longest == 1 + sum(-(-length // 16) for length in lengths)  # no bound but the load


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_budget_of_4_and_8_requests_nobody_starves(rng: random.Random, policy: str) -> None:
    engine = make_engine(policy=policy, max_num_batched_tokens=4)
    rids = [engine.add_request(random_prompt(rng, 6), greedy(10)) for _ in range(8)]
    events = drain(engine, max_steps=120)
    assert all(len(tokens_of(events, rid)) == 10 for rid in rids)


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones(rng: random.Random) -> None:
    engine = make_engine(num_blocks=16, block_size=BLOCK, max_num_batched_tokens=64)
    for i in range(60):
        engine.add_request(random_prompt(rng, 12), greedy(3), arrival_time=float(i))
    engine.add_request(random_prompt(rng, 56), greedy(2), request_id="long", arrival_time=5.5)
    drain(engine)
    first_token = engine.trace.requests["long"].token_times[0]
    assert first_token - 5.5 <= 10


def test_a_request_that_outgrows_the_pool_alone_ends_with_length(rng: random.Random) -> None:
    engine = make_engine(num_blocks=4, block_size=BLOCK)
    prompt = random_prompt(rng, 5)
    big = engine.add_request(prompt, greedy(100))
    after = engine.add_request(random_prompt(rng, 9), greedy(2))
    events = drain(engine)
    last = [event for event in events if event.request_id == big][-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert "num_blocks=4" in last.note
    assert tokens_of(events, big) == expected_tokens(prompt, greedy(), 12)  # 5 + 12 = 16 + 1
    assert big not in preemptions(engine)
    assert len(tokens_of(events, after)) == 2
    assert engine.scheduler.pool.num_used == 0


def test_nobody_is_evicted_where_all_victims_together_would_not_suffice(
    rng: random.Random,
) -> None:
    engine = make_engine(order="priority", num_blocks=12, block_size=BLOCK)
    engine.add_request(random_prompt(rng, 20), greedy(4), request_id="equal", priority=0)
    engine.add_request(random_prompt(rng, 10), greedy(4), request_id="low", priority=1)
    engine.step()
    engine.add_request(random_prompt(rng, 32), greedy(2), request_id="asker", priority=0)
    engine.step()
    assert preemptions(engine) == []  # low's 3 blocks and 4 free ones are not 8
    assert engine.trace.why("asker", 1).reason == "blocks"
    drain(engine)


def test_after_a_preemption_nobody_is_admitted_in_that_step(rng: random.Random) -> None:
    engine = make_engine(order="shortest", num_blocks=8, block_size=BLOCK)
    for rid, length, answer, arrival in (
        ("a", 8, 10, 0),
        ("victim", 20, 30, 0),
        ("w", 12, 20, 0.5),
    ):
        engine.add_request(
            random_prompt(rng, length), greedy(answer), request_id=rid, arrival_time=arrival
        )
    engine.step(), engine.step()
    assert engine.scheduler.last_plan.preempted == ("victim",)  # type: ignore[union-attr]
    assert engine.scheduler.pool.num_free == 5  # w would fit now
    assert engine.trace.why("w", 1).reason == "blocks"
    drain(engine)
    assert chunks_of(engine, "w")[0][0] == 2


def test_static_fills_one_batch_over_as_many_steps_as_its_prompts_need(rng: random.Random) -> None:
    engine = make_engine(policy="static", max_num_batched_tokens=12)
    for _ in range(5):
        engine.add_request(random_prompt(rng, 8), greedy(6))
    late = engine.add_request(random_prompt(rng, 8), greedy(2), arrival_time=4.5)
    drain(engine)
    plans: list[StepPlan] = engine.executor.plans  # type: ignore[attr-defined]
    assert [plan.num_prefill_tokens for plan in plans[:4]] == [12, 12, 12, 4]
    assert [plan.num_decode_tokens for plan in plans[4:9]] == [5] * 5
    assert chunks_of(engine, late)[0][0] == 9  # it waits for the whole batch


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 7, 100])
def test_only_the_last_chunk_samples_and_seeds_do_not_notice_chunks(
    rng: random.Random, chunk_size: int
) -> None:
    engine = make_engine(chunk_size=chunk_size)
    prompt = random_prompt(rng, 13)
    params = SamplingParams(max_tokens=5, temperature=0.7, seed=rng.randrange(2**31))
    rid = engine.add_request(prompt, params)
    events = drain(engine)
    prompt_chunks = [
        chunk
        for plan in engine.executor.plans  # type: ignore[attr-defined]
        for chunk in plan.chunks
        if chunk.start < 13
    ]
    assert [chunk.sampling for chunk in prompt_chunks[:-1]] == [None] * (len(prompt_chunks) - 1)
    assert prompt_chunks[-1].sampling == params
    assert tokens_of(events, rid) == expected_tokens(prompt, params, 5)


def test_max_tokens_1_ends_in_the_prefill_step_and_takes_no_decode_block(
    rng: random.Random,
) -> None:
    engine = make_engine(block_size=BLOCK)
    rid = engine.add_request(random_prompt(rng, 2 * BLOCK), greedy(1))
    [event] = engine.step()
    assert event.finish_reason is FinishReason.LENGTH
    assert allocated(engine, rid) == {0: 2}
    assert not engine.has_unfinished_requests()


def test_an_abort_between_the_last_chunk_and_its_token_emits_nothing(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    aborted = engine.add_request(random_prompt(rng, 12), greedy(5))
    other = engine.add_request(random_prompt(rng, 3), greedy(5))
    engine.step()
    engine.executor.before = lambda plan: engine.cancel(aborted) and None  # type: ignore[attr-defined]
    events = engine.step()
    assert chunks_of(engine, aborted)[-1] == (1, 8, 4)  # its last chunk did run
    assert tokens_of(events, aborted) == []
    engine.executor.before = lambda plan: None  # type: ignore[attr-defined]
    events += drain(engine)
    assert tokens_of(events, aborted) == []
    assert [e.finish_reason for e in events if e.request_id == aborted] == ["cancelled"]
    assert len(tokens_of(events, other)) == 5


def test_a_half_prefilled_abort_frees_all_its_blocks(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    rid = engine.add_request(random_prompt(rng, 30), greedy(5))
    engine.step()
    assert engine.scheduler.pool.num_used == 2
    assert engine.cancel(rid)
    assert engine.scheduler.pool.num_used == 0
    assert engine.scheduler.reserved_blocks == 0


def test_ttft_is_the_time_of_the_first_token_not_of_the_first_chunk(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    rid = engine.add_request(random_prompt(rng, 30), greedy(2))
    drain(engine)
    assert engine.trace.metrics().requests[rid].ttft == 4.0
