"""Checks for notebook 10: priorities that age, predicted lengths, and requests nobody waits for.

Each check tries the student's answer on cases drawn anew and shows the first one on which it fails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine
from minichunk.core.predictors import FromPromptLength, TenantMean
from minichunk.core.request import PromptShape, Request, SamplingParams
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.cost import CostModel
from minichunk.sim.run import simulated_engine

# Priorities that age -------------------------------------------------------------------------


@exercise("aged-key")
def aged_key(answer: Callable[[int, float, float], Any]) -> str:
    """`answer(priority, arrival, ageing_seconds)`: a sort key, smallest first, constant in time."""
    rng = random.Random()
    cases = [(0, 100.0, 1, 0.0, 10.0), (0, 5.0, 1, 0.0, 10.0), (2, 0.0, 2, 1.0, 10.0)]
    cases += [
        (rng.randint(0, 3), rng.uniform(0, 300), rng.randint(0, 3), rng.uniform(0, 300), ageing)
        for ageing in (1.0, 10.0, 60.0, math.inf)
        for _ in range(10)
    ]
    for p, a, q, b, ageing in cases:
        now = max(a, b) + rng.uniform(0, 100)
        urgency = [priority - (now - arrival) / ageing for priority, arrival in ((p, a), (q, b))]
        if math.isclose(urgency[0], urgency[1]):
            if math.isinf(ageing) or p != q or math.isclose(a, b):
                continue  # a tie may go either way
            urgency = [a, b]  # equal priority: who came first
        first = answer(p, a, ageing) < answer(q, b, ageing)
        if first != (urgency[0] < urgency[1]):
            place = "before" if urgency[0] < urgency[1] else "after"
            raise Wrong(
                f"with ageing_seconds={ageing:g}: a request of priority {p} that arrived at "
                f"{a:.1f} s should come {place} one of priority {q} that arrived at {b:.1f} s; "
                f"at {now:.1f} s their waits are worth "
                f"{(now - a) / ageing:.2f} and {(now - b) / ageing:.2f} levels. "
                f"Your keys are {answer(p, a, ageing)!r} and {answer(q, b, ageing)!r}"
            )
    return "your key orders by urgency, and never needs to be updated"


# Predicting lengths --------------------------------------------------------------------------

ENOUGH = 0.75  # of the error of the better of two simple predictors


@exercise("length-predictor")
def length_predictor(answer: Callable[[], Any]) -> str:
    """`answer()` makes a predictor with `predict(request)` and `learn(request)`."""
    rng = random.Random()
    candidates: dict[str, Any] = {
        "yours": answer(),
        "the tenant's mean": TenantMean(),
        "half the prompt": FromPromptLength(),
    }
    errors: dict[str, list[float]] = {name: [] for name in candidates}
    answers: dict[str, list[str]] = {}
    for number in range(900):
        request, length = _request(rng, number)
        for name, predictor in candidates.items():
            got = predictor.predict(request)
            if not isinstance(got, int | float) or not math.isfinite(got):
                raise Wrong(f"predict gave {got!r} for request {number}; it must give a number")
            if number >= 300:  # it may learn first
                errors[name].append(abs(got - length))
                if name == "yours":
                    line = f"prompt {request.num_prompt_tokens}, answer {length}, yours {got:.0f}"
                    answers.setdefault(request.tenant, []).append(line)
        request.output_token_ids.extend([0] * length)
        for predictor in candidates.values():
            predictor.learn(request)
    mean = {name: sum(values) / len(values) for name, values in errors.items()}
    rival = min((name for name in mean if name != "yours"), key=mean.__getitem__)
    if mean["yours"] > ENOUGH * mean[rival]:
        examples = "\n".join(f"  {tenant}: {rows[-1]}" for tenant, rows in sorted(answers.items()))
        raise Wrong(
            f"your predictions are off by {mean['yours']:.0f} tokens on average, those of "
            f"{rival} by {mean[rival]:.0f}; the aim is {ENOUGH * mean[rival]:.0f}. The last of "
            f"each tenant:\n{examples}"
        )
    return (
        f"off by {mean['yours']:.0f} tokens on average; {rival} is off by {mean[rival]:.0f}, and "
        "nobody told you the rules"
    )


def _request(rng: random.Random, number: int) -> tuple[Request, int]:
    """A request of one of three services, with the length its answer will have."""
    tenant = rng.choice(["translate", "classify", "write"])
    prompt = round(40 * math.exp(rng.uniform(0, 3.5)))
    if tenant == "translate":
        length = max(1, round(prompt * rng.uniform(0.9, 1.2)))
    elif tenant == "classify":
        length = rng.randint(1, 5)
    else:
        length = max(20, round(900 - 0.6 * prompt + rng.uniform(-60, 60)))
    # Clients set the limit that their plan allows, not the length they need.
    params = SamplingParams(max_tokens=4096, seed=0)
    request = Request(f"r{number}", PromptShape(prompt), params, float(number), tenant=tenant)
    return request, length


# Zombies -------------------------------------------------------------------------------------


@exercise("serve-until-they-leave")
def serve_until_they_leave(answer: Callable[[Engine, Mapping[str, float]], Any]) -> str:
    """`answer(engine, leaves_at)`: drive the engine to the end; clients leave at given times."""
    for seed in random.sample(range(10_000), 6):
        engine, leaves_at = _crowd(random.Random(seed))
        answer(engine, leaves_at)
        trace = engine.trace
        if engine.has_unfinished_requests():
            raise Wrong("your loop ended, but requests are unfinished", trace.timeline())
        longest = max((step.duration for step in trace.steps), default=0.0)
        for request_id, record in trace.requests.items():
            leaves = leaves_at.get(request_id, math.inf)
            # The step that was running when the client left may still deliver.
            late = [t for t in record.token_times if t > leaves + longest + 1e-9]
            if late:
                raise Wrong(
                    f"the client of request {request_id} left at {leaves:.3f} s and was sent a "
                    f"token at {late[0]:.3f} s",
                    trace.timeline(),
                )
            ended = record.finish_time or 0.0
            if record.finish_reason == "cancelled" and ended < leaves - 1e-9:
                raise Wrong(
                    f"request {request_id} was cancelled at {ended:.3f} s, but its client "
                    + ("never left" if leaves == math.inf else f"left only at {leaves:.3f} s"),
                    trace.timeline(),
                )
            if record.arrival < leaves and ended > leaves + longest + 1e-9:
                raise Wrong(
                    f"the client of request {request_id} left at {leaves:.3f} s; the request kept "
                    f"its place until {ended:.3f} s ({record.finish_reason})",
                    trace.timeline(),
                )
    return "no token for nobody, and nobody's request was cut short"


def _crowd(rng: random.Random) -> tuple[Engine, dict[str, float]]:
    """Few slots and many requests, so that some clients leave while they wait."""
    config = EngineConfig(policy="decode-first", max_num_batched_tokens=256, max_num_seqs=4)
    engine = simulated_engine(CostModel("llama-2-7b", "a100-80g-sxm"), config)
    leaves_at = {}
    for number in range(16):
        arrival = rng.uniform(0.0, 1.0)
        request_id = engine.add_request(
            PromptShape(rng.randint(10, 800)),
            SamplingParams(max_tokens=rng.randint(5, 80)),
            request_id=f"r{number}",
            arrival_time=arrival,
        )
        if rng.random() < 0.5:
            leaves_at[request_id] = arrival + rng.uniform(0.01, 1.5)
    return engine, leaves_at
