"""The checks of notebook 07 pass its solutions and tell plausible answers apart."""

from __future__ import annotations

import random

from minichunk.core.config import EngineConfig
from minichunk.core.plan import StepPlan
from minichunk.core.policies import decode_first
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.labs import check
from minichunk.labs.chunk_size import step_seconds
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import load_of
from minichunk.sim.executor import SimulatedExecutor
from minichunk.sim.run import simulated_engine
from tests.labs.wrong_answers import assert_all_wrong


def test_kv_tokens_read(solution) -> None:
    assert check.kv_tokens_read(solution("07_chunk_size", "kv-tokens-read")).passed
    assert_all_wrong(
        check.kv_tokens_read,
        {
            "each position once": lambda prompt, chunk: prompt,
            "only the prefix": lambda prompt, chunk: sum(range(0, prompt, chunk)),
            "last chunk rounded up": lambda prompt, chunk: sum(range(chunk, prompt + chunk, chunk)),
        },
    )


def test_kv_tokens_read_counts_what_the_engine_plans(solution) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    prompt, chunk = rng.randint(100, 3000), rng.randint(10, 500)
    plans: list[StepPlan] = []

    class Recording(SimulatedExecutor):
        def execute(self, plan):
            plans.append(plan)
            return super().execute(plan)

    config = EngineConfig(policy=decode_first, chunk_size=chunk, max_num_batched_tokens=4096)
    engine = simulated_engine(CostModel("llama-2-7b", "a100-80g-sxm"), config)
    engine.executor = Recording(engine.executor.cost_model)
    engine.run([RequestSpec(0.0, PromptShape(prompt), 3)])
    read = sum(load_of(plan.chunks).prefill_context for plan in plans)
    assert solution("07_chunk_size", "kv-tokens-read")(prompt, chunk) == read


def test_align_chunk(solution) -> None:
    assert check.align_chunk(solution("07_chunk_size", "align-chunk")).passed
    assert_all_wrong(
        check.align_chunk,
        {
            "decodes forgotten": lambda limit, decodes, tile: limit // tile * tile or limit,
            "rounded up": lambda limit, decodes, tile: (
                -(-(limit + decodes) // tile) * tile - decodes
            ),
            "no way out": lambda limit, decodes, tile: (limit + decodes) // tile * tile - decodes,
        },
    )


def test_choose_chunk(solution) -> None:
    assert check.choose_chunk(solution("07_chunk_size", "choose-chunk")).passed

    def first_chunk(target, seconds, prompt, sizes):
        fitting = [size for size in sizes if seconds(0, size) <= target]
        if not fitting:
            raise ValueError("none")
        return max(fitting)

    def smallest(target, seconds, prompt, sizes):
        fitting = [size for size in sizes if seconds(prompt - size, size) <= target]
        if not fitting:
            raise ValueError("none")
        return min(fitting)

    def never_refuses(target, seconds, prompt, sizes):
        fitting = [size for size in sizes if seconds(prompt - size, size) <= target]
        return max(fitting, default=sizes[0])

    def one_too_large(target, seconds, prompt, sizes):
        for size in sizes:
            if seconds(prompt - size, size) > target:
                return size
        return sizes[-1]

    wrong = [first_chunk, smallest, never_refuses, one_too_large]
    assert_all_wrong(check.choose_chunk, {f.__name__: f for f in wrong})


def test_step_seconds_is_the_cost_of_the_engines_own_step() -> None:
    cost_model = CostModel("llama-3-8b", "h100-sxm")
    config = EngineConfig(policy="decode-first", chunk_size=512, max_num_batched_tokens=4096)
    engine = simulated_engine(cost_model, config)
    trace = engine.run([RequestSpec(0.0, PromptShape(2048), 2)])
    seconds = step_seconds(cost_model, num_decodes=0, decode_context=0)
    for span in trace.spans:
        if span.kind == "prefill":
            step = trace.steps[span.first_step]
            # The engine samples in the prompt's last chunk only; `step_seconds` always does.
            head = sum(p.seconds for p in cost_model.parts(load_with_head()) if p.name == "lm_head")
            last = span.first_position + span.tokens == 2048
            expected = seconds(span.first_position, span.tokens) - (0.0 if last else head)
            assert abs(step.duration - expected) < 1e-9


def load_with_head():
    from minichunk.sim.counter import StepLoad

    return StepLoad(num_tokens=1, num_sampled=1)
