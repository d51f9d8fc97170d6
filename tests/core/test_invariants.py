"""Each invariant sees the corruption that it is there for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minichunk.core.engine import Engine
from minichunk.core.invariants import InvariantError, check_plan, check_state
from minichunk.core.plan import StepPlan
from minichunk.core.request import RequestStatus

from .fake_executor import greedy, make_engine, random_prompt


@pytest.fixture
def engine(rng: random.Random) -> Engine:
    """Two decode ("a" and "b" share prompt blocks), "c" is half prefilled, "d" and "e" wait."""
    engine = make_engine(max_num_batched_tokens=12, max_num_seqs=3)
    prompt = random_prompt(rng, 9)
    for rid in ("a", "b"):
        engine.add_request(prompt, greedy(40), request_id=rid)
        engine.step()
    for rid in ("c", "d", "e"):
        engine.add_request(random_prompt(rng, 30), greedy(40), request_id=rid)
    engine.step(), engine.step()
    assert [r.num_uncomputed_tokens for r in engine.scheduler.running.values()] == [1, 1, 10]
    check_state(engine.scheduler, engine.requests.values())
    return engine


def set_status(rid: str, status: RequestStatus) -> Callable[[Engine], None]:
    def corrupt(engine: Engine) -> None:
        engine.requests[rid].status = status

    return corrupt


def queue_twice(engine: Engine) -> None:
    engine.scheduler.waiting.short.push(engine.requests["d"])


def run_and_queue(engine: Engine) -> None:
    engine.scheduler.waiting.short.push(engine.requests["a"])
    engine.requests["a"].status = RequestStatus.WAITING


def forget(engine: Engine) -> None:
    del engine.requests["d"]


def lose_from_running(engine: Engine) -> None:
    del engine.scheduler.running["a"]


def waiting_holds_blocks(engine: Engine) -> None:
    engine.scheduler.pool.share((0,))
    engine.requests["d"].table.blocks = (0,)


def waiting_is_computed(engine: Engine) -> None:
    engine.requests["d"].num_computed_tokens = 4


def too_many_run(engine: Engine) -> None:
    engine.scheduler.max_running = 2


def computed_too_far(engine: Engine) -> None:
    engine.requests["a"].num_computed_tokens += 1


def leak_a_block(engine: Engine) -> None:
    engine.scheduler.pool.allocate(1)


def table_too_long(engine: Engine) -> None:
    engine.scheduler.cache.take(engine.requests["c"], 1)


def table_too_short(engine: Engine) -> None:
    table = engine.requests["b"].table
    engine.scheduler.pool.release(table.blocks[-1:])
    table.blocks = table.blocks[:-1]


def count_too_high(engine: Engine) -> None:
    engine.scheduler.pool.ref_counts[engine.requests["a"].table.blocks[0]] += 1


def count_too_low(engine: Engine) -> None:
    engine.scheduler.pool.ref_counts[engine.requests["a"].table.blocks[0]] -= 1


def free_but_held(engine: Engine) -> None:
    engine.scheduler.pool.free_queue[engine.requests["a"].table.blocks[0]] = None


def lose_a_free_block(engine: Engine) -> None:
    engine.scheduler.pool.free_queue.popitem()


def wrong_reserve(engine: Engine) -> None:
    engine.scheduler.cache.reserved_blocks += 1


def two_blocks_one_hash(engine: Engine) -> None:
    pool = engine.scheduler.pool
    published = next(iter(pool.hash_of))
    other = next(block for block in range(pool.num_blocks) if block not in pool.hash_of)
    pool.hash_of[other] = pool.hash_of[published]


STATES: list[tuple[Callable[[Engine], None], str]] = [
    (set_status("a", RequestStatus.FINISHED), "among the running, its status is finished"),
    (set_status("d", RequestStatus.RUNNING), "should wait"),
    (queue_twice, "3 requests should wait"),
    (run_and_queue, "in the queue or running are"),
    (forget, "in the queue or running are"),
    (lose_from_running, "in the queue or running are"),
    (waiting_holds_blocks, "waits but holds 1 blocks"),
    (waiting_is_computed, "waits but holds 0 blocks for 4 computed"),
    (too_many_run, "3 requests run, at most 2 may"),
    (computed_too_far, "runs with nothing left to compute"),
    (leak_a_block, "reference count 1, but 0 tables hold it"),
    (table_too_long, "holds 6 blocks for 20 computed tokens"),
    (table_too_short, "request 'b' holds"),
    (count_too_high, "reference count 3, but 2 tables hold it"),
    (count_too_low, "reference count 1, but 2 tables hold it"),
    (free_but_held, "is in the free queue"),
    (lose_a_free_block, "is not in the free queue"),
    (wrong_reserve, "blocks are reserved, the promises say"),
    (two_blocks_one_hash, "under a hash that leads to another block"),
]


@pytest.mark.parametrize(("corrupt", "what"), STATES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_corrupted_state_is_seen(
    engine: Engine, corrupt: Callable[[Engine], None], what: str
) -> None:
    corrupt(engine)
    with pytest.raises(InvariantError, match=what):
        check_state(engine.scheduler, engine.requests.values())


def test_a_corrupted_state_is_seen_by_the_next_step_of_the_engine(engine: Engine) -> None:
    leak_a_block(engine)
    with pytest.raises(InvariantError):
        engine.step()


def change(plan: StepPlan, index: int, **fields: Any) -> StepPlan:
    chunks = list(plan.chunks)
    chunks[index] = chunks[index]._replace(**fields)
    return replace(plan, chunks=tuple(chunks))


PLANS: list[tuple[str, Callable[[StepPlan], StepPlan], str]] = [
    ("budget", lambda p: replace(p, budget=11), "schedules 12 tokens with a budget of 11"),
    (
        "part of a prompt above the budget",
        lambda p: replace(p, budget=8, chunks=(p.chunks[2]._replace(num_tokens=9, sampling=None),)),
        "schedules 9 tokens with a budget of 8",
    ),
    ("nothing", lambda p: replace(p, chunks=()), "schedules nothing although there is work"),
    ("twice", lambda p: replace(p, chunks=p.chunks[:1] * 2), "schedules a request twice"),
    ("waiting", lambda p: change(p, 0, request_id="d"), "'d': scheduled but not running"),
    ("start", lambda p: change(p, 2, start=19), "chunk starts at 19, computed are 20"),
    ("empty", lambda p: change(p, 2, num_tokens=0), r"positions 20\.\.20 of 30"),
    (
        "beyond",
        lambda p: replace(change(p, 0, num_tokens=2), budget=99),
        r"positions \d+\.\.\d+ of \d+ tokens",
    ),
    ("no token", lambda p: change(p, 0, sampling=None), "'a': a token is sampled exactly where"),
    (
        "token in the middle",
        lambda p: change(p, 2, num_tokens=9, sampling=p.chunks[0].sampling),
        "'c': a token is sampled exactly where",
    ),
    ("table", lambda p: change(p, 0, block_table=p.chunks[0].block_table[1:]), "blocks for"),
    ("other table", lambda p: change(p, 0, block_table=p.chunks[1].block_table), "blocks for"),
]


@pytest.mark.parametrize(("corrupt", "what"), [row[1:] for row in PLANS], ids=[r[0] for r in PLANS])
def test_a_corrupted_plan_is_seen(
    engine: Engine, corrupt: Callable[[StepPlan], StepPlan], what: str
) -> None:
    plan = engine.scheduler.schedule()
    assert [chunk.num_tokens for chunk in plan.chunks] == [1, 1, 10]
    check_plan(engine.scheduler, plan)
    with pytest.raises(InvariantError, match=what):
        check_plan(engine.scheduler, corrupt(plan))


def test_a_whole_prompt_may_exceed_the_budget_alone(rng: random.Random) -> None:
    engine = make_engine(policy="continuous", max_num_batched_tokens=8)
    engine.add_request(random_prompt(rng, 30), greedy(1))
    engine.step()
    assert engine.executor.plans[0].num_tokens == 30  # type: ignore[attr-defined]
