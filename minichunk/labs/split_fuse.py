"""Checks for notebook 09: Dynamic SplitFuse, what a token weighs, and a budget that finds itself.

Each check plays a student's answer against the real scheduler on a simulated GPU, on cases drawn
anew, and shows the first one on which it fails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from minichunk.core.config import EngineConfig
from minichunk.core.plan import StepPlan
from minichunk.core.policies import Offers, Policy, split_fuse
from minichunk.core.request import PromptShape, RequestSpec, SamplingParams
from minichunk.core.trace import Trace
from minichunk.core.view import StepView
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.cost import CostModel
from minichunk.sim.hardware import GPU, GPUS
from minichunk.sim.run import simulate, simulated_engine
from minichunk.sim.shapes import MODELS, ModelShape

# One step ------------------------------------------------------------------------------------


@exercise("fuse-step")
def fuse_step(answer: Callable[[int, list[int], list[int], float], list[int]]) -> str:
    """`answer(target, contexts, prompts, context_per_token)`: the prompts' chunks in one step."""
    rng = random.Random()
    cases: list[tuple[int, list[int], list[int], float]] = [
        (512, [], [300, 100, 900], math.inf),
        (512, [1000] * 12, [300, 100, 900], math.inf),
        (512, [1000] * 12, [300, 100, 900], 200.0),
        (64, [2000] * 16, [500], 200.0),  # the decodes alone outweigh the target
    ]
    for _ in range(8):
        contexts = [rng.randint(20, 2000) for _ in range(rng.randint(0, 20))]
        prompts = [rng.randint(1, 600) for _ in range(rng.randint(1, 5))]
        per_token = rng.choice([math.inf, float(rng.randint(50, 800))])
        cases.append((rng.randint(32, 1024), contexts, prompts, per_token))
    for target, contexts, prompts, per_token in cases:
        plan = _next_step(target, contexts, prompts, per_token)
        granted = {chunk.request_id: chunk.num_tokens for chunk in plan.chunks}
        expected = [granted.get(f"prompt {i}", 0) for i in range(len(prompts))]
        got = answer(target, list(contexts), list(prompts), per_token)
        if list(got) != expected:
            weight = sum(1 + context / per_token for context in contexts)
            raise Wrong(
                f"fuse_step(target={target}, contexts={contexts}, prompts={prompts}, "
                f"context_per_token={per_token:g}) gave {got}; the policy grants {expected}. "
                f"The {len(contexts)} decodes weigh {weight:.1f} together."
            )
    return "your step carries what the policy's carries, token by token"


def _next_step(
    target: int, contexts: Sequence[int], prompts: Sequence[int], per_token: float
) -> StepPlan:
    """The plan of a step in which requests with these contexts decode and these prompts wait."""

    def prefill_then_fuse(view: StepView) -> Offers:
        if contexts and "ready" not in view.state:
            view.state["ready"] = True
            for request in view.prefilling:
                yield request, request.num_uncomputed_tokens
        else:
            yield from split_fuse(view, target=target, context_per_token=per_token)

    config = EngineConfig(
        policy=prefill_then_fuse, max_num_batched_tokens=100_000, num_blocks=100_000
    )
    engine = simulated_engine(CostModel("llama-2-7b", "a100-80g-sxm"), config)
    endless = SamplingParams(max_tokens=1_000_000)
    for context in contexts:
        engine.add_request(PromptShape(context), endless)
    if contexts:
        engine.step()
    for number, length in enumerate(prompts):
        engine.add_request(PromptShape(length), endless, request_id=f"prompt {number}")
    return engine.scheduler.schedule(engine.clock.now())


# What a token weighs -------------------------------------------------------------------------


@exercise("context-per-token")
def context_per_token(answer: Callable[[ModelShape, GPU], float]) -> str:
    """`answer(shape, gpu)`: the context whose KV read takes as long, at peak rates, as one token's
    matrix products."""
    models, gpus = list(MODELS.values()), list(GPUS.values())
    random.shuffle(models)
    random.shuffle(gpus)
    for shape, gpu in zip(models, gpus, strict=False):
        compute = 2 * shape.linear_params / gpu.peak_flops
        memory = shape.kv_bytes_per_token / gpu.peak_bandwidth
        got, expected = answer(shape, gpu), compute / memory
        if not isinstance(got, int | float) or not math.isclose(got, expected, rel_tol=0.01):
            raise Wrong(
                f"{shape.name} on {gpu.name}: you gave {got!r} tokens of context. One token's "
                f"matrix products take {compute * 1e6:.3f} µs at peak, and reading the keys and "
                f"values of one token of context takes {memory * 1e6:.5f} µs"
            )
    return "one token's arithmetic, measured in tokens of context"


# A budget that finds itself ------------------------------------------------------------------

TOLERANCE = 1.3  # a step may be this much longer than the limit …
MOST_OVER = 0.05  # … in at most this share of the steps
LEAST_USED = 0.7  # and the median step must use this much of the limit


@exercise("feedback-policy")
def feedback_policy(answer: Callable[..., Any]) -> str:
    """`answer(view, limit)`: a policy whose mixed steps take about `limit` seconds on any GPU."""
    rng, seen = random.Random(), []
    for gpu, model, low, high in (
        ("a100-80g-sxm", "llama-3-8b", 0.050, 0.070),
        ("a10g", "llama-3-8b", 0.120, 0.150),
        ("h100-sxm", "llama-3-8b", 0.030, 0.040),
    ):
        limit = round(rng.uniform(low, high), 3)
        trace = simulate(
            _backlog(rng),
            model=model,
            gpu=gpu,
            policy=Policy("yours", answer, {"limit": limit}),
            max_num_batched_tokens=8192,
            num_blocks=10_000,
        )
        _judge(trace, limit, f"{model} on {gpu}")
        longest = max(s.duration for s in trace.steps if s.prefill_tokens and s.decode_tokens)
        seen.append(f"{gpu}: limit {limit * 1e3:.0f} ms, longest step {longest * 1e3:.0f} ms")
    return (
        "three GPUs, three limits, and nobody told your policy how fast they are "
        f"({'; '.join(seen)})"
    )


def _judge(trace: Trace, limit: float, where: str) -> None:
    last = max((event.step for event in trace.events if event.kind == "admit"), default=0)
    crowded = trace.steps[:last]  # a prompt was waiting
    mixed = [s.duration for s in crowded if s.prefill_tokens and s.decode_tokens]
    mixed = mixed[len(mixed) // 4 :]  # it may learn first
    if not mixed:
        raise Wrong(f"{where}: no step mixes prompts and decodes", trace.timeline())
    over = sum(duration > TOLERANCE * limit for duration in mixed) / len(mixed)
    middle = sorted(mixed)[len(mixed) // 2]
    figures = f"{where}, limit={limit * 1e3:.0f} ms: the median mixed step takes {middle * 1e3:.0f}"
    if over > MOST_OVER:
        raise Wrong(
            f"{figures} ms, and {over:.0%} of them take more than {TOLERANCE} limits "
            f"(at most {MOST_OVER:.0%} may)",
            trace.timeline(),
        )
    if middle < LEAST_USED * limit:
        raise Wrong(
            f"{figures} ms: less than {LEAST_USED} limits, although prompts are waiting",
            trace.timeline(),
        )


def _backlog(rng: random.Random) -> list[RequestSpec]:
    """More prompts than can be served at once, so that there is always one to cut."""
    return [
        RequestSpec(0.0, PromptShape(rng.randint(1000, 5000)), rng.randint(20, 100))
        for _ in range(100)
    ]
