"""Each policy on a small scene that shows what it is for: who waits, who stalls, by how much.

A step takes 1 second plus 1 second for each 10 prompt tokens, so gaps can be counted by hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from minichunk.core import policies
from minichunk.core.diff import diff_traces
from minichunk.core.engine import Engine
from minichunk.core.invariants import check_state
from minichunk.core.plan import Offer, StepPlan
from minichunk.core.policies import PolicyError, policy, resolve_policy
from minichunk.core.trace import Trace

from .fake_executor import (
    chunks_of,
    drain,
    expected_tokens,
    greedy,
    make_engine,
    random_prompt,
    tokens_of,
)

CHATS, DOCUMENT, BUDGET = 4, 60, 16


def cost(plan: StepPlan) -> float:
    return 1.0 + plan.num_prefill_tokens / 10.0


def scene(policy: Any, **knobs: Any) -> Engine:
    """Four chats are decoding when a document of 60 tokens arrives."""
    knobs = {"max_num_batched_tokens": BUDGET, "num_blocks": 200, **knobs}
    engine = make_engine(cost, policy=policy, **knobs)
    rng = random.Random(7)
    for i in range(CHATS):
        engine.add_request(random_prompt(rng, 3), greedy(30), request_id=f"chat{i}")
    document = random_prompt(rng, DOCUMENT)
    engine.add_request(document, greedy(3), request_id="document", arrival_time=10.0)
    drain(engine)
    engine.trace.validate()
    return engine


def longest_chat_gap(trace: Trace) -> float:
    figures = trace.metrics().requests
    return max(figures[f"chat{i}"].max_itl or 0.0 for i in range(CHATS))


def ttft(trace: Trace) -> float:
    value = trace.metrics().requests["document"].ttft
    assert value is not None
    return value


def mixed_steps(engine: Engine) -> list[StepPlan]:
    plans: list[StepPlan] = engine.executor.plans  # type: ignore[attr-defined]
    return [plan for plan in plans if plan.num_prefill_tokens and plan.num_decode_tokens]


def test_static_lets_nobody_join_until_the_batch_has_ended() -> None:
    engine = scene("static")
    last_of_batch = max(engine.trace.requests[f"chat{i}"].token_times[-1] for i in range(CHATS))
    assert engine.trace.requests["document"].token_times[0] > last_of_batch
    assert longest_chat_gap(engine.trace) == 1.0  # nobody in the batch is ever disturbed
    assert mixed_steps(engine) == []


def test_continuous_stalls_every_decode_for_the_whole_prompt() -> None:
    engine = scene("continuous")
    assert longest_chat_gap(engine.trace) == pytest.approx(1.0 + DOCUMENT / 10 + 1.0)
    assert chunks_of(engine, "document")[0][1:] == (0, DOCUMENT)  # although the budget is 16
    assert mixed_steps(engine) == []


def test_a_whole_prompt_above_the_budget_waits_for_a_step_of_its_own(rng: random.Random) -> None:
    engine = make_engine(policy="continuous", max_num_batched_tokens=8)
    for rid, length in (("small", 6), ("huge", 30), ("next", 7)):
        engine.add_request(random_prompt(rng, length), greedy(2), request_id=rid)
    drain(engine)
    grants = [{c.request_id: c.num_tokens for c in plan.chunks} for plan in plans_of(engine)]
    assert grants[:3] == [{"small": 6}, {"huge": 30}, {"next": 7}]
    assert engine.trace.why("huge", 0).reason == "whole"


def test_decode_first_bounds_every_gap_by_one_step_of_the_budget() -> None:
    engine = scene("decode-first")
    assert longest_chat_gap(engine.trace) == pytest.approx(1.0 + (BUDGET - CHATS) / 10)
    assert len(mixed_steps(engine)) == DOCUMENT // (BUDGET - CHATS)
    assert longest_chat_gap(scene("continuous").trace) > 3 * longest_chat_gap(engine.trace)


def test_decode_first_with_smaller_chunks_trades_ttft_for_smaller_gaps() -> None:
    large, small = scene("decode-first").trace, scene("decode-first", chunk_size=4).trace
    assert longest_chat_gap(small) == pytest.approx(1.4)
    assert longest_chat_gap(small) < longest_chat_gap(large)
    assert ttft(small) > ttft(large)


def test_prefill_first_has_the_earliest_first_token_and_makes_decodes_wait() -> None:
    prefill_first, decode_first = scene("prefill-first").trace, scene("decode-first").trace
    assert ttft(prefill_first) < ttft(decode_first)
    assert longest_chat_gap(prefill_first) > 3 * longest_chat_gap(decode_first)


def test_balanced_gives_prefill_its_share_while_both_have_work() -> None:
    engine = scene("balanced(share=0.25)")
    for plan in mixed_steps(engine):
        assert plan.num_prefill_tokens <= BUDGET // 4
    assert longest_chat_gap(engine.trace) == pytest.approx(1.4)
    for other in ("decode-first", "prefill-first"):
        assert diff_traces(engine.trace, scene(other).trace) is not None


def test_balanced_leaves_the_share_of_an_idle_side_to_the_other(rng: random.Random) -> None:
    engine = make_engine(policy="balanced(share=0.25)", max_num_batched_tokens=16)
    rid = engine.add_request(random_prompt(rng, 40), greedy(2))
    drain(engine)
    assert [n for _, _, n in chunks_of(engine, rid)][:3] == [16, 16, 8]


def test_balanced_serves_decodes_in_turns_when_their_share_is_short(rng: random.Random) -> None:
    """Ten decodes share eight tokens of a step: none may be left out again and again."""
    engine = make_engine(
        policy="balanced(share=0.5)", max_num_batched_tokens=16, max_num_seqs=16, num_blocks=500
    )
    for i in range(10):
        engine.add_request(random_prompt(rng, 1), greedy(40), request_id=f"decode{i}")
    engine.add_request(random_prompt(rng, 400), greedy(1), request_id="document")
    drain(engine)
    gaps = [engine.trace.metrics().requests[f"decode{i}"].max_itl for i in range(10)]
    assert max(gap or 0.0 for gap in gaps) == 2.0


def test_balanced_serves_a_third_of_the_decodes_per_step_and_forgets_none(
    rng: random.Random,
) -> None:
    engine = make_engine(
        policy="balanced(share=0.75)", max_num_batched_tokens=16, max_num_seqs=16, num_blocks=500
    )
    for i in range(12):
        engine.add_request(random_prompt(rng, 1), greedy(40), request_id=f"decode{i}")
    engine.add_request(random_prompt(rng, 600), greedy(1), request_id="document")
    drain(engine)
    gaps = [engine.trace.metrics().requests[f"decode{i}"].max_itl for i in range(12)]
    assert max(gap or 0.0 for gap in gaps) == 3.0


def test_alternating_chunks_without_mixing() -> None:
    engine = scene("alternating")
    assert mixed_steps(engine) == []
    kinds = ["prefill" if plan.num_prefill_tokens else "decode" for plan in plans_of(engine)]
    first = chunks_of(engine, "document")[0][0]
    assert kinds[first : first + 6] == ["prefill", "decode"] * 3
    assert longest_chat_gap(engine.trace) == pytest.approx(1.0 + BUDGET / 10 + 1.0)


def plans_of(engine: Engine) -> list[StepPlan]:
    return engine.executor.plans  # type: ignore[attr-defined, no-any-return]


def first_mixed_prefill(context: int, policy: str) -> int:
    """Prefill tokens in the first step that a prompt shares with four decodes of this context."""
    rng = random.Random(context)
    engine = make_engine(policy=policy, max_num_batched_tokens=64, num_blocks=2000)
    for _ in range(4):
        engine.add_request(random_prompt(rng, context), greedy(30))
    while not (plans_of(engine) and plans_of(engine)[-1].num_decode_tokens == 4):
        engine.step()
    engine.add_request(random_prompt(rng, 100), greedy(1))
    engine.step()
    return plans_of(engine)[-1].num_prefill_tokens


def test_split_fuse_cuts_smaller_chunks_when_the_decodes_contexts_double() -> None:
    weighted = "split-fuse(context_per_token=50)"
    chunks = [first_mixed_prefill(context, weighted) for context in (100, 200, 400)]
    assert chunks[0] > chunks[1] > chunks[2] >= 1
    # The weights meet the target: 4 decodes of context c weigh 4 (1 + c / 50).
    for context, chunk in zip((100, 200), chunks, strict=False):
        weight = 4 * (1 + context / 50)
        assert 0 <= 64 - weight - chunk < 2


def test_split_fuse_with_infinite_context_per_token_is_fastgens_own_rule() -> None:
    plain = "split-fuse(context_per_token=inf)"
    assert [first_mixed_prefill(context, plain) for context in (100, 400)] == [60, 60]


def test_held_long_prompts_let_short_ones_pass(rng: random.Random) -> None:
    def short_ttft(**knobs: Any) -> float:
        engine = make_engine(num_blocks=600, max_num_batched_tokens=16, **knobs)
        for name in ("long0", "long1"):
            engine.add_request(random_prompt(rng, 400), greedy(1), request_id=name)
        engine.step()
        engine.add_request(random_prompt(rng, 6), greedy(1), request_id="short")
        drain(engine)
        return engine.trace.metrics().requests["short"].ttft or 0.0

    assert short_ttft() > 40
    assert short_ttft(max_long_partial_prefills=1, long_prefill_threshold=8) <= 2


def test_a_held_prompt_says_so_and_its_chunk_is_limited_while_others_wait(
    rng: random.Random,
) -> None:
    engine = make_engine(
        num_blocks=600,
        max_num_batched_tokens=16,
        max_long_partial_prefills=1,
        long_prefill_threshold=8,
    )
    for name in ("long0", "long1", "long2"):
        engine.add_request(random_prompt(rng, 20), greedy(1), request_id=name)
    engine.step()
    assert chunks_of(engine, "long0") == [(0, 0, 8)]
    assert [engine.trace.why(name, 0).reason for name in ("long1", "long2")] == ["held", "held"]
    drain(engine)
    assert chunks_of(engine, "long2")[0][2] == 16  # nobody else waits for prompt tokens then
    engine.trace.validate()


# A student's own policy -----------------------------------------------------------------------


def test_a_registered_policy_is_known_by_name_with_its_parameters() -> None:
    @policy("test-shy")
    def shy(view: Any, most: int = 2) -> Any:
        for request in view.decoding:
            yield request, 1
        for request in view.prefilling:
            yield request, most

    try:
        engine = scene("test-shy(most=5)")
        assert engine.trace.meta["policy"] == "test-shy(most=5)"
        assert max(plan.num_prefill_tokens for plan in mixed_steps(engine)) == 5
        assert str(shy(most=5)) == str(resolve_policy("test-shy(most=5)"))
        with pytest.raises(ValueError, match="no parameter mots; it has most"):
            resolve_policy("test-shy(mots=5)")
    finally:
        del policies.REGISTRY["test-shy"]


def test_a_policy_may_build_on_another_and_react_to_what_it_is_granted() -> None:
    granted: list[int] = []

    def watching(view: Any) -> Any:
        if view.decoding:
            granted.append((yield view.decoding[0], 1))
            yield from ((request, 1) for request in view.decoding[1:])
        for request in view.prefilling:
            granted.append((yield Offer(request, request.num_uncomputed_tokens)))

    engine = scene(watching)
    assert sum(granted) > DOCUMENT
    assert max(granted) <= BUDGET
    assert engine.trace.meta["policy"] == "watching"


def test_the_view_shows_budget_blocks_time_and_the_queue(rng: random.Random) -> None:
    seen: list[tuple[Any, ...]] = []

    def looking(view: Any) -> Any:
        last = view.last_plan.step if view.last_plan else None
        seen.append((view.step, view.now, view.num_waiting, view.free_blocks, last))
        for request in view.prefilling:
            yield request, 8
        seen.append((view.budget, view.num_scheduled_tokens, view.free_blocks))
        for request in view.decoding:
            yield request, 1

    engine = make_engine(policy=looking, max_num_batched_tokens=20, num_blocks=10)
    for _ in range(3):
        engine.add_request(random_prompt(rng, 8), greedy(3))
    engine.step(), engine.step()
    assert seen == [(0, 0.0, 3, 10, None), (0, 20, 5), (1, 1.0, 0, 5, 0), (16, 4, 4)]


def offers_finished(view: Any) -> Any:
    if view.step == 1:
        view.state["kept"] = view.running[0]
    if view.step > 2:
        yield view.state["kept"], 1
    yield from policies.decode_first(view)


def offers_twice(view: Any) -> Any:
    for request in view.decoding:
        yield request, 1
        if view.step > 2:
            yield request, 1
    for request in view.prefilling:
        yield request, request.num_uncomputed_tokens


def never_yields(view: Any) -> Any:
    if view.step <= 2:
        yield from policies.decode_first(view)


def is_no_generator(view: Any) -> Any:
    return [] if view.step > 2 else policies.decode_first(view)


def never_ends(view: Any) -> Any:
    while view.step > 2:
        yield view.running[0], 0
    yield from policies.decode_first(view)


def yields_garbage(view: Any) -> Any:
    yield from policies.decode_first(view)
    if view.step > 2:
        yield "request 1"


def yields_half_tokens(view: Any) -> Any:
    for request in view.running:
        yield request, 1 if view.step <= 2 else 0.5
    for request in view.prefilling:
        if request.status == "waiting":
            yield request, 4


def overtakes(view: Any) -> Any:
    for request in view.decoding:
        yield request, 1
    if view.step <= 2:
        for request in view.prefilling:
            yield request, request.num_uncomputed_tokens
    else:
        queue = sorted(view._scheduler.waiting, key=lambda request: request.index)
        yield queue[-1], 1


def raises(view: Any) -> Any:
    yield from policies.decode_first(view)
    if view.step > 2:
        raise PolicyError("policy 'raises' has a bug of its own")


def borrows(view: Any) -> Any:
    yield from policies.decode_first(view)
    if view.step > 2:
        other = make_engine()
        other.add_request([1, 2, 3], greedy(9), request_id="foreign")
        other.step()
        yield other.requests["foreign"], 1


MISTAKES: list[tuple[Callable[..., Any], str]] = [
    (offers_finished, "which is finished"),
    (offers_twice, "twice in one step"),
    (never_yields, "made no offer in step 3, although"),
    (is_no_generator, "is not a generator"),
    (never_ends, "does not end"),
    (yields_garbage, "yielded 'request 1'"),
    (yields_half_tokens, "0.5 tokens, which is not a whole number"),
    (overtakes, "nobody overtakes"),
    (borrows, "'foreign', which is another engine's"),
    (raises, "a bug of its own"),
]


@pytest.mark.parametrize(("mistake", "what"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bad_policy_gets_an_error_that_names_it_and_costs_nobody_a_token(
    rng: random.Random, mistake: Callable[..., Any], what: str
) -> None:
    engine = make_engine(policy=mistake, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = {f"r{i}": random_prompt(rng, rng.randint(5, 9)) for i in range(7)}
    lengths = {rid: 2 if rid == "r0" else 12 for rid in prompts}
    for rid, prompt in prompts.items():
        engine.add_request(prompt, greedy(lengths[rid]), request_id=rid)
    events = engine.step() + engine.step() + engine.step()
    for _ in range(3):  # it says so as often as it is asked, and nothing gets worse
        with pytest.raises(PolicyError, match=what) as caught:
            engine.step()
        assert mistake.__name__ in str(caught.value)
        check_state(engine.scheduler, engine.requests.values())
    engine.scheduler.policy = resolve_policy("decode-first")
    events += drain(engine)
    for rid, prompt in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(), lengths[rid])
    engine.trace.validate()
    assert engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    ("spelling", "what"),
    [
        ("bogus", "unknown policy 'bogus'; known: alternating, balanced"),
        ("balanced(share)", "not of the form"),
        ("balanced(share=", "not of the form"),
        ("balanced(rate=2)", "no parameter rate; it has share"),
        (7, "must be a name, a Policy or a generator function"),
    ],
)
def test_an_unknown_policy_or_parameter_is_refused_when_the_engine_is_made(
    spelling: Any, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        make_engine(policy=spelling)


@pytest.mark.parametrize(
    "spelling", ["balanced(share=1.5)", "split-fuse(target=0)", "split-fuse(context_per_token=0)"]
)
def test_a_parameter_out_of_range_is_named_and_the_request_survives(
    rng: random.Random, spelling: str
) -> None:
    engine = make_engine(policy=spelling)
    rid = engine.add_request(random_prompt(rng, 5), greedy(2))
    with pytest.raises(ValueError, match=spelling.split("(")[0]):
        engine.step()
    engine.scheduler.policy = resolve_policy("decode-first")
    assert len(tokens_of(drain(engine), rid)) == 2
