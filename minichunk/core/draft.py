"""A step while it is being written: each offer of the policy is answered with what can be granted.

Here are the mechanism's rules: offers are clipped to the budget, `chunk_size` and the free blocks;
admission looks at the whole prompt; nobody overtakes; victims are chosen first and evicted only if
together they suffice (recompute preemption, as in vLLM, Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from itertools import takewhile
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

from minichunk.core.orders import ask
from minichunk.core.plan import ScheduledChunk, SkippedRequest, SkipReason, StepPlan
from minichunk.core.policies import PolicyError
from minichunk.core.request import Request, RequestStatus
from minichunk.core.victims import choose_victims

if TYPE_CHECKING:
    from minichunk.core.scheduler import Scheduler


class StepDraft:
    """The grants of one step so far. It changes the scheduler's requests and blocks as it goes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.config = scheduler.config
        self.running = scheduler.running
        self.pool = scheduler.pool
        self.block_size = scheduler.config.block_size
        self.budget_left = scheduler.config.max_num_batched_tokens
        self.granted: dict[str, int] = {}  # tokens, by request, in the order of the offers
        self.preempted: dict[str, Request] = {}
        self.reasons: dict[str, SkipReason] = {}

    def next_head(self) -> Request | None:
        """The waiting request that would be admitted next; None where the budget is spent."""
        return self.scheduler.head() if self.budget_left > 0 else None

    def answer(self, offer: Any) -> int:
        """How many tokens the offer is granted. A `PolicyError` says what is wrong with it."""
        if type(offer) is tuple and len(offer) == 2:
            (request, num_tokens), whole = offer, False
        elif isinstance(offer, tuple) and len(offer) == 3:
            request, num_tokens, whole = offer
        else:
            self._complain(f"yielded {offer!r}; it must yield `request, num_tokens` or an Offer")
        if not isinstance(request, Request):
            self._complain(f"yielded {offer!r}; its first part must be a request of the view")
        if type(num_tokens) is not int:
            num_tokens = self._whole_number(request, num_tokens)
        request_id = request.request_id
        if request_id in self.granted:
            self._complain(f"offered request {request_id!r} twice in one step")
        if self.running.get(request_id) is not request:
            granted = self._admit(request, num_tokens, whole)
        elif (
            num_tokens == 1
            and self.budget_left > 0
            and request.num_computed_tokens < len(request.table.blocks) * self.block_size
        ):
            granted = 1  # a decode, mostly, with room in its last block: nothing to clip
        else:
            granted = self._grow(request, num_tokens, whole)
        if granted:
            self.granted[request_id] = granted
            left = self.budget_left - granted
            self.budget_left = left if left > 0 else 0  # a whole prompt may be above the budget
        return granted

    def plan(self, step: int) -> StepPlan:
        """The finished draft, as plain data."""
        return StepPlan(
            step=step,
            chunks=tuple(self._chunks()),
            budget=self.config.max_num_batched_tokens,
            block_size=self.block_size,
            preempted=tuple(self.preempted),
            skipped=self._skipped(),
        )

    def _chunks(self) -> list[ScheduledChunk]:
        """The grants with all that an executor needs to know about them."""
        chunks, running = [], self.running
        new = tuple.__new__  # what ScheduledChunk(...) does in the end, without a call in between
        for request_id, num_tokens in self.granted.items():
            request = running[request_id]
            start, num_prompt_tokens = request.num_computed_tokens, request.num_prompt_tokens
            stop, num_outputs = start + num_tokens, len(request.output_token_ids)
            samples = stop == num_prompt_tokens + num_outputs
            fields = (
                request_id,
                start,
                num_tokens,
                request.token_ids(start, stop),
                request.table.blocks,
                request.params if samples else None,
                samples and num_tokens == 1 and num_outputs > 0,
                num_prompt_tokens,
            )
            chunks.append(new(ScheduledChunk, fields))
        return chunks

    # Grants ----------------------------------------------------------------------------------

    def _grow(self, request: Request, num_tokens: int, whole: bool) -> int:
        """Grant tokens to a running request, evicting the order's last if it has no block left."""
        computed = request.num_computed_tokens
        limit = self._limit(request, num_tokens, computed, whole)
        if limit < 1:
            return 0
        held = len(request.table.blocks)
        missing = self.pool.blocks_for(computed + limit) - held
        if missing > 0:
            if missing > self.pool.num_free:
                if not self._make_room(request, missing if whole else 1):
                    return 0
                missing = min(missing, self.pool.num_free)
                limit = min(limit, (held + missing) * self.block_size - computed)
            self.scheduler.cache.take(request, missing)
        return limit

    def _admit(self, request: Request, num_tokens: int, whole: bool) -> int:
        """Let the queue's head in, if there is a slot and its whole prompt will find blocks."""
        self._check_is_head(request)
        if request.request_id in self.preempted:
            return 0  # at the earliest in the next step
        scheduler, cache, order = self.scheduler, self.scheduler.cache, self.scheduler.order
        evicted = self.preempted.values()
        if not all(ask(order, order.may_preempt, request, victim) for victim in evicted):
            return self._refuse(request, SkipReason.BLOCKS)
        hits = cache.find_hits(request)
        computed = len(hits) * self.block_size
        limit = self._limit(request, num_tokens, computed, whole)
        if limit < 1:
            return 0
        length = request.num_tokens + max(0, ask(order, order.reserve_tokens, request))
        promised = min(self.pool.blocks_for(length), self.pool.num_blocks)
        lacks_slot = len(scheduler.running) >= scheduler.max_running
        if lacks_slot or not cache.fits(promised, hits):
            victims = choose_victims(
                [r for r in self._behind(request) if ask(order, order.may_preempt, request, r)],
                self.pool,
                needed_blocks=promised + cache.reserved_blocks,
                needed_slots=len(scheduler.running) + 1 - scheduler.max_running,
                hits=hits,
                frees_reserve=True,
            )
            if victims is None:
                return self._refuse(request, SkipReason.SLOTS if lacks_slot else SkipReason.BLOCKS)
            for victim in victims:
                self._preempt(victim)
        scheduler.start(request, hits, promised)
        cache.take(request, self.pool.blocks_for(computed + limit) - len(hits))
        return limit

    def _limit(self, request: Request, num_tokens: int, computed: int, whole: bool) -> int:
        """Clip an offer to the request's need, `chunk_size` and the budget; maybe to 0."""
        config = self.config
        limit = min(num_tokens, request.num_tokens - computed)
        if limit < 1:
            return self._refuse(request, SkipReason.POLICY)
        if whole:
            alone = limit > config.max_num_batched_tokens and not self.granted
            if limit > self.budget_left and not alone:
                return self._refuse(request, SkipReason.WHOLE)
            return limit
        if config.chunk_size is not None:
            limit = min(limit, config.chunk_size)
        if self.scheduler.is_partial_long(request) and self._others_want_prefill(request):
            limit = min(limit, config.long_prefill_threshold or limit)
        if self.budget_left < 1:
            return self._refuse(request, SkipReason.BUDGET)
        return min(limit, self.budget_left)

    def _others_want_prefill(self, request: Request) -> bool:
        """Does anybody else want prompt tokens?"""
        scheduler = self.scheduler
        if len(scheduler.waiting) > (request.status is RequestStatus.WAITING):
            return True
        return any(r is not request and not r.is_decoding for r in scheduler.running.values())

    # Preemption ------------------------------------------------------------------------------

    def _make_room(self, asker: Request, wanted: int) -> bool:
        """Find `wanted` free blocks for a running asker. It may evict those behind it in the order;
        if they do not suffice, the order's last is the asker itself, and it goes."""
        if self.pool.num_free >= wanted:
            return True
        victims = choose_victims(self._behind(asker), self.pool, needed_blocks=wanted)
        for victim in [asker] if victims is None else victims:
            self._preempt(victim)
        return victims is not None

    def _behind(self, asker: Request) -> list[Request]:
        """The running requests that the order puts after the asker, the last one first.

        Nobody evicts those before it, so the order's first always gets on, whatever else happens.
        """
        precedence = self.scheduler.waiting.precedence
        own = precedence(asker)
        last_first = reversed(self.scheduler.running_in_order())
        return list(takewhile(lambda request: precedence(request) > own, last_first))

    def _preempt(self, victim: Request) -> None:
        """Evict the victim and undo its grant, if it has one in this step."""
        self.scheduler.preempt(victim)  # first: the order may fail
        undone = self.granted.pop(victim.request_id, 0)
        self.budget_left = min(self.config.max_num_batched_tokens, self.budget_left + undone)
        self.preempted[victim.request_id] = victim

    # Who was left out ------------------------------------------------------------------------

    def _refuse(self, request: Request, reason: SkipReason) -> int:
        self.reasons[request.request_id] = reason
        return 0

    def _skipped(self) -> tuple[SkippedRequest, ...]:
        """Reasons for the running, for the queue's head, and one row for those behind it."""
        scheduler, preempted = self.scheduler, self.preempted
        rows = []
        if len(self.granted) < len(scheduler.running):
            for request_id in scheduler.running:
                if request_id not in self.granted:
                    reason = self.reasons.get(request_id, SkipReason.POLICY)
                    rows.append(SkippedRequest(request_id, reason))
        rows += [SkippedRequest(request_id, SkipReason.PREEMPTED) for request_id in preempted]
        if not scheduler.num_waiting:
            return tuple(rows)
        num_held = 0
        if scheduler.holds_long():
            num_held = scheduler.waiting.long.size
            held = scheduler.waiting.long.head()
            if held is not None and (num_held > 1 or held.request_id not in preempted):
                rows.append(SkippedRequest(held.request_id, SkipReason.HELD, num_held - 1))
        head = scheduler.head()
        if head is not None:
            if head.request_id not in preempted:
                spent = SkipReason.BUDGET if self.budget_left < 1 else SkipReason.POLICY
                reason = self.reasons.get(head.request_id, spent)
                rows.append(SkippedRequest(head.request_id, reason))
            if (behind := scheduler.num_waiting - num_held - 1) > 0:
                rows.append(SkippedRequest(head.request_id, SkipReason.BEHIND, behind))
        return tuple(rows)

    # What a policy did wrong -----------------------------------------------------------------

    def _check_is_head(self, request: Request) -> None:
        if request.status is not RequestStatus.WAITING:
            what = "finished" if request.is_finished else "another engine's"
            self._complain(f"offered request {request.request_id!r}, which is {what}")
        if request.request_id not in self.preempted and request is not self.scheduler.head():
            self._complain(
                f"offered request {request.request_id!r}, which is not the head of the queue: "
                "nobody overtakes"
            )

    def _whole_number(self, request: Request, num_tokens: Any) -> int:
        try:
            return index(num_tokens)
        except TypeError:
            self._complain(
                f"offered request {request.request_id!r} {num_tokens!r} tokens, "
                "which is not a whole number"
            )

    def _complain(self, what: str) -> NoReturn:
        raise PolicyError(f"policy {self.scheduler.policy.name!r} {what}")
