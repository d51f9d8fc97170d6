"""The bound of virtual token counters, and that first come first served has none like it."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

from minichunk.core.engine import Engine
from minichunk.core.metrics import jain_index, service_by_tenant
from minichunk.core.trace import Trace

from .fake_executor import greedy, make_engine, random_prompt

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2


def service_over_time(trace: Trace) -> list[dict[str, float]]:
    """Weighted tokens that each tenant was served, after each step."""
    served = {record.tenant: 0.0 for record in trace.requests.values()}
    admitted: dict[int, list[str]] = {}
    for event in trace.events:
        if event.kind == "admit":
            admitted.setdefault(event.step, []).append(event.request_id)
    times = sorted((t, r.tenant) for r in trace.requests.values() for t in r.token_times)
    result = []
    position = 0
    for number, step in enumerate(trace.steps):
        for rid in admitted.get(number, []):
            record = trace.requests[rid]
            served[record.tenant] += PROMPT_WEIGHT * record.prompt_tokens
        while position < len(times) and times[position][0] <= step.end:
            served[times[position][1]] += OUTPUT_WEIGHT
            position += 1
        result.append(dict(served))
    return result


def backlogged_run(
    order: str, numbers: random.Random, sizes: dict[str, tuple[int, int]], num_blocks: int
) -> tuple[Engine, float, int]:
    """Serve two tenants who always have requests waiting; the largest gap between their services.

    `sizes` gives each tenant's longest prompt and answer. Returns the engine, the gap, and the
    longest prompt that was asked.
    """
    engine = make_engine(
        order=order,
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=numbers.choice([16, 64, 200]),
        max_num_seqs=numbers.choice([2, 4, 16]),
        prefix_caching=False,
    )
    longest = 0
    for tenant, (prompt, output) in sizes.items():
        for _ in range(40):
            length = numbers.randint(1, prompt)
            longest = max(longest, length)
            tokens = random_prompt(numbers, length)
            engine.add_request(tokens, greedy(numbers.randint(1, output)), tenant=tenant)
    while len({request.tenant for request in engine.scheduler.waiting}) == 2:
        engine.step()
    gap = max(abs(s["A"] - s["B"]) for s in service_over_time(engine.trace))
    return engine, gap, longest


def test_the_bound_of_vtc_holds_for_two_backlogged_tenants(seed: int) -> None:
    """|W_f - W_g| <= 2 max(w_p L_input, w_q M), M = num_blocks * block_size (VTC, Theorem 4.4)."""

    @with_seed(seed)
    @settings(
        max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        numbers=st.randoms(use_true_random=False),
        prompts=st.tuples(st.integers(1, 60), st.integers(1, 60)),
        outputs=st.tuples(st.integers(1, 30), st.integers(1, 30)),
        num_blocks=st.integers(24, 60),
    )
    def check(
        numbers: random.Random,
        prompts: tuple[int, int],
        outputs: tuple[int, int],
        num_blocks: int,
    ) -> None:
        sizes = {"A": (prompts[0], outputs[0]), "B": (prompts[1], outputs[1])}
        _, gap, longest = backlogged_run("fair", numbers, sizes, num_blocks)
        assert gap <= 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * num_blocks * 4)

    check()


def test_fcfs_breaks_even_a_bound_that_fair_keeps_with_room(rng: random.Random) -> None:
    """A heavy tenant who came first takes everything under fcfs."""
    sizes = {"A": (60, 30), "B": (6, 3)}
    _, fair, longest = backlogged_run("fair", rng, sizes, num_blocks=30)
    _, fcfs, _ = backlogged_run("fcfs", rng, sizes, num_blocks=30)
    tighter = 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * (60 + 30))
    assert fair <= tighter
    assert fcfs > 2 * tighter


def test_jains_index_sees_the_difference(rng: random.Random) -> None:
    shares = {}
    for order in ("fair", "fcfs"):
        engine, _, _ = backlogged_run(order, rng, {"A": (60, 30), "B": (6, 3)}, num_blocks=30)
        served = service_by_tenant(engine.trace)
        shares[order] = jain_index([served["A"], served["B"]])
    assert shares["fair"] > 0.8 > 0.6 > shares["fcfs"]
