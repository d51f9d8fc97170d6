"""Checks for notebook 08: how prefill and decode share a step, and which way suits which service.

Each check plays a student's answer against the real scheduler on a simulated GPU and shows the
first case on which the two disagree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minichunk.core.config import PRESETS, EngineConfig
from minichunk.core.diff import diff_traces
from minichunk.core.policies import Policy
from minichunk.core.request import PromptShape, RequestSpec, SamplingParams
from minichunk.core.trace import Trace
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.cost import CostModel
from minichunk.sim.run import simulate, simulated_engine
from minichunk.workloads import Lengths, Workload, poisson

A100: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-80g-sxm"}

# How many steps a prompt takes ----------------------------------------------------------------


@exercise("prefill-steps")
def prefill_steps(answer: Callable[[str, int, int, int], int]) -> str:
    """`answer(policy, prompt_tokens, budget, decodes)`: steps from a prompt's first chunk to its
    first token, both included, while `decodes` requests decode."""
    rng = random.Random()
    cases = [(8000, 1024, 10), (1000, 1024, 30), (1014, 1024, 10), (1024, 1024, 10)]
    cases += [(rng.randint(500, 6000), rng.randint(64, 1024), rng.randint(1, 40)) for _ in range(5)]
    for prompt_tokens, budget, decodes in cases:
        for policy in ("decode-first", "prefill-first", "balanced", "alternating"):
            trace = _one_prompt(policy, prompt_tokens, budget, decodes)
            spans = [s for s in trace.spans if s.request_id == "long" and s.kind == "prefill"]
            expected = spans[-1].last_step - spans[0].first_step + 1
            got = answer(policy, prompt_tokens, budget, decodes)
            if got != expected:
                raise Wrong(
                    f"prefill_steps({policy!r}, prompt_tokens={prompt_tokens}, budget={budget}, "
                    f"decodes={decodes}) gave {got!r}, but the engine took {expected} steps from "
                    f"its first chunk (of {spans[0].tokens} tokens) to its last; see the request "
                    '"long"',
                    trace.timeline(),
                )
    return "you counted as the engine does, for all four policies"


def _one_prompt(policy: str, prompt_tokens: int, budget: int, decodes: int) -> Trace:
    """`decodes` requests are decoding when one long prompt comes, and keep on until it is done."""
    config = EngineConfig(policy=policy, max_num_batched_tokens=budget)
    engine = simulated_engine(CostModel(**A100), config)
    patient = SamplingParams(max_tokens=4 * prompt_tokens)
    for _ in range(decodes):
        engine.add_request(PromptShape(1), patient)
    while not all(r.is_decoding for r in engine.requests.values()):
        engine.step()
    engine.add_request(PromptShape(prompt_tokens), patient, request_id="long")
    while not engine.requests["long"].output_token_ids:
        engine.step()
    return engine.trace


# A policy of one's own ------------------------------------------------------------------------


def _capped(view: Any, cap: int = 256) -> Any:
    decodes = 0
    for request in view.decoding:
        decodes += yield request, 1
    left = cap if decodes else view.budget
    for request in view.prefilling:
        if left < 1:
            break
        left -= yield request, min(left, request.num_uncomputed_tokens)


@exercise("capped-policy")
def capped_policy(answer: Callable[..., Any]) -> str:
    """`answer(view, cap)`: decodes first; beside decodes at most `cap` prompt tokens per step."""
    rng = random.Random()
    for number in range(6):
        cap = (256, 64, 300)[number] if number < 3 else rng.randint(20, 500)
        workload = _bursty_prompts(rng)
        options: dict[str, Any] = {**A100, "max_num_batched_tokens": 512, "max_num_seqs": 32}
        mine = simulate(workload, policy=Policy("capped", _capped, {"cap": cap}), **options)
        theirs = simulate(workload, policy=Policy("yours", answer, {"cap": cap}), **options)
        for step, record in enumerate(theirs.steps):
            if record.decode_tokens and record.prefill_tokens > cap:
                raise Wrong(
                    f"with cap={cap}, step {step} carries {record.prefill_tokens} prompt tokens "
                    f"beside {record.decode_tokens} decodes",
                    theirs.timeline(),
                )
        difference = diff_traces(mine, theirs)
        if difference is not None:
            raise Wrong(f"with cap={cap}: {difference}", theirs.timeline())
    return "decodes never wait, prompts never take more than the cap, and nothing idles"


def _bursty_prompts(rng: random.Random) -> list[RequestSpec]:
    """Bursts of prompts, with pauses in which everything drains."""
    return [
        RequestSpec(
            burst * 4.0 + rng.random() * 0.3, PromptShape(rng.randint(1, 900)), rng.randint(1, 60)
        )
        for burst in range(2)
        for _ in range(8)
    ]


# The right policy for a promise ---------------------------------------------------------------

CANDIDATES: dict[str, dict[str, Any]] = {
    name: dict(PRESETS[name]) for name in ("chat", "rag", "batch")
}


def _chat(seed: int) -> Workload:
    prompt, output = Lengths(512, p90=2048, maximum=6000), Lengths(200, p90=400)
    return poisson(6, 40, prompt=prompt, output=output, seed=seed)


def _retrieval(seed: int) -> Workload:
    prompt, output = Lengths(4000, p90=7000, maximum=9000), Lengths(40, p90=80)
    return poisson(3, 40, prompt=prompt, output=output, seed=seed)


# Label, workload by seed, promised TTFT and gap (s), and whether the chat preset is right for it.
SERVICES: tuple[tuple[str, Callable[[int], Workload], float, float | None, bool], ...] = (
    ("a chat service that promises gaps of at most 80 ms", _chat, 3.0, 0.080, True),
    ("a retrieval service that promises a first token within 2 s", _retrieval, 2.0, None, False),
)


@exercise("choose-preset")
def choose_preset(
    answer: Callable[[Iterable[RequestSpec], Mapping[str, Any], float, float | None], str],
) -> str:
    """`answer(workload, candidates, ttft, itl)`: the candidate's name with the best goodput."""
    for label, make, ttft, itl, is_chat in SERVICES:
        workload, goodput = _decisive(make, ttft, itl, is_chat)
        choice = answer(workload, CANDIDATES, ttft, itl)
        if choice not in goodput:
            raise Wrong(f"you answered {choice!r}; the candidates are {', '.join(goodput)}")
        if goodput[choice] < 0.97 * max(goodput.values()):
            figures = ", ".join(f"{name} {value:.2f}" for name, value in goodput.items())
            raise Wrong(
                f"{label}: you chose {choice!r}, but the goodput in requests/s within "
                f"ttft={ttft}, itl={itl} is {figures}"
            )
    return "you let the promise choose, not the taste"


def _decisive(
    make: Callable[[int], Workload], ttft: float, itl: float | None, is_chat: bool
) -> tuple[Workload, dict[str, float]]:
    """A workload drawn anew on which the presets differ enough to tell a good choice from luck."""
    for seed in random.sample(range(10_000), 50):
        workload = make(seed)
        goodput = {
            name: simulate(workload, **A100, **knobs).goodput(ttft=ttft, itl=itl)
            for name, knobs in CANDIDATES.items()
        }
        others = max(goodput["rag"], goodput["batch"])
        if goodput["chat"] > 1.2 * others if is_chat else goodput["chat"] < 0.8 * others:
            break
    return workload, goodput
