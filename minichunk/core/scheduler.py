"""The mechanism: it knows budgets, slots, blocks and preemption, and nothing about taste.

Each step it runs the policy's generator and answers every offer with what can be granted, then
writes the grants down as a `StepPlan`. This is iteration-level scheduling (Orca, OSDI 2022) on
paged memory (vLLM, SOSP 2023): who is in the batch is decided anew for every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from minichunk.core.config import EngineConfig
from minichunk.core.kv_cache import ROOT_HASH, BlockPool, chain_hash
from minichunk.core.orders import resolve_order
from minichunk.core.plan import Offer, ScheduledChunk, SkippedRequest, SkipReason, StepPlan
from minichunk.core.policies import PolicyError, resolve_policy
from minichunk.core.request import Request, RequestStatus
from minichunk.core.victims import choose_victims
from minichunk.core.view import StepView
from minichunk.core.waiting import WaitingQueue

Log = Callable[..., None]


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
        self.context_per_token = context_per_token
        self.on_block = on_block or _ignore
        self.on_lifecycle = on_lifecycle or _ignore
        self.running: dict[str, Request] = {}
        self.waiting = WaitingQueue(self.order)
        self.waiting_long = WaitingQueue(self.order)  # only with max_long_partial_prefills
        self.reserved_blocks = 0  # promised to running requests at admission, not yet held
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.policy_state: dict[str, Any] = {}
        self.last_plan: StepPlan | None = None
        self.num_steps = 0
        self._begin_step()

    # What is there ---------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.waiting_long)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self._chunks.values())

    def running_in_order(self) -> list[Request]:
        """A snapshot of the running requests in the order's order."""
        order = self.order
        return sorted(
            self.running.values(),
            key=lambda r: (order.group_key(order.group(r)), order.key(r), r.index),
        )

    def next_head(self) -> Request | None:
        """The waiting request that would be admitted next; None where admission is closed."""
        if self._admission_closed or self.budget_left < 1:
            return None
        return self._head()

    # A request's way -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, new or preempted."""
        request.status = RequestStatus.WAITING
        self._queue_of(request).push(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks; the caller says why it ended."""
        was = request.status
        request.status = RequestStatus.FINISHED
        if was is RequestStatus.RUNNING:
            del self.running[request.request_id]
            self._release(request)
        elif was is RequestStatus.WAITING:
            self._queue_of(request).remove(request)
        self.order.finished(request)

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Decide one step. Raises `PolicyError` if the policy breaks a rule; nothing is lost then."""
        self._begin_step()
        try:
            # A step that only evicted its askers would do nothing: those that are left try again.
            while not self._run_policy(StepView(self, now)):
                pass
        except BaseException:
            self.undo(self._chunks.values())
            raise
        plan = StepPlan(
            step=self.num_steps,
            chunks=tuple(self._chunks.values()),
            budget=self.config.max_num_batched_tokens,
            block_size=self.config.block_size,
            preempted=tuple(self._preempted),
            skipped=self._skipped(),
        )
        self.num_steps += 1
        self.last_plan = plan
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
                self._publish(request, computed // block_size)

    def undo(self, chunks: Sequence[ScheduledChunk] | Any) -> None:
        """The chunks will not be executed after all: give back the blocks they would have filled."""
        for chunk in chunks:
            request = self.running.get(chunk.request_id)
            if request is not None:
                keep = self.pool.blocks_for(request.num_computed_tokens)
                surplus = request.table.blocks[keep:]
                self._hold(request, request.table.blocks[:keep])
                self._free(request, surplus)

    # One step --------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.budget_left = self.config.max_num_batched_tokens
        self._chunks: dict[str, ScheduledChunk] = {}
        self._preempted: dict[str, Request] = {}
        self._reasons: dict[str, SkipReason] = {}
        self._admission_closed = False

    def _run_policy(self, view: StepView) -> bool:
        """Play the policy's offers against the mechanism; False if it should be asked once more."""
        preempted_before = len(self._preempted)
        num_offers, patience = 0, 1000 + 100 * (len(self.running) + self.num_waiting)
        generator = self.policy.function(view, **self.policy.parameters)
        if not hasattr(generator, "send"):
            raise PolicyError(
                f"policy {self.policy.name!r} is not a generator: it must yield offers"
            )
        granted: int | None = None
        while True:
            try:
                offer = generator.send(granted)
            except StopIteration:
                break
            num_offers += 1
            if num_offers > patience:
                raise PolicyError(f"policy {self.policy.name!r} does not end: {num_offers} offers")
            granted = self._grant(*self._checked(offer))
        if self._chunks or not self.has_work:
            return True
        if len(self._preempted) > preempted_before:
            return False
        what = "made no offer" if not num_offers else "offered only what cannot run"
        raise PolicyError(
            f"policy {self.policy.name!r} {what} in step {self.num_steps}, although "
            f"{len(self.running)} requests are running and {self.num_waiting} are waiting"
        )

    def _checked(self, offer: Any) -> Offer:
        """The offer in its full form, or a `PolicyError` that names the policy and the request."""
        if isinstance(offer, tuple) and 2 <= len(offer) <= 3 and isinstance(offer[0], Request):
            full = Offer(*offer)
        else:
            raise PolicyError(
                f"policy {self.policy.name!r} yielded {offer!r}; "
                "it must yield `request, num_tokens` or an Offer"
            )
        request = full.request
        name = f"policy {self.policy.name!r} offered request {request.request_id!r}"
        if not isinstance(full.num_tokens, int):
            raise PolicyError(f"{name} {full.num_tokens!r} tokens, which is not a whole number")
        if request.request_id in self._chunks:
            raise PolicyError(f"{name} twice in one step")
        if request.status is RequestStatus.FINISHED:
            raise PolicyError(f"{name}, which is finished")
        return full

    def _grant(self, request: Request, num_tokens: int, whole: bool) -> int:
        """Give the request what can be given of `num_tokens`; returns how many."""
        if request.request_id in self._preempted:
            return 0
        if request.status is RequestStatus.RUNNING:
            return self._grow(request, num_tokens, whole)
        if request is not self._head():
            raise PolicyError(
                f"policy {self.policy.name!r} offered request {request.request_id!r}, "
                "which is not the head of the queue: nobody overtakes"
            )
        granted = self._admit(request, num_tokens, whole)
        if not granted:
            self._admission_closed = True
        return granted

    def _grow(self, request: Request, num_tokens: int, whole: bool) -> int:
        """Grant tokens to a running request, evicting the order's last if it has no block left."""
        computed = request.num_computed_tokens
        limit = self._limit(request, num_tokens, computed, whole)
        if limit < 1:
            return 0
        held = len(request.table.blocks)
        block_size = self.config.block_size
        missing = -(-(computed + limit) // block_size) - held
        if missing > 0:
            if missing > self.pool.num_free:
                wanted = missing if whole else 1
                if not self._make_room(request, wanted):
                    return 0
                missing = min(missing, self.pool.num_free)
                limit = min(limit, (held + missing) * block_size - computed)
            self._take(request, missing)
        self._write(request, limit)
        return limit

    def _admit(self, request: Request, num_tokens: int, whole: bool) -> int:
        """Let the queue's head in, if there is a slot and its whole prompt will find blocks."""
        pool, order = self.pool, self.order
        if not all(order.may_preempt(request, victim) for victim in self._preempted.values()):
            return self._refuse(request, SkipReason.BLOCKS)
        hits = pool.lookup(self._hashes(request, (request.num_tokens - 1) // pool.block_size))
        computed = len(hits) * pool.block_size
        limit = self._limit(request, num_tokens, computed, whole)
        if limit < 1:
            return 0
        promised = min(
            pool.blocks_for(request.num_tokens + order.reserve_tokens(request)), pool.num_blocks
        )
        victims = (
            choose_victims(
                [r for r in reversed(self.running_in_order()) if order.may_preempt(request, r)],
                pool,
                needed_blocks=promised + self.reserved_blocks,
                needed_slots=len(self.running) + 1 - self.max_running,
                hits=hits,
                frees_reserve=True,
            )
            if self._is_tight(promised, hits)
            else []
        )
        if victims is None:
            full = len(self.running) >= self.max_running
            return self._refuse(request, SkipReason.SLOTS if full else SkipReason.BLOCKS)
        for victim in victims:
            self._preempt(victim)
        self._start(request, hits, promised)
        self._take(request, pool.blocks_for(computed + limit) - len(hits))
        self._write(request, limit)
        return limit

    def _is_tight(self, promised: int, hits: tuple[int, ...]) -> bool:
        """Would the request have to evict somebody to get in?"""
        needed = promised - sum(self.pool.ref_counts[block] > 0 for block in hits)
        return (
            needed > self.pool.num_free - self.reserved_blocks
            or len(self.running) >= self.max_running
        )

    def _limit(self, request: Request, num_tokens: int, computed: int, whole: bool) -> int:
        """Clip an offer to the request's need, `chunk_size` and the budget; 0 and a reason if not."""
        config = self.config
        limit = min(num_tokens, request.num_tokens - computed)
        if whole:
            alone = limit > config.max_num_batched_tokens and not self._chunks
            if limit > self.budget_left and not alone:
                return self._refuse(request, SkipReason.WHOLE)
            return limit
        if config.chunk_size is not None and limit > config.chunk_size:
            limit = config.chunk_size
        if self._is_long(request) and self._others_wait(request):
            limit = min(limit, config.long_prefill_threshold or limit)
        if limit > self.budget_left:
            limit = self.budget_left
        if limit < 1:
            return self._refuse(request, SkipReason.POLICY if num_tokens < 1 else SkipReason.BUDGET)
        return limit

    def _write(self, request: Request, num_tokens: int) -> None:
        """Put the chunk into the plan."""
        start = request.num_computed_tokens
        stop = start + num_tokens
        self._chunks[request.request_id] = ScheduledChunk(
            request.request_id,
            start,
            num_tokens,
            request.token_ids(start, stop),
            request.table.blocks,
            request.params if stop == request.num_tokens else None,
            num_tokens == 1 and request.is_decoding,
            request.num_prompt_tokens,
        )
        # A whole prompt above the budget is alone in its step: nothing is left then.
        self.budget_left = max(0, self.budget_left - num_tokens)

    def _refuse(self, request: Request, reason: SkipReason) -> int:
        self._reasons[request.request_id] = reason
        return 0

    # Preemption ------------------------------------------------------------------------------

    def _make_room(self, asker: Request, wanted: int) -> bool:
        """Find `wanted` free blocks for a running asker. It may evict those behind it in the order;
        if they do not suffice, the order's last is the asker itself, and it goes."""
        if self.pool.num_free >= wanted:
            return True
        behind: list[Request] = []
        for request in reversed(self.running_in_order()):
            if request is asker:
                break
            behind.append(request)
        victims = choose_victims(behind, self.pool, needed_blocks=wanted)
        for victim in [asker] if victims is None else victims:
            self._preempt(victim)
        return victims is not None

    def _preempt(self, victim: Request) -> None:
        """Back to the queue; its blocks are freed and its tokens, outputs included, recomputed."""
        chunk = self._chunks.pop(victim.request_id, None)
        if chunk is not None:
            self.budget_left += chunk.num_tokens
        del self.running[victim.request_id]
        self.on_lifecycle(victim.request_id, "preempt", victim.num_computed_tokens)
        self._release(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._preempted[victim.request_id] = victim
        self._reasons[victim.request_id] = SkipReason.PREEMPTED
        self.add(victim)

    # Blocks ----------------------------------------------------------------------------------

    def _start(self, request: Request, hits: tuple[int, ...], promised: int) -> None:
        """The request runs from now on, with the blocks that the prefix cache already has."""
        request.status = RequestStatus.RUNNING
        self._queue_of(request).remove(request)
        self.running[request.request_id] = request
        request.num_computed_tokens = len(hits) * self.pool.block_size
        request.num_published_blocks = len(hits)
        request.num_promised_blocks = promised
        self.reserved_blocks += promised
        self.pool.share(hits)
        self._hold(request, hits)
        kind = "resume" if request.was_admitted else "admit"
        self.on_lifecycle(request.request_id, kind, request.num_computed_tokens)
        if hits:
            self.on_block("share", request.request_id, hits)
        if not request.was_admitted:
            request.was_admitted = True
            self.order.charge(request, request.num_prompt_tokens, 0)

    def _take(self, request: Request, count: int) -> None:
        if count > 0:
            fresh = self.pool.allocate(count)
            self._hold(request, request.table.blocks + fresh)
            self.on_block("alloc", request.request_id, fresh)

    def _hold(self, request: Request, blocks: tuple[int, ...]) -> None:
        """Set the request's table, and account for what of its promise is now in hand."""
        promised = request.num_promised_blocks
        before = max(0, promised - len(request.table.blocks))
        request.table.blocks = blocks
        self.reserved_blocks += max(0, promised - len(blocks)) - before

    def _free(self, request: Request, blocks: tuple[int, ...]) -> None:
        if blocks:
            self.pool.release(blocks)
            self.on_block("free", request.request_id, blocks)

    def _release(self, request: Request) -> None:
        """Everything the request holds, and what it was promised."""
        blocks = request.table.blocks
        self.reserved_blocks -= max(0, request.num_promised_blocks - len(blocks))
        request.num_promised_blocks = 0
        request.table.blocks = ()
        request.num_published_blocks = 0
        self._free(request, blocks)

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Chained hashes of the request's first `count` full blocks."""
        if not self.pool.prefix_caching:
            return []
        hashes, size = request.block_hashes, self.pool.block_size
        while len(hashes) < count:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(chain_hash(parent, request.block_content(start, start + size)))
        return hashes[:count]

    def _publish(self, request: Request, full_blocks: int) -> None:
        """Full *and* computed: from now on others may share these blocks."""
        first, request.num_published_blocks = request.num_published_blocks, full_blocks
        hashes = self._hashes(request, full_blocks)
        published = tuple(
            request.table.blocks[i]
            for i in range(first, len(hashes))
            if self.pool.publish(request.table.blocks[i], hashes[i])
        )
        if published:
            self.on_block("publish", request.request_id, published)

    # Long prompts, and who was left out -------------------------------------------------------

    def _is_long(self, request: Request) -> bool:
        threshold = self.config.long_prefill_threshold
        return threshold is not None and request.num_tokens > threshold and not request.is_decoding

    def _others_wait(self, request: Request) -> bool:
        """Does anybody else want prompt tokens?"""
        if self.num_waiting > (request.status is RequestStatus.WAITING):
            return True
        return any(r is not request and not r.is_decoding for r in self.running.values())

    def _queue_of(self, request: Request) -> WaitingQueue:
        threshold = self.config.long_prefill_threshold
        is_long = threshold is not None and request.num_tokens > threshold
        return self.waiting_long if is_long else self.waiting

    def _holds_long_prompts(self) -> bool:
        limit = self.config.max_long_partial_prefills
        return limit is not None and sum(map(self._is_long, self.running.values())) >= limit

    def _head(self) -> Request | None:
        """The next of both queues; long prompts are passed over while enough of them are partial."""
        short, long = self.waiting.head(), self.waiting_long.head()
        if long is None or self._holds_long_prompts():
            return short
        if short is None:
            return long
        return min(short, long, key=self._rank)

    def _rank(self, request: Request) -> tuple[Any, ...]:
        order = self.order
        return (order.group_key(order.group(request)), order.key(request), request.index)

    def _skipped(self) -> tuple[SkippedRequest, ...]:
        """Reasons for the running, for the queue's head, and one row for those behind it."""
        rows = []
        if len(self._chunks) < len(self.running):
            for request_id in self.running:
                if request_id not in self._chunks:
                    reason = self._reasons.get(request_id, SkipReason.POLICY)
                    rows.append(SkippedRequest(request_id, reason))
        rows += [SkippedRequest(rid, SkipReason.PREEMPTED) for rid in self._preempted]
        head = self._head()
        num_held = 0
        if self.waiting_long.size and self._holds_long_prompts():
            first = self.waiting_long.head()
            num_held = len(self.waiting_long)
            if first is not None and first.request_id not in self._preempted:
                rows.append(SkippedRequest(first.request_id, SkipReason.HELD, num_held - 1))
        if head is not None:
            spent = SkipReason.BUDGET if self.budget_left < 1 else SkipReason.POLICY
            if head.request_id not in self._preempted:
                reason = self._reasons.get(head.request_id, spent)
                rows.append(SkippedRequest(head.request_id, reason))
            if (behind := self.num_waiting - num_held - 1) > 0:
                rows.append(SkippedRequest(head.request_id, SkipReason.BEHIND, behind))
        return tuple(rows)


def _ignore(*_: Any) -> None:
    """Nobody keeps a trace."""
