"""The step loop from outside: cancelling, time limits, refusals, errors, arrivals, events."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minichunk.core.clock import VirtualClock, WallClock
from minichunk.core.config import PRESETS, EngineConfig
from minichunk.core.engine import Engine, QueueFullError, TokenEvent
from minichunk.core.invariants import check_state
from minichunk.core.plan import StepCost, StepPlan, StepResult
from minichunk.core.request import FinishReason, PromptShape, RequestSpec, SamplingParams
from minichunk.core.trace import Trace

from .fake_executor import (
    VOCAB_SIZE,
    FakeExecutor,
    chunks_of,
    drain,
    expected_tokens,
    greedy,
    make_engine,
    random_prompt,
    tokens_of,
)


def ended(events: list[TokenEvent], rid: str) -> list[str]:
    return [str(e.finish_reason) for e in events if e.request_id == rid and e.finish_reason]


# Cancelling -------------------------------------------------------------------------------------


def waiting(engine: Engine, rng: random.Random) -> str:
    for _ in range(2):
        engine.add_request(random_prompt(rng, 8), greedy(9))
    return engine.add_request(random_prompt(rng, 8), greedy(9), request_id="victim")


def half_prefilled(engine: Engine, rng: random.Random) -> str:
    rid = engine.add_request(random_prompt(rng, 40), greedy(9), request_id="victim")
    engine.step()
    assert 0 < engine.requests[rid].num_computed_tokens < 40
    return rid


def decoding(engine: Engine, rng: random.Random) -> str:
    rid = engine.add_request(random_prompt(rng, 8), greedy(9), request_id="victim")
    engine.step(), engine.step()
    assert engine.requests[rid].is_decoding
    return rid


def preempted(engine: Engine, rng: random.Random) -> str:
    rid = decoding(engine, rng)
    engine.scheduler.preempt(engine.requests[rid])
    assert engine.requests[rid].num_preemptions == 1
    return rid


def not_arrived(engine: Engine, rng: random.Random) -> str:
    return engine.add_request(
        random_prompt(rng, 8), greedy(9), request_id="victim", arrival_time=50.0
    )


@pytest.mark.parametrize("state", [waiting, half_prefilled, decoding, preempted, not_arrived])
@pytest.mark.parametrize("inside_execute", [False, True])
def test_cancel_from_every_state(
    rng: random.Random,
    state: Callable[[Engine, random.Random], str],
    inside_execute: bool,
) -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=2, num_blocks=100)
    prompt = random_prompt(rng, 12)
    other = engine.add_request(prompt, greedy(20), request_id="other")
    engine.step()
    rid = state(engine, rng)
    before = len(engine.trace.requests[rid].token_times) if rid in engine.trace.requests else 0
    results: list[bool] = []

    def cancel_once(plan: StepPlan) -> None:
        engine.executor.before = lambda plan: None  # type: ignore[attr-defined]
        results.extend([engine.cancel(rid), engine.cancel(rid)])
        assert rid not in {r.request_id for r in engine.scheduler.running.values()}

    if inside_execute:
        engine.executor.before = cancel_once  # type: ignore[attr-defined]
    else:
        cancel_once(engine.executor.plans[-1])  # type: ignore[attr-defined]
        assert not any(rid in request for request in engine.requests)
    events = drain(engine)
    assert results == [True, False]
    assert not engine.cancel(rid)
    assert tokens_of(events, rid) == []
    assert ended(events, rid) == ["cancelled"]
    assert len(engine.trace.requests[rid].token_times) == before
    assert engine.trace.requests[rid].finish_reason == "cancelled"
    tokens = list(engine.trace.requests[other].output_token_ids or ())
    assert tokens == expected_tokens(prompt, greedy(), 20)
    assert engine.scheduler.pool.num_used == engine.scheduler.reserved_blocks == 0
    assert engine.clock.now() < 50 or state is not not_arrived
    engine.trace.validate()


def test_cancel_of_the_unknown_and_the_finished_says_false(rng: random.Random) -> None:
    engine = make_engine()
    rid = engine.add_request(random_prompt(rng, 4), greedy(1))
    drain(engine)
    assert not engine.cancel(rid)
    assert not engine.cancel("nobody")
    assert engine.step() == []


def test_a_cancelled_owner_leaves_shared_blocks_to_the_others(rng: random.Random) -> None:
    engine = make_engine()
    prompt = random_prompt(rng, 14)
    owner = engine.add_request(prompt, greedy(20))
    engine.step()
    sharer = engine.add_request(prompt, greedy(6))
    events = engine.step()
    shared = engine.requests[sharer].table.blocks[:3]
    assert [engine.scheduler.pool.ref_counts[block] for block in shared] == [2, 2, 2]
    engine.cancel(owner)
    assert [engine.scheduler.pool.ref_counts[block] for block in shared] == [1, 1, 1]
    events += drain(engine)
    assert tokens_of(events, sharer) == expected_tokens(prompt, greedy(), 6)


def test_an_event_handler_that_cancels_gets_no_more_tokens_of_that_request() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    seen: list[TokenEvent] = []

    def on_event(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == 4:  # "0" is handled first in each step, and ends "1" in the second
            assert event.request_id == "0"
            engine.cancel("1")

    specs = [RequestSpec(0.0, [1, 2, 3], 5), RequestSpec(0.0, [4, 5, 6], 5)]
    specs.append(RequestSpec(0.0, [7, 8], 5))
    engine.run(specs, on_event=on_event)
    after = seen[4:]
    assert [e for e in after if e.request_id == "1" and e.token_id is not None] == []
    assert ended(seen, "1") == ["cancelled"]


# Time limits ------------------------------------------------------------------------------------


def test_queue_timeout_ends_those_that_were_never_admitted(rng: random.Random) -> None:
    engine = make_engine(max_num_seqs=1)
    runs = engine.add_request(random_prompt(rng, 4), greedy(9), queue_timeout=3.0)
    waits = engine.add_request(random_prompt(rng, 4), greedy(9), queue_timeout=3.0)
    events = drain(engine)
    assert ended(events, runs) == ["length"]
    [end] = [event for event in events if event.request_id == waits]
    assert (end.token_id, end.finish_reason, end.time) == (None, "timeout", 3.0)
    assert end.note == "queue_timeout=3.0 s is over"


def test_total_timeout_ends_a_running_request_and_frees_its_blocks(rng: random.Random) -> None:
    engine = make_engine()
    rid = engine.add_request(random_prompt(rng, 4), greedy(90), timeout=5.0)
    events = drain(engine)
    assert len(tokens_of(events, rid)) == 5
    assert ended(events, rid) == ["timeout"]
    assert engine.scheduler.pool.num_used == 0
    assert [e.kind for e in engine.trace.events] == ["arrive", "admit", "timeout"]


def test_a_timeout_counts_from_the_arrival(rng: random.Random) -> None:
    engine = make_engine()
    rid = engine.add_request(random_prompt(rng, 4), greedy(90), timeout=5.0, arrival_time=100.0)
    drain(engine)
    assert engine.trace.requests[rid].finish_time == 105.0


def test_a_preempted_request_is_not_ended_by_its_queue_timeout(rng: random.Random) -> None:
    engine = make_engine(num_blocks=8)
    rids = [
        engine.add_request(random_prompt(rng, 6), greedy(18), queue_timeout=2.0) for _ in range(2)
    ]
    events = drain(engine)
    assert engine.trace.metrics().num_preemptions > 0
    assert [ended(events, rid) for rid in rids] == [["length"], ["length"]]


# The door ---------------------------------------------------------------------------------------

IMPOSSIBLE: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "the prompt is empty"),
    ([1] * 40, {}, "40 tokens, but max_model_len=40 leaves no room"),
    ([1] * 33, {}, "33 tokens and needs 9 blocks of block_size=4.*num_blocks=8"),
    (PromptShape(33), {}, "33 tokens and needs 9 blocks"),
    ([1, 2, VOCAB_SIZE], {}, f"{VOCAB_SIZE} at position 2 is outside the vocabulary"),
    ([1, -2], {}, "-2 at position 1 is not a token id"),
    ([1, 2.5], {}, "2.5 at position 1 is not a token id"),
    ([True, 1], {}, "True at position 0 is not a token id"),
    ([[1, 2]], {}, r"\[1, 2\] at position 0 is not a token id"),
    (torch.zeros(2, 3, dtype=torch.long), {}, "at position 0 is not a token id"),
    (np.array([0.5]), {}, "0.5 at position 0 is not a token id"),
    ("hello", {}, "must be token ids or a PromptShape, not 'hello'"),
    (None, {}, "must be token ids or a PromptShape, not None"),
    (7, {}, "must be token ids or a PromptShape, not 7"),
    ([1], {"arrival_time": float("nan")}, "arrival_time=nan must be a finite number"),
    ([1], {"arrival_time": float("inf")}, "arrival_time=inf must be a finite number"),
    ([1], {"timeout": -1.0}, "timeout=-1.0 must be 0 or more"),
    ([1], {"queue_timeout": float("nan")}, "queue_timeout=nan must be 0 or more"),
    ([1], {"priority": float("nan")}, "priority=nan must be a finite number"),
    ([1], {"priority": "high"}, "priority='high' must be a finite number"),
    ([1], {"tenant": None}, "tenant=None must be a string"),
    ([1], {"request_id": 7}, "request_id=7 must be a string"),
    ([1], {"request_id": "taken"}, "request_id='taken' is in use already"),
]


@pytest.mark.parametrize(("prompt", "options", "what"), IMPOSSIBLE, ids=lambda x: str(x)[:30])
def test_an_impossible_request_is_refused_and_disturbs_nobody(
    rng: random.Random, prompt: Any, options: dict[str, Any], what: str
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=40)
    good = random_prompt(rng, 10)
    engine.add_request(good, greedy(8), request_id="taken")
    events = engine.step()
    with pytest.raises(ValueError, match=what):
        engine.add_request(prompt, greedy(8), **options)
    after = engine.add_request(good, greedy(3))
    events += drain(engine)
    assert tokens_of(events, "taken") == expected_tokens(good, greedy(), 8)
    assert tokens_of(events, after) == expected_tokens(good, greedy(), 3)
    assert set(engine.trace.requests) == {"taken", after}


@pytest.mark.parametrize("max_tokens", [0, -3, 2.5, True])
def test_max_tokens_below_1_is_refused(max_tokens: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens="):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"top_k": float("inf")},
        {"top_p": None},
        {"seed": "a"},
        {"stop": None},
        {"stop": 5},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": 5},
    ],
)
def test_parameters_of_another_kind_are_refused_before_a_step_meets_them(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        SamplingParams(**wrong)


def test_numpy_numbers_are_welcome_and_become_plain(tmp_path: Path) -> None:
    given = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(4),
        seed=np.int64(-5),
        stop_token_ids=torch.tensor([1, 2]),
    )
    assert given == SamplingParams(3, 0.5, top_k=4, seed=-5, stop_token_ids=(1, 2))
    assert {type(given.seed), type(given.top_k), type(given.stop_token_ids[0])} == {int}
    engine = make_engine(num_blocks=np.int64(20))
    rid = engine.add_request(
        [1, 2], greedy(3), priority=np.int64(2), arrival_time=np.float32(0.5), timeout=np.int64(99)
    )
    drain(engine)
    assert engine.trace.requests[rid].priority == 2
    assert Trace.load(engine.trace.save(tmp_path / "run.jsonl")) == engine.trace


def test_a_token_id_too_large_for_any_vocabulary_is_refused_without_one() -> None:
    engine = Engine(FakeExecutor(8, 4), EngineConfig(num_blocks=8, block_size=4))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.add_request([2**70] * 9, greedy())
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "of", [np.array, torch.tensor, list, tuple, iter, lambda ids: [np.int32(i) for i in ids]]
)
def test_prompts_come_as_lists_arrays_tensors_or_numpy_integers(
    rng: random.Random, of: Callable[[list[int]], Any]
) -> None:
    prompt = random_prompt(rng, 11)
    engine = make_engine()
    first = engine.add_request(prompt, greedy(3))
    events = engine.step()
    second = engine.add_request(of(prompt), greedy(3))
    events += drain(engine)
    assert tokens_of(events, second) == tokens_of(events, first)
    assert all(type(token) is int for token in engine.executor.plans[0].chunks[0].token_ids)  # type: ignore[attr-defined]
    assert engine.trace.metrics().cached_tokens == 8  # the same prompt, whatever its type


def test_ids_may_be_unicode_and_automatic_ones_avoid_those_in_use(
    rng: random.Random, tmp_path: Any
) -> None:
    engine = make_engine()
    ids = ["1", "请求 🙂", "a\nb", "\ud800", ""]
    for rid in ids:
        assert engine.add_request(random_prompt(rng, 4), greedy(2), request_id=rid) == rid
    automatic = [engine.add_request(random_prompt(rng, 4), greedy(2)) for _ in range(3)]
    assert len({*ids, *automatic}) == 8
    drain(engine)
    loaded = type(engine.trace).load(engine.trace.save(tmp_path / "trace.jsonl"))
    assert loaded == engine.trace


def test_the_queue_has_a_bound_where_asked(rng: random.Random) -> None:
    engine = make_engine(max_num_seqs=1, max_queued_requests=2)
    rids = [engine.add_request(random_prompt(rng, 4), greedy(5))]
    events = engine.step()
    rids += [engine.add_request(random_prompt(rng, 4), greedy(5)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting and max_queued_requests=2"):
        engine.add_request(random_prompt(rng, 4), greedy(5))
    late = engine.add_request(random_prompt(rng, 4), greedy(5), arrival_time=2.0)
    events += drain(engine)
    assert all(len(tokens_of(events, rid)) == 5 for rid in rids)
    [end] = [event for event in events if event.request_id == late]
    assert end.finish_reason == "cancelled"
    assert "max_queued_requests=2" in end.note


def test_outputs_that_reach_max_model_len_end_with_length_and_a_note(rng: random.Random) -> None:
    engine = make_engine(max_model_len=12)
    prompt = random_prompt(rng, 9)
    rid = engine.add_request(prompt, greedy(50))
    events = drain(engine)
    assert tokens_of(events, rid) == expected_tokens(prompt, greedy(), 3)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].note == "reached max_model_len=12 tokens (prompt and outputs)"


@pytest.mark.parametrize("how", ["eos", "stop_token_ids", "stop_check"])
def test_a_request_stops_at_its_token(rng: random.Random, how: str) -> None:
    prompt = random_prompt(rng, 9)
    third = expected_tokens(prompt, greedy(), 3)[2]
    params = SamplingParams(
        max_tokens=50,
        temperature=0.0,
        stop_token_ids=(third,) if how == "stop_token_ids" else (),
    )
    engine = make_engine(
        eos_token_ids=[third] if how == "eos" else (),
        stop_check=(lambda r: len(r.output_token_ids) == 3) if how == "stop_check" else None,
    )
    rid = engine.add_request(prompt, params)
    events = drain(engine)
    assert len(tokens_of(events, rid)) == 3
    assert ended(events, rid) == ["stop"]


def test_ignore_eos_goes_on(rng: random.Random) -> None:
    prompt = random_prompt(rng, 9)
    engine = make_engine(eos_token_ids=[expected_tokens(prompt, greedy(), 1)[0]])
    rid = engine.add_request(prompt, greedy(5))
    assert len(tokens_of(drain(engine), rid)) == 5


# Errors from outside ----------------------------------------------------------------------------


class Interrupted(FakeExecutor):
    """Fails after it has written half of a step's keys, every third step."""

    calls = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.calls += 1
        if self.calls % 3 == 0:
            for chunk in plan.chunks[::2]:
                self._write(chunk)
            raise RuntimeError("device lost")
        return super().execute(plan)


@pytest.mark.parametrize("order", ["fcfs", "fair"])
def test_an_executor_that_fails_in_the_middle_changes_no_token(
    rng: random.Random, order: str
) -> None:
    engine = make_engine(order=order, num_blocks=14, max_num_batched_tokens=9)
    engine.executor = flaky = Interrupted(14, 4)
    engine.scheduler.cache.on_block = lambda kind, rid, blocks: (
        flaky.poison(blocks) if kind == "alloc" else None,
        engine.recorder.block(kind, rid, blocks),
    )
    prompts = {f"r{i}": random_prompt(rng, rng.randint(3, 20)) for i in range(6)}
    for rid, prompt in prompts.items():
        engine.add_request(prompt, greedy(12), request_id=rid)
    events, failures = [], 0
    for _ in range(300):
        try:
            events += engine.step()
        except RuntimeError:
            failures += 1
            assert engine.scheduler.num_steps == len(engine.trace.steps)
            check_state(engine.scheduler, engine.requests.values())  # as before the step
    assert failures > 5
    assert not engine.has_unfinished_requests()
    for rid, prompt in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(), 12)
    engine.trace.validate()


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (StepResult({}, 1.0), ValueError),
        (StepResult({"0": 5}, -1.0), ValueError),
        (StepResult({"0": 5}, float("nan")), ValueError),
        (None, AttributeError),
    ],
)
def test_a_nonsense_result_is_refused_and_the_step_can_be_repeated(
    rng: random.Random, result: Any, error: type[Exception]
) -> None:
    class Broken:
        def execute(self, plan: StepPlan) -> Any:
            return result

    engine = make_engine()
    prompt = random_prompt(rng, 6)
    engine.add_request(prompt, greedy(3))
    sound, engine.executor = engine.executor, Broken()
    with pytest.raises(error):
        engine.step()
    engine.executor = sound
    assert tokens_of(drain(engine), "0") == expected_tokens(prompt, greedy(), 3)


def test_an_annotate_that_fails_can_be_repeated(rng: random.Random) -> None:
    engine = make_engine()
    prompt = random_prompt(rng, 6)
    engine.add_request(prompt, greedy(3))
    failures = iter([True])

    def annotate(plan: StepPlan) -> StepCost:
        if next(failures, False):
            raise ZeroDivisionError
        return StepCost(1e9, 2e6)

    engine.annotate = annotate
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert tokens_of(drain(engine), "0") == expected_tokens(prompt, greedy(), 3)
    assert [(step.flops, step.bytes) for step in engine.trace.steps] == [(1e9, 2e6)] * 3


def test_a_stop_check_that_fails_costs_nobody_a_token(rng: random.Random) -> None:
    def check(request: Any) -> bool:
        if request.request_id == "r1" and len(request.output_token_ids) == 2:
            raise LookupError("no such tokenizer")
        return False

    engine = make_engine(stop_check=check)
    prompts = {f"r{i}": random_prompt(rng, 6) for i in range(3)}
    for rid, prompt in prompts.items():
        engine.add_request(prompt, greedy(5), request_id=rid)
    events = engine.step()
    with pytest.raises(LookupError):
        engine.step()
    events += drain(engine)
    for rid, prompt in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(), 5)


def test_a_stop_check_may_cancel_its_own_request_and_others(rng: random.Random) -> None:
    def check(request: Any) -> bool:
        if request.request_id == "r1" and len(request.output_token_ids) == 2:
            for rid in ("r0", "r1", "r2"):
                engine.cancel(rid)
        return False

    engine = make_engine(stop_check=check)
    for i in range(4):
        engine.add_request(random_prompt(rng, 6), greedy(5), request_id=f"r{i}")
    engine.step()
    second = engine.step()
    assert {e.request_id for e in second if e.token_id is not None} == {"r3"}
    drain(engine)
    assert engine.trace.requests["r3"].finish_reason == "length"


# Clocks, arrivals, workloads --------------------------------------------------------------------


def test_with_nothing_due_a_step_waits_for_the_next_arrival(rng: random.Random) -> None:
    engine = make_engine()
    rid = engine.add_request(random_prompt(rng, 4), greedy(1), arrival_time=7.5)
    events = engine.step()
    assert [(event.request_id, event.time) for event in events] == [(rid, 8.5)]


def test_on_the_wall_clock_a_step_sleeps_until_the_next_arrival(rng: random.Random) -> None:
    executor = FakeExecutor(16, 4, duration=lambda plan: None)  # type: ignore[arg-type, return-value]
    engine = Engine(executor, EngineConfig(num_blocks=16, block_size=4), clock=WallClock())
    soon = engine.clock.now() + 0.05
    rid = engine.add_request(random_prompt(rng, 4), greedy(2), arrival_time=soon)
    before = time.process_time()
    events = drain(engine, max_steps=3)
    assert time.process_time() - before < 0.04  # it did not spin
    assert len(tokens_of(events, rid)) == 2
    assert engine.trace.requests[rid].token_times[0] >= 0.05
    assert engine.trace.meta["clock"] == "wall"
    engine.trace.validate()


def test_run_serves_a_workload_and_a_closed_loop() -> None:
    class Conversation:
        """Two users who ask again one second after each answer, three times in all."""

        def __init__(self) -> None:
            self.turns = 0

        def __iter__(self) -> Any:
            yield RequestSpec(0.0, PromptShape(9), 4, tenant="u0")
            yield RequestSpec(30.0, PromptShape(9), 4, tenant="u1")

        def on_finish(self, spec: RequestSpec, now: float) -> RequestSpec | None:
            self.turns += 1
            if self.turns > 4:
                return None
            return RequestSpec(now + 1.0, PromptShape(9), 4, tenant=spec.tenant)

    trace = make_engine().run(Conversation())
    assert len(trace.requests) == 6
    assert all(record.finish_reason == "length" for record in trace.requests.values())
    arrivals = [record.arrival for record in trace.requests.values() if record.tenant == "u0"]
    assert arrivals[:2] == [0.0, 5.0]
    trace.validate()


def test_run_reads_an_endless_workload_only_as_far_as_it_is_due() -> None:
    read: list[float] = []

    def endless() -> Any:
        for i in range(10**9):
            read.append(i * 10.0)
            if i == 20:
                return
            yield RequestSpec(i * 10.0, PromptShape(5), 2)

    engine = make_engine()
    furthest = []
    engine.executor.before = lambda plan: furthest.append(read[-1] - engine.clock.now())  # type: ignore[attr-defined]
    engine.run(endless())
    assert max(furthest) <= 10.0
    assert len(engine.trace.requests) == 20


def test_shapes_with_common_prefix_ids_share_blocks() -> None:
    engine = make_engine(num_blocks=100)
    shared = PromptShape(40, prefix_ids=(7, 8), tokens_per_prefix_id=16)
    other = PromptShape(40, prefix_ids=(7, 9), tokens_per_prefix_id=16)
    for shape in (shared, shared, other):
        engine.add_request(shape, greedy(2))
        drain(engine)
    hits = [event.tokens for event in engine.trace.events if event.kind == "admit"]
    assert hits == [0, 32, 16]


def test_an_engine_needs_a_pool_size() -> None:
    with pytest.raises(ValueError, match="num_blocks=None"):
        Engine(FakeExecutor(1, 4), EngineConfig())


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be a whole number"),
        ({"chunk_size": 2.5}, "chunk_size=2.5"),
        ({"max_long_partial_prefills": 2}, "work together: set both"),
        ({"long_prefill_threshold": 2}, "work together: set both"),
        ({"block_size": True}, "block_size=True"),
    ],
)
def test_a_knob_out_of_range_is_named(knobs: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        EngineConfig(**knobs)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_serve_and_ones_own_knobs_win(rng: random.Random, preset: str) -> None:
    config = EngineConfig.make(preset, num_blocks=64, block_size=4, chunk_size=5)
    engine = make_engine(**{f: getattr(config, f) for f in ("policy", "order", "chunk_size")})
    prompt = random_prompt(rng, 17)
    rid = engine.add_request(prompt, greedy(3))
    assert tokens_of(drain(engine), rid) == expected_tokens(prompt, greedy(), 3)
    assert max(n for _, _, n in chunks_of(engine, rid)) == 5
    assert config.policy == PRESETS[preset]["policy"]


def test_an_unknown_preset_or_option_is_named() -> None:
    with pytest.raises(ValueError, match="unknown preset 'tea'; known: chat, rag, batch"):
        EngineConfig.make("tea")
    with pytest.raises(ValueError, match="unknown engine option chunksize"):
        EngineConfig.make("chat", chunksize=3)


def test_seeds_differ_between_requests_and_agree_between_runs(rng: random.Random) -> None:
    prompt = random_prompt(rng, 6)
    runs = []
    for seed in (1, 1, 2):
        engine = make_engine(seed=seed)
        rids = [engine.add_request(prompt, SamplingParams(max_tokens=6)) for _ in range(2)]
        events = drain(engine)
        runs.append([tokens_of(events, rid) for rid in rids])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert runs[0] != runs[2]


def test_the_virtual_clock_only_moves_forwards() -> None:
    clock = VirtualClock()
    clock.wait_until(5.0)
    clock.wait_until(3.0)
    clock.advance(None)
    assert clock.now() == 5.0
    with pytest.raises(ValueError, match=r"took -0\.5 seconds"):
        clock.advance(-0.5)
