"""What must hold after every step, checked in full where `check_invariants=True`.

An engine's worst bugs are silent: a block leaked, a token computed twice, a budget overdrawn. Each
rule here has a message that names the numbers, and every test of the project runs with them on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minichunk.core.plan import StepPlan
from minichunk.core.request import Request, RequestStatus

if TYPE_CHECKING:
    from minichunk.core.scheduler import Scheduler


class InvariantError(AssertionError):
    """The engine contradicts itself; this is a bug in minichunk, or in a test that broke it."""


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Before a step runs: the budget, the tables and the sampling of its plan."""
    one_whole_prompt = len(plan.chunks) == 1 and plan.chunks[0].sampling is not None
    _holds(
        plan.num_tokens <= plan.budget or one_whole_prompt,
        f"step {plan.step} schedules {plan.num_tokens} tokens with a budget of {plan.budget}",
    )
    _holds(bool(plan.chunks), f"step {plan.step} schedules nothing although there is work")
    names = [chunk.request_id for chunk in plan.chunks]
    _holds(len(names) == len(set(names)), f"step {plan.step} schedules a request twice: {names}")
    for chunk in plan.chunks:
        request = scheduler.running.get(chunk.request_id)
        name = f"step {plan.step}, request {chunk.request_id!r}"
        _holds(request is not None, f"{name}: scheduled but not running")
        assert request is not None
        _holds(
            chunk.start == request.num_computed_tokens,
            f"{name}: chunk starts at {chunk.start}, computed are {request.num_computed_tokens}",
        )
        _holds(
            chunk.num_tokens >= 1 and chunk.stop <= request.num_tokens,
            f"{name}: positions {chunk.start}..{chunk.stop} of {request.num_tokens} tokens",
        )
        _holds(
            (chunk.sampling is not None) == (chunk.stop == request.num_tokens),
            f"{name}: a token is sampled exactly where the chunk reaches num_tokens",
        )
        _holds(
            chunk.block_table == request.table.blocks
            and len(chunk.block_table) == scheduler.pool.blocks_for(chunk.stop),
            f"{name}: {len(chunk.block_table)} blocks for {chunk.stop} tokens",
        )


def check_state(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """After a step: where the unfinished `requests` are, and who holds which block."""
    pool = scheduler.pool
    unfinished = {request.request_id: request for request in requests}
    waiting = [request.request_id for request in scheduler.waiting]
    _holds(
        len(waiting) == len(set(waiting)) == scheduler.num_waiting,
        f"{scheduler.num_waiting} requests should wait, the queue has {sorted(waiting)}",
    )
    places = Counter([*waiting, *scheduler.running])
    _holds(
        places == Counter(unfinished.keys()),
        f"in the queue or running are {sorted(places.elements())}, "
        f"unfinished are {sorted(unfinished)}",
    )
    for request in scheduler.waiting:
        _holds(
            not request.table.blocks and request.num_computed_tokens == 0,
            f"request {request.request_id!r} waits but holds {len(request.table)} blocks "
            f"for {request.num_computed_tokens} computed tokens",
        )
    for request in scheduler.running.values():
        _holds(
            request.status is RequestStatus.RUNNING,
            f"request {request.request_id!r} is among the running, its status is {request.status}",
        )
        _holds(
            request.num_computed_tokens < request.num_tokens,
            f"request {request.request_id!r} runs with nothing left to compute: "
            f"{request.num_computed_tokens} of {request.num_tokens} tokens",
        )
    _holds(
        len(scheduler.running) <= scheduler.max_running,
        f"{len(scheduler.running)} requests run, at most {scheduler.max_running} may",
    )
    holders: Counter[int] = Counter()
    reserved = 0
    for request in scheduler.running.values():
        blocks = request.table.blocks
        holders.update(blocks)
        reserved += max(0, request.num_promised_blocks - len(blocks))
        _holds(
            len(blocks) == pool.blocks_for(request.num_computed_tokens),
            f"request {request.request_id!r} holds {len(blocks)} blocks for "
            f"{request.num_computed_tokens} computed tokens",
        )
    _holds(
        reserved == scheduler.reserved_blocks,
        f"{scheduler.reserved_blocks} blocks are reserved, the promises say {reserved}",
    )
    for block, count in enumerate(pool.ref_counts):
        _holds(
            holders[block] == count,
            f"block {block} has reference count {count}, but {holders[block]} tables hold it",
        )
        _holds(
            (count == 0) == (block in pool.free_queue),
            f"block {block} has reference count {count} and is "
            f"{'' if block in pool.free_queue else 'not '}in the free queue",
        )
    _holds(
        pool.num_free + sum(count > 0 for count in pool.ref_counts) == pool.num_blocks,
        f"{pool.num_free} free and {pool.num_used} used blocks of {pool.num_blocks}",
    )
    for block, block_hash in pool.hash_of.items():
        _holds(
            pool.block_of.get(block_hash) == block,
            f"block {block} is published under a hash that leads to another block",
        )


def _holds(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
