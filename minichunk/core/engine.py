"""The step loop: requests → scheduler → plan → executor → tokens → trace.

`Engine.step()` is the whole of serving. It works on the wall clock with a real model and on a
virtual clock with a simulated one; there is no second loop anywhere. Single-threaded: `cancel` may
also be called from within an executor or while events are handled, and takes effect at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minichunk.core.agenda import Agenda
from minichunk.core.clock import Clock, WallClock
from minichunk.core.config import EngineConfig
from minichunk.core.drive import Feed
from minichunk.core.intake import check_numbers, read_prompt, refuse_impossible
from minichunk.core.invariants import check_plan, check_state
from minichunk.core.orders import ask, failure_of
from minichunk.core.plan import Executor, StepCost, StepPlan, StepResult
from minichunk.core.recorder import Recorder
from minichunk.core.request import FinishReason, PromptShape, Request, SamplingParams
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
        self._user = object()  # who we are, to an executor that serves several engines in turn
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
        in_pool = config.num_blocks * config.block_size
        self._longest = min(in_pool + 1, config.max_model_len or in_pool + 1)  # a request ends here
        self.requests: dict[str, Request] = {}  # those that are not finished yet
        self._num_added = 0
        self._agenda = Agenda()
        self._events: list[TokenEvent] = []  # not handed to the caller yet
        self.trace.meta = {
            "clock": self.clock.name,
            "policy": str(self.scheduler.policy),
            "order": str(self.scheduler.order),
            **config.as_meta(),
            **(meta or {}),
        }

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
        if params.seed is None:
            params = replace(params, seed=self.config.seed * 1_000_003 + self._num_added)
        request = Request(
            self._unused_id() if request_id is None else request_id,
            read_prompt(prompt, self.vocab_size),
            params,
            self.clock.now() if arrival_time is None else arrival_time,
            priority,
            tenant,
            queue_timeout,
            timeout,
            index=self._num_added,
        )
        check_numbers(request)
        request_id = request.request_id
        if request_id in self.requests or request_id in self.trace.requests:
            raise ValueError(f"request_id={request_id!r} is in use already: choose another")
        refuse_impossible(request, self.config, self.scheduler.pool)
        if arrival_time is not None:
            self._agenda.expect(request)
        elif self._queue_is_full():
            raise QueueFullError(
                f"{self.scheduler.num_waiting} requests are waiting and max_queued_requests="
                f"{self.config.max_queued_requests}: try later or raise it"
            )
        else:
            self._arrive(request)
        self._num_added += 1
        self.requests[request_id] = request
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
        return bool(self.requests) or bool(self._events)

    # The loop ----------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Schedule, execute and apply one step; returns what happened.

        With nothing due it waits for the next arrival. An error of the policy, the executor or
        `annotate` is passed on with the engine as it was before the step: call again, and it goes
        on. An error of `stop_check` is passed on after the step; its events come with the next. An
        order's errors, named in a `PolicyError`, are of the one kind or of the other.
        """
        self._let_in()
        if not self.scheduler.has_work and not self._events:
            next_arrival = self._agenda.next_arrival
            if next_arrival is not None:
                self.clock.wait_until(next_arrival)
                self._let_in()
        if not self.scheduler.has_work:
            return self._take_events()

        self._claim_executor()
        start = self.recorder.now = self.clock.now()
        before = time.perf_counter()
        plan = self.scheduler.schedule(start)
        scheduling_time = time.perf_counter() - before
        if self.config.check_invariants:
            check_plan(self.scheduler, plan)
        try:
            result = self.executor.execute(plan)
            self.clock.advance(result.duration)
            end = self.clock.now()
            _check_tokens(plan, result)
            cost = result.cost or (self.annotate(plan) if self.annotate else None)
        except BaseException:
            self.scheduler.undo(plan)
            raise
        self.recorder.now = end
        self.scheduler.apply(plan)
        failure = self._hand_out(plan, result.token_ids, end)
        order = self.scheduler.order
        try:
            self.recorder.counters(ask(order, order.changed_counters))
        except Exception as error:
            failure = failure or error
        pool = self.scheduler.pool
        blocks = (pool.num_free, pool.num_used, self.scheduler.reserved_blocks)
        self.recorder.executed(plan, start, end, cost, scheduling_time, blocks)
        if self.config.check_invariants:
            arrived = self.trace.requests
            check_state(self.scheduler, [r for i, r in self.requests.items() if i in arrived])
        if failure is not None:
            raise failure
        return self._take_events()

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
                if on_event is not None and not self._was_cancelled_since(event):
                    on_event(event)
            feed.pull()
        return self.trace

    def _claim_executor(self) -> None:
        """Where another engine has used the executor's KV tensors since, our prefixes are gone."""
        executor: Any = self.executor
        if hasattr(executor, "last_user") and executor.last_user is not self._user:
            self.scheduler.pool.forget()
            executor.last_user = self._user

    # What a step does to requests ----------------------------------------------------------------

    def _hand_out(self, plan: StepPlan, tokens: dict[str, int], now: float) -> Exception | None:
        """Append each sampled token to its request, and finish those that are done.

        Returns the first error of an order or of `stop_check`, which must not cost the others of
        the batch their tokens.
        """
        failure: Exception | None = None
        requests, records, order = self.requests, self.trace.requests, self.scheduler.order
        for request_id, _, _, _, _, sampling, _, _ in plan.chunks:
            if sampling is None:
                continue
            request = requests.get(request_id)
            if request is None:
                continue  # cancelled while the step ran: nothing of it may appear
            token = tokens[request_id]
            request.output_token_ids.append(token)
            stops = False
            try:
                order.charge(request, 0, 1)
            except Exception as error:
                failure = failure or failure_of(order, "charge", error)
            try:
                stops = self.stop_check is not None and self.stop_check(request)
            except Exception as error:
                failure = failure or error
            if request.is_finished:
                continue  # `stop_check` cancelled it
            record = records[request_id]
            record.token_times.append(now)
            if record.output_token_ids is not None:
                record.output_token_ids.append(token)
            reason = FinishReason.STOP if stops else self._finish_reason(request, token)
            if reason is None:
                self._events.append(TokenEvent(request_id, token, now))
                continue
            self._events.append(TokenEvent(request_id, token, now, reason, request.note))
            try:
                self._finish(request, reason, now, "finish")
            except Exception as error:
                failure = failure or error
        return failure

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        params, num_outputs = request.params, len(request.output_token_ids)
        if token in params.stop_token_ids:
            return FinishReason.STOP
        if token in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if num_outputs >= params.max_tokens:
            return FinishReason.LENGTH
        num_tokens = request.num_prompt_tokens + num_outputs
        if num_tokens < self._longest:
            return None
        limit, pool = self.config.max_model_len, self.scheduler.pool
        if limit is not None and num_tokens >= limit:
            request.note = f"reached max_model_len={limit} tokens (prompt and outputs)"
        else:
            request.note = (
                f"its {num_tokens} tokens outgrow the whole block pool of "
                f"num_blocks={pool.num_blocks} × block_size={pool.block_size} tokens"
            )
        return FinishReason.LENGTH

    def _finish(self, request: Request, reason: FinishReason, now: float, kind: str) -> None:
        request.finish_reason = reason
        del self.requests[request.request_id]
        self.recorder.finish(request, reason, now, kind)
        self.scheduler.remove(request)  # last: the order learns of it, and may raise

    def _end_from_outside(self, request: Request, reason: FinishReason, note: str) -> None:
        now = self.recorder.now = max(self.recorder.now, self.clock.now())
        request_id = request.request_id
        if request_id not in self.trace.requests:  # it was to arrive later
            request.arrival_time = min(request.arrival_time, now)
            self._arrive(request)
        request.note = note
        # Tokens that were sampled but not handed out yet (see `step`) must not appear any more.
        self._events[:] = [event for event in self._events if event.request_id != request_id]
        self._events.append(TokenEvent(request_id, None, now, reason, note))
        kind = "cancel" if reason is FinishReason.CANCELLED else "timeout"
        self._finish(request, reason, now, kind)

    def _was_cancelled_since(self, event: TokenEvent) -> bool:
        ended = self.trace.requests[event.request_id].finish_reason == FinishReason.CANCELLED
        return ended and event.token_id is not None

    def _take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    # Arrivals and deadlines --------------------------------------------------------------------

    def _let_in(self) -> None:
        """Queue the requests that are due, and end those whose time is up."""
        now = self.clock.now()
        for request in self._agenda.arrivals(now):
            try:
                if self._queue_is_full():
                    waiting, bound = self.scheduler.num_waiting, self.config.max_queued_requests
                    note = f"refused: {waiting} requests were waiting, max_queued_requests={bound}"
                    self._end_from_outside(request, FinishReason.CANCELLED, note)
                else:
                    self._arrive(request)
            except Exception:
                self.requests.pop(request.request_id, None)  # an order that cannot place it
                raise
        for kind, request in self._agenda.overdue(now):
            note = f"{kind}={getattr(request, kind)} s is over"
            self._end_from_outside(request, FinishReason.TIMEOUT, note)

    def _arrive(self, request: Request) -> None:
        self.scheduler.add(request)
        self.recorder.arrive(request)
        self._agenda.limit(request)

    def _unused_id(self) -> str:
        number = self._num_added
        while str(number) in self.requests or str(number) in self.trace.requests:
            number += 1
        return str(number)

    def _queue_is_full(self) -> bool:
        bound = self.config.max_queued_requests
        return bound is not None and self.scheduler.num_waiting >= bound


def _check_tokens(plan: StepPlan, result: StepResult) -> None:
    tokens = result.token_ids
    lacking = [c[0] for c in plan.chunks if c.sampling is not None and c[0] not in tokens]
    if lacking:
        raise ValueError(f"step {plan.step}: the executor returned no token for {lacking}")
