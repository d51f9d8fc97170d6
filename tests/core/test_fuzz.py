"""A state machine that does to an engine whatever users and other machines could do to it.

Random arrivals, cancels, time limits, tiny pools, shared prefixes, failing steps, every policy with
every order; each token is compared with what the model says when no engine is around it.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minichunk.core.engine import QueueFullError, TokenEvent
from minichunk.core.orders import REGISTRY as ORDERS
from minichunk.core.plan import StepPlan
from minichunk.core.policies import REGISTRY as POLICIES
from minichunk.core.request import SamplingParams

from .fake_executor import VOCAB_SIZE, drain, expected_tokens, make_engine, random_prompt

COMBINATIONS = [
    (policy, order)
    for policy, order in itertools.product(sorted(POLICIES), sorted(ORDERS))
    if not policy.startswith("test-") and not order.startswith("test-")
]
EXAMPLES = int(os.environ.get("MINICHUNK_FUZZ_EXAMPLES", 6))
SPELLINGS = {"shortest": "shortest(reserve=True)", "priority": "priority(ageing_seconds=20)"}


class EngineMachine(RuleBasedStateMachine):
    """One engine with a small pool."""

    policy = "decode-first"
    order = "fcfs"
    steps = 0  # of all engines together

    @initialize(
        numbers=st.randoms(use_true_random=False),
        num_blocks=st.integers(4, 20),
        block_size=st.sampled_from([1, 2, 4, 5]),
        budget=st.integers(1, 24),
        chunk_size=st.sampled_from([None, None, 1, 3, 8]),
        max_num_seqs=st.integers(1, 6),
        hold_long=st.sampled_from([None, None, 1, 2]),
        prefix_caching=st.booleans(),
        max_queued=st.sampled_from([None, None, 3]),
    )
    def start(
        self,
        numbers: random.Random,
        num_blocks: int,
        block_size: int,
        budget: int,
        chunk_size: int | None,
        max_num_seqs: int,
        hold_long: int | None,
        prefix_caching: bool,
        max_queued: int | None,
    ) -> None:
        self.engine = make_engine(
            policy=self.policy,
            order=SPELLINGS.get(self.order, self.order),
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            chunk_size=chunk_size,
            max_num_seqs=max_num_seqs,
            max_long_partial_prefills=hold_long,
            long_prefill_threshold=None if hold_long is None else 6,
            prefix_caching=prefix_caching,
            max_queued_requests=max_queued,
        )
        self.capacity = num_blocks * block_size
        self.rng = random.Random(numbers.random())
        self.prefix = random_prompt(self.rng, self.capacity)
        self.prompts: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    @rule(
        length=st.floats(0.01, 1.0),
        shared=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        max_tokens=st.sampled_from([1, 2, 3, 8, 20, 60]),
        priority=st.integers(0, 3),
        tenant=st.sampled_from("ABC"),
        limit=st.sampled_from([None, None, None, 0.0, 3.0, 15.0]),
        later=st.sampled_from([None, None, 0.5, 4.0]),
        temperature=st.sampled_from([0.0, 1.0]),
        alphabet=st.sampled_from([1, 2, VOCAB_SIZE]),
    )
    def add(
        self,
        length: float,
        shared: float,
        max_tokens: int,
        priority: int,
        tenant: str,
        limit: float | None,
        later: float | None,
        temperature: float,
        alphabet: int,
    ) -> None:
        size = max(1, int(length * self.capacity * self.rng.random()))
        common = int(shared * size)
        own = random_prompt(self.rng, size - common)
        prompt = self.prefix[:common] + [token % alphabet for token in own]
        params = SamplingParams(
            max_tokens, temperature, seed=self.rng.randrange(2**31), ignore_eos=True
        )
        try:
            rid = self.engine.add_request(
                prompt,
                params,
                priority=priority,
                tenant=tenant,
                timeout=limit,
                queue_timeout=limit if self.rng.random() < 0.5 else None,
                arrival_time=None if later is None else self.engine.clock.now() + later,
            )
        except QueueFullError:
            assert self.engine.scheduler.num_waiting >= 3
        else:
            self.prompts[rid] = (prompt, params)

    @precondition(lambda self: self.prompts)
    @rule()
    def cancel(self) -> None:
        rid = self.rng.choice(list(self.prompts))
        unfinished = rid not in self.ended and rid in self.engine.requests
        assert self.engine.cancel(rid) == unfinished
        assert not self.engine.cancel(rid)

    @precondition(lambda self: self.engine.has_unfinished_requests())
    @rule(count=st.integers(1, 8), trouble=st.sampled_from(["", "", "", "cancel", "fail"]))
    def step(self, count: int, trouble: str) -> None:
        for _ in range(count):
            if self.engine.has_unfinished_requests():
                self._step(trouble)
                trouble = ""

    def _step(self, trouble: str) -> None:
        def before(plan: StepPlan) -> None:
            self.engine.executor.before = lambda plan: None  # type: ignore[attr-defined]
            if trouble == "cancel":
                self.engine.cancel(self.rng.choice(plan.chunks).request_id)
            elif trouble == "fail":
                raise ConnectionError

        self.engine.executor.before = before  # type: ignore[attr-defined]
        num_steps = len(self.engine.trace.steps)
        try:
            self._note(self.engine.step())
        except ConnectionError:
            assert trouble == "fail"
        EngineMachine.steps += len(self.engine.trace.steps) - num_steps

    def _note(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended, f"{event} after its end"
            if event.token_id is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                self.ended[event.request_id] = str(event.finish_reason)

    @invariant()
    def tokens_are_those_of_the_model(self) -> None:
        for rid, tokens in getattr(self, "tokens", {}).items():
            prompt, params = self.prompts[rid]
            assert tokens == expected_tokens(prompt, params, len(tokens))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.executor.before = lambda plan: None  # type: ignore[attr-defined]
        num_steps = len(self.engine.trace.steps)
        self._note(drain(self.engine))
        EngineMachine.steps += len(self.engine.trace.steps) - num_steps
        self.tokens_are_those_of_the_model()
        assert set(self.ended) == set(self.prompts)
        pool, trace = self.engine.scheduler.pool, self.engine.trace
        assert pool.num_used == self.engine.scheduler.reserved_blocks == 0
        for rid, (prompt, params) in self.prompts.items():
            num_tokens = len(self.tokens.get(rid, []))
            if self.ended[rid] == "length":
                outgrown = len(prompt) + num_tokens > self.capacity
                assert num_tokens == params.max_tokens or outgrown
            assert trace.requests[rid].prompt_tokens == len(prompt)
        trace.validate()
        self._everybody_has_a_reason()

    def _everybody_has_a_reason(self) -> None:
        """`why` agrees with the plans, and leaves nobody who waits or runs without an answer."""
        trace = self.engine.trace
        for rid in trace.requests:
            lives = {e.kind: e.step for e in trace.events if e.request_id == rid}
            end = min(lives.get(kind, 10**9) for kind in ("finish", "cancel", "timeout"))
            for number in range(len(trace.steps)):
                answer = trace.why(rid, number)
                if answer.scheduled_tokens:
                    continue
                here = lives["arrive"] <= number < end
                assert (answer.reason is not None) == here or number == end, str(answer)


@pytest.mark.parametrize(("policy", "order"), COMBINATIONS)
def test_an_engine_cannot_be_wedged(seed: int, policy: str, order: str) -> None:
    """At least 60 engine steps for each policy with each order: more than 2,000 in all."""
    EngineMachine.policy, EngineMachine.order, EngineMachine.steps = policy, order, 0
    run_state_machine_as_test(
        with_seed(seed)(EngineMachine),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{EngineMachine.steps} engine steps")
    assert EngineMachine.steps >= 60
