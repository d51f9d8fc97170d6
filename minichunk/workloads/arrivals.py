"""When requests come: the course's scene, and the arrival processes of the queueing textbook.

In an open loop (Poisson, bursty) users come whether or not the service keeps up; in a closed loop
they wait for their answer first. The difference decides what an overload looks like.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from minichunk.core.request import PromptShape, RequestSpec
from minichunk.workloads.lengths import LengthsLike, as_lengths
from minichunk.workloads.workload import ClosedLoop, Turn, Workload, merge

MIN_CV = 1e-3  # drawing from a much narrower gamma distribution would never end


def stall_scene(
    num_decodes: int = 10,
    prompt_tokens: int = 8000,
    *,
    decode_prompt_tokens: int = 32,
    decode_output_tokens: int = 200,
    prompt_output_tokens: int = 20,
    prompt_arrival: float = 0.2,
) -> Workload:
    """The scene of this course: `num_decodes` answers are streaming when one long prompt arrives.

    The long prompt comes `prompt_arrival` seconds after the others; on slow hardware give them
    enough output tokens to be still decoding by then.
    """
    if num_decodes < 0 or prompt_tokens < 1:
        raise ValueError(
            f"num_decodes={num_decodes} must be at least 0 and prompt_tokens={prompt_tokens} "
            "at least 1"
        )
    decode = RequestSpec(0.0, PromptShape(decode_prompt_tokens), decode_output_tokens)
    long = RequestSpec(prompt_arrival, PromptShape(prompt_tokens), prompt_output_tokens)
    name = f"stall_scene({num_decodes} decodes, prompt of {prompt_tokens})"
    return Workload(name, (decode,) * num_decodes + (long,))


def poisson(
    rate: float,
    num_requests: int,
    *,
    prompt: LengthsLike = 512,
    output: LengthsLike = 128,
    seed: int = 0,
    tenant: str = "default",
    priority: int = 0,
) -> Workload:
    """Independent users: `rate` requests per second with exponential gaps."""
    return bursty(
        rate, num_requests, cv=1.0, prompt=prompt, output=output, seed=seed, tenant=tenant,
        priority=priority,
    )  # fmt: skip


def bursty(
    rate: float,
    num_requests: int,
    *,
    cv: float = 3.0,
    prompt: LengthsLike = 512,
    output: LengthsLike = 128,
    seed: int = 0,
    tenant: str = "default",
    priority: int = 0,
) -> Workload:
    """Gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, more is burstier."""
    if not 0 < rate < math.inf or not MIN_CV <= cv < math.inf or num_requests < 0:
        raise ValueError(
            f"rate={rate} must be above 0 and finite, cv={cv} at least {MIN_CV} and finite, "
            f"num_requests={num_requests} at least 0"
        )
    # One stream for the gaps and one for the lengths: the same requests come at any rate.
    gaps, lengths = random.Random(f"gaps {seed}"), random.Random(f"lengths {seed}")
    shape = 1.0 / cv**2
    prompts, outputs = as_lengths(prompt), as_lengths(output)
    arrival, requests = 0.0, []
    for _ in range(num_requests):
        arrival += gaps.gammavariate(shape, 1.0 / (rate * shape))
        shaped = PromptShape(prompts.draw(lengths))
        requests.append(RequestSpec(arrival, shaped, outputs.draw(lengths), tenant, priority))
    kind = "poisson" if cv == 1.0 else f"bursty(cv={cv:g})"
    return Workload(f"{kind} {rate:g}/s", tuple(requests))


def closed_loop(
    num_users: int,
    requests_per_user: int,
    *,
    prompt: LengthsLike = 512,
    output: LengthsLike = 128,
    think_time: float = 0.0,
    seed: int = 0,
    tenant: str = "default",
) -> ClosedLoop:
    """Users who wait for the answer, think (exponential, mean `think_time` seconds), ask again."""
    if num_users < 1 or requests_per_user < 1 or not 0 <= think_time < math.inf:
        raise ValueError(
            f"num_users={num_users} and requests_per_user={requests_per_user} must be at least 1, "
            f"think_time={think_time} at least 0 and finite"
        )
    rng = random.Random(f"closed loop {seed}")
    prompts, outputs = as_lengths(prompt), as_lengths(output)
    turns = tuple(
        tuple((prompts.draw(rng), outputs.draw(rng)) for _ in range(requests_per_user))
        for _ in range(num_users)
    )
    thinks = tuple(
        tuple(rng.expovariate(1.0 / think_time) if think_time else 0.0 for _ in user)
        for user in turns
    )
    first = [
        Turn(thinks[user][0], PromptShape(own[0][0]), own[0][1], tenant, user=user)
        for user, own in enumerate(turns)
    ]
    first.sort(key=lambda spec: spec.arrival)
    return ClosedLoop(f"closed loop of {num_users} users", tuple(first), (), turns, thinks)


def multi_tenant(tenants: Mapping[str, Workload]) -> Workload:
    """One workload per tenant, merged; each request carries its tenant's name."""
    named = [
        replace(workload, requests=tuple(replace(spec, tenant=tenant) for spec in workload))
        for tenant, workload in tenants.items()
    ]
    return merge(*named, name=f"tenants {', '.join(tenants)}")
