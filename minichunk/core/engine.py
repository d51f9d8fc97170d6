"""The step loop: requests → scheduler → plan → executor → tokens → trace.

`Engine.step()` is the whole of serving. It works on the wall clock with a real model and on a
virtual clock with a simulated one; there is no second loop anywhere. Single-threaded: `cancel` may
also be called from within an executor or while events are handled, and takes effect at once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minichunk.core.clock import Clock, WallClock
from minichunk.core.config import EngineConfig
from minichunk.core.drive import Feed
from minichunk.core.invariants import check_plan, check_state
from minichunk.core.plan import Executor, StepCost, StepPlan
from minichunk.core.recorder import Recorder
from minichunk.core.request import FinishReason, PromptShape, Request, RequestStatus, SamplingParams
from minichunk.core.scheduler import Scheduler
from minichunk.core.trace import Trace


class QueueFullError(ValueError):
    """`max_queued_requests` requests are waiting already."""


class TokenEvent(NamedTuple):
    """A token of a request, or, with `token_id` None, its end from outside (cancel, timeout)."""

    request_id: str
    token_id: int | None
    time: float
    finish_reason: FinishReason | None = None
    note: str = ""


class Engine:
    """Serves requests on an executor. Cheap to make: one executor serves many engines in turn."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        stop_check: Callable[[Request], bool] | None = None,
        annotate: Callable[[StepPlan], StepCost] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.executor = executor
        self.config = config = config or EngineConfig()
        if config.num_blocks is None:
            raise ValueError("num_blocks=None: an engine needs to know the size of its block pool")
        self.clock: Clock = clock or WallClock()
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_check = stop_check
        self.annotate = annotate
        self.trace = Trace()
        self.recorder = Recorder(self.trace)
        self.scheduler = Scheduler(
            config,
            config.num_blocks,
            context_per_token=getattr(executor, "context_per_token", float("inf")),
            on_block=self.recorder.block,
            on_lifecycle=self.recorder.lifecycle,
        )
        self.requests: dict[str, Request] = {}  # those that are not finished yet
        self._num_added = 0
        self._arrivals: list[tuple[float, int, Request]] = []
        self._deadlines: list[tuple[float, int, str, Request]] = []
        self._outside_events: list[TokenEvent] = []
        self.trace.meta = {**_meta_of(self), **(meta or {})}

    # The door ----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Sequence[int] | PromptShape,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "default",
        queue_timeout: float | None = None,
        timeout: float | None = None,
        arrival_time: float | None = None,
    ) -> str:
        """Queue a request and return its id. An `arrival_time` (engine seconds) may lie ahead.

        Raises ValueError, with the numbers that clash, for a request that could never be served,
        and `QueueFullError` when the queue is at its bound (one with an `arrival_time` is refused
        when it arrives, by an event). Neither disturbs anybody else.
        """
        params = params or SamplingParams()
        now = self.clock.now()
        if request_id is None:
            request_id = str(self._num_added)
        if request_id in self.trace.requests or request_id in self.requests:
            raise ValueError(f"request_id={request_id!r} is in use already: choose another")
        for name, limit in (("queue_timeout", queue_timeout), ("timeout", timeout)):
            if limit is not None and not limit >= 0:
                raise ValueError(f"{name}={limit} must be 0 or more seconds")
        seed = (
            self.config.seed * 1_000_003 + self._num_added if params.seed is None else params.seed
        )
        request = Request(
            request_id,
            prompt if isinstance(prompt, PromptShape) else tuple(prompt),
            replace(params, seed=seed) if params.seed is None else params,
            now if arrival_time is None else arrival_time,
            priority,
            tenant,
            queue_timeout,
            timeout,
            index=self._num_added,
        )
        self._refuse_impossible(request)
        if arrival_time is None and self._queue_is_full():
            raise QueueFullError(
                f"{self.scheduler.num_waiting} requests are waiting and max_queued_requests="
                f"{self.config.max_queued_requests}: try later or raise it"
            )
        self._num_added += 1
        self.requests[request_id] = request
        if arrival_time is None:
            self._arrive(request)
        else:
            heapq.heappush(self._arrivals, (request.arrival_time, request.index, request))
        return request_id

    def cancel(self, request_id: str) -> bool:
        """End a request now, in whatever state. False if it is unknown or finished already.

        After this returns, no token of it appears and its blocks are free.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end_from_outside(request, FinishReason.CANCELLED, "cancelled by the caller")
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests) or bool(self._outside_events)

    # The loop ----------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Schedule, execute and apply one step; returns what happened.

        With nothing due it waits for the next arrival. An executor's error is passed on with the
        engine as it was before the step.
        """
        self._let_in()
        if not self.scheduler.has_work:
            if not self._outside_events and self._arrivals:
                self.clock.wait_until(self._arrivals[0][0])
                self._let_in()
            if not self.scheduler.has_work:
                return self._take_outside_events()

        start = self.recorder.now = self.clock.now()
        before = time.perf_counter()
        plan = self.scheduler.schedule(start)
        scheduling_time = time.perf_counter() - before
        if self.config.check_invariants:
            check_plan(self.scheduler, plan)
        try:
            result = self.executor.execute(plan)
        except BaseException:
            self.scheduler.undo(plan.chunks)
            raise
        self.clock.advance(result.duration)
        end = self.recorder.now = self.clock.now()
        cost = result.cost or (self.annotate(plan) if self.annotate else None)

        self.scheduler.apply(plan)
        events = self._hand_out(plan, result.token_ids, end)
        pool = self.scheduler.pool
        blocks = (pool.num_free, pool.num_used, self.scheduler.reserved_blocks)
        self.recorder.counters(self.scheduler.order.changed_counters())
        self.recorder.executed(plan, start, end, cost, scheduling_time, blocks)
        if self.config.check_invariants:
            check_state(self.scheduler, self.requests)
        return self._take_outside_events() + events

    def run(
        self,
        workload: Any,
        to_prompt: Callable[[Any], Sequence[int] | PromptShape] | None = None,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> Trace:
        """Serve a whole workload and return the trace. See `Feed` for how requests arrive."""
        feed = Feed(self, workload, to_prompt)
        feed.pull()
        while self.has_unfinished_requests():
            for event in self.step():
                if event.finish_reason is not None:
                    feed.finished(event.request_id, event.time)
                if on_event is not None:
                    on_event(event)
            feed.pull()
        return self.trace

    # What a step does to requests ----------------------------------------------------------------

    def _hand_out(self, plan: StepPlan, tokens: dict[str, int], now: float) -> list[TokenEvent]:
        """Append each sampled token to its request, and finish those that are done."""
        events = []
        requests, records, order = self.requests, self.trace.requests, self.scheduler.order
        for chunk in plan.chunks:
            if chunk.sampling is None:
                continue
            request_id = chunk.request_id
            request = requests.get(request_id)
            if request is None:
                continue  # cancelled while the step ran: nothing of it may appear
            token = tokens[request_id]
            request.output_token_ids.append(token)
            record = records[request_id]
            record.token_times.append(now)
            if record.output_token_ids is not None:
                record.output_token_ids.append(token)
            order.charge(request, 0, 1)
            reason = self._finish_reason(request, token)
            if reason is not None:
                self._finish(request, reason, now)
                self.recorder.lifecycle(request_id, "finish")
            events.append(TokenEvent(request_id, token, now, reason, request.note))
        return events

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        if token in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token in params.stop_token_ids:
            return FinishReason.STOP
        if self.stop_check is not None and self.stop_check(request):
            return FinishReason.STOP
        if len(request.output_token_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        num_tokens, limit = request.num_tokens, self.config.max_model_len
        if limit is not None and num_tokens >= limit:
            request.note = f"reached max_model_len={limit} tokens (prompt and outputs)"
            return FinishReason.LENGTH
        pool = self.scheduler.pool
        if num_tokens > pool.num_blocks * pool.block_size:
            request.note = (
                f"its {num_tokens} tokens outgrow the whole block pool of "
                f"num_blocks={pool.num_blocks} × block_size={pool.block_size} tokens"
            )
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        del self.requests[request.request_id]
        self.recorder.finish(request, reason, now)

    def _end_from_outside(self, request: Request, reason: FinishReason, note: str) -> None:
        now = self.recorder.now = max(self.recorder.now, self.clock.now())
        if request.request_id not in self.trace.requests:  # it was to arrive later
            self.recorder.arrive(request)
            self.scheduler.add(request)
        request.note = note
        self._finish(request, reason, now)
        kind = "cancel" if reason is FinishReason.CANCELLED else "timeout"
        self.recorder.lifecycle(request.request_id, kind)
        self._outside_events.append(TokenEvent(request.request_id, None, now, reason, note))

    # Arrivals and deadlines ------------------------------------------------------------------------

    def _let_in(self) -> None:
        """Queue the requests that are due, and end those whose time is up."""
        now = self.clock.now()
        while self._arrivals and self._arrivals[0][0] <= now:
            request = heapq.heappop(self._arrivals)[2]
            if request.request_id not in self.requests:
                continue  # cancelled before it came
            if self._queue_is_full():
                waiting, bound = self.scheduler.num_waiting, self.config.max_queued_requests
                note = f"refused: {waiting} requests were waiting, max_queued_requests={bound}"
                self._end_from_outside(request, FinishReason.CANCELLED, note)
            else:
                self._arrive(request)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, kind, request = heapq.heappop(self._deadlines)
            if request.is_finished or (kind == "queue_timeout" and request.was_admitted):
                continue
            note = f"{kind}={getattr(request, kind)} s is over"
            self._end_from_outside(request, FinishReason.TIMEOUT, note)

    def _arrive(self, request: Request) -> None:
        self.recorder.arrive(request)
        self.scheduler.add(request)
        for kind in ("queue_timeout", "timeout"):
            seconds = getattr(request, kind)
            if seconds is not None:
                entry = (request.arrival_time + seconds, request.index, kind, request)
                heapq.heappush(self._deadlines, entry)

    def _queue_is_full(self) -> bool:
        bound = self.config.max_queued_requests
        return bound is not None and self.scheduler.num_waiting >= bound

    def _take_outside_events(self) -> list[TokenEvent]:
        events, self._outside_events = self._outside_events, []
        return events

    def _refuse_impossible(self, request: Request) -> None:
        length, config = request.num_prompt_tokens, self.config
        pool = self.scheduler.pool
        if length < 1:
            raise ValueError("the prompt is empty: give at least one token")
        if config.max_model_len is not None and length >= config.max_model_len:
            raise ValueError(
                f"the prompt has {length} tokens, but max_model_len={config.max_model_len} leaves "
                "no room for an output: shorten it or raise max_model_len"
            )
        if pool.blocks_for(length) > pool.num_blocks:
            raise ValueError(
                f"the prompt has {length} tokens and needs {pool.blocks_for(length)} blocks of "
                f"block_size={pool.block_size}, but the pool has num_blocks={pool.num_blocks}: "
                "shorten it or raise num_blocks"
            )
        if isinstance(request.prompt, PromptShape):
            return
        for position, token in enumerate(request.prompt):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"prompt token {token!r} at position {position} is not a token id")
            if self.vocab_size is not None and token >= self.vocab_size:
                raise ValueError(
                    f"prompt token {token} at position {position} is outside the vocabulary of "
                    f"{self.vocab_size}: was it encoded for another model?"
                )


def _meta_of(engine: Engine) -> dict[str, Any]:
    config, scheduler = engine.config, engine.scheduler
    return {
        "clock": engine.clock.name,
        "policy": str(scheduler.policy),
        "order": str(scheduler.order),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "chunk_size": config.chunk_size,
        "max_num_seqs": config.max_num_seqs,
        "max_long_partial_prefills": config.max_long_partial_prefills,
        "long_prefill_threshold": config.long_prefill_threshold,
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
        "max_model_len": config.max_model_len,
        "prefix_caching": config.prefix_caching,
        "seed": config.seed,
    }
