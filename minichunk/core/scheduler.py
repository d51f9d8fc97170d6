"""The mechanism: who is here, who runs, and one `StepPlan` per call.

Each step it lets the policy make its offers to a `StepDraft`, which grants what can be granted.
It knows budgets, slots, blocks and preemption, and nothing about taste. This is iteration-level
scheduling (Orca, Yu et al., OSDI 2022): who is in the batch is decided anew for every step.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

from minichunk.core.cache_manager import CacheManager, Log, ignore
from minichunk.core.config import EngineConfig
from minichunk.core.draft import StepDraft
from minichunk.core.kv_cache import BlockPool
from minichunk.core.orders import ask, resolve_order
from minichunk.core.plan import StepPlan
from minichunk.core.policies import PolicyError, resolve_policy
from minichunk.core.request import Request, RequestStatus
from minichunk.core.view import StepView
from minichunk.core.waiting import WaitingLine

_by_rank = attrgetter("rank")


class Scheduler:
    """Requests in, one `StepPlan` per call out. Standard library only, no tensors, no clock.

    `on_block(kind, request_id, blocks)` and `on_lifecycle(request_id, kind, tokens)` report what
    happens to whoever keeps the trace.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        *,
        context_per_token: float = math.inf,
        on_block: Log | None = None,
        on_lifecycle: Log | None = None,
    ) -> None:
        self.config = config
        self.policy = resolve_policy(config.policy)
        self.order = resolve_order(config.order)
        self.pool = BlockPool(num_blocks, config.block_size, config.prefix_caching)
        self.cache = CacheManager(self.pool, on_block or ignore)
        self.context_per_token = context_per_token
        self.on_lifecycle = on_lifecycle or ignore
        self.running: dict[str, Request] = {}
        self.waiting = WaitingLine(self.order, config.long_prefill_threshold)
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.policy_state: dict[str, Any] = {}
        self.last_plan: StepPlan | None = None
        self.num_steps = 0
        self._plan_before: StepPlan | None = None

    # What is there ---------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def reserved_blocks(self) -> int:
        """Blocks that were promised to running requests at admission and are not held yet."""
        return self.cache.reserved_blocks

    def running_in_order(self) -> list[Request]:
        """A snapshot of the running requests in the order's order."""
        requests = sorted(self.running.values(), key=_by_rank)
        groups = {request.group for request in requests}
        if len(groups) > 1:
            keys = {group: ask(self.order, self.order.group_key, group) for group in groups}
            requests.sort(key=lambda request: keys[request.group])
        return requests

    def head(self) -> Request | None:
        """The waiting request that goes next."""
        return self.waiting.head(hold_long=self.holds_long())

    def is_partial_long(self, request: Request) -> bool:
        """A prompt above `long_prefill_threshold`, not computed yet."""
        return self.waiting.is_long(request) and not request.is_decoding

    def holds_long(self) -> bool:
        """Are long prompts held back, because enough of them are in progress?"""
        limit = self.config.max_long_partial_prefills
        if limit is None or not self.waiting.long.size:
            return False
        return sum(map(self.is_partial_long, self.running.values())) >= limit

    # One step --------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Decide one step. A `PolicyError` says what the policy did wrong; nothing is lost then."""
        draft = StepDraft(self)
        try:
            # A step that only evicted its askers would do nothing: those that are left try again.
            while not self._ask_policy(draft, now):
                pass
            plan = draft.plan(self.num_steps)
        except BaseException:
            self._trim(draft.granted)
            raise
        self.num_steps += 1
        self._plan_before, self.last_plan = self.last_plan, plan
        return plan

    def apply(self, plan: StepPlan) -> None:
        """The plan was executed: its tokens are computed, and full blocks may be shared."""
        running, block_size = self.running, self.config.block_size
        for request_id, start, num_tokens, *_ in plan.chunks:
            request = running.get(request_id)
            if request is None:
                continue  # cancelled while the step ran
            computed = request.num_computed_tokens = start + num_tokens
            if computed // block_size > request.num_published_blocks:
                self.cache.publish(request, computed // block_size)

    def undo(self, plan: StepPlan) -> None:
        """The plan was not executed: give back the blocks that it would have filled."""
        self._trim(chunk.request_id for chunk in plan.chunks)
        if self.last_plan is plan:
            self.num_steps -= 1
            self.last_plan = self._plan_before

    def _ask_policy(self, draft: StepDraft, now: float) -> bool:
        """Put the policy's offers to the draft; False if it should be asked once more."""
        name = self.policy.name
        evicted_before = len(draft.preempted)
        patience = 1000 + 100 * (len(self.running) + self.num_waiting)
        offers = self.policy.function(StepView(self, draft, now), **self.policy.parameters)
        if not hasattr(offers, "send"):
            raise PolicyError(f"policy {name!r} is not a generator: it must yield offers")
        send, answer = offers.send, draft.answer
        granted: int | None = None
        for num_offers in range(patience + 1):  # noqa: B007 - the last value is used
            try:
                offer = send(granted)
            except StopIteration:
                break
            granted = answer(offer)
        else:
            raise PolicyError(f"policy {name!r} does not end: {num_offers + 1} offers")
        if draft.granted or not self.has_work:
            return True
        if len(draft.preempted) > evicted_before:
            return False
        what = "offered only what cannot run" if num_offers else "made no offer"
        raise PolicyError(
            f"policy {name!r} {what} in step {self.num_steps}, although "
            f"{len(self.running)} requests are running and {self.num_waiting} are waiting"
        )

    def _trim(self, request_ids: Any) -> None:
        for request_id in request_ids:
            if request_id in self.running:
                self.cache.trim(self.running[request_id])

    # A request's way -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.add(request)

    def start(self, request: Request, hits: tuple[int, ...], promised: int) -> None:
        """From the queue's head into the batch, with the blocks that the prefix cache has."""
        request.status = RequestStatus.RUNNING
        self.waiting.remove(request)
        self.running[request.request_id] = request
        self.cache.start(request, hits, promised)
        kind = "resume" if request.was_admitted else "admit"
        self.on_lifecycle(request.request_id, kind, request.num_computed_tokens)
        if not request.was_admitted:
            request.was_admitted = True
            ask(self.order, self.order.charge, request, request.num_prompt_tokens, 0)

    def preempt(self, victim: Request) -> None:
        """Back to the queue; its blocks are freed and its tokens, outputs included, recomputed."""
        self.waiting.add(victim)  # first: if the order fails here, the victim runs on
        del self.running[victim.request_id]
        self.on_lifecycle(victim.request_id, "preempt", victim.num_computed_tokens)
        self.cache.release(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks; the caller says why it ended."""
        was, request.status = request.status, RequestStatus.FINISHED
        if was is RequestStatus.RUNNING:
            del self.running[request.request_id]
            self.cache.release(request)
        elif was is RequestStatus.WAITING:
            self.waiting.remove(request)
        ask(self.order, self.order.finished, request)
