"""A run with everything in it: few blocks, shared prefixes, preemptions, a cancelled request."""

from __future__ import annotations

import random

from minichunk.core.config import EngineConfig
from minichunk.core.request import PromptShape, SamplingParams
from minichunk.core.trace import Trace
from minichunk.sim.cost import CostModel
from minichunk.sim.run import simulated_engine


def crowded_trace(seed: int) -> Trace:
    """Nine requests that share a prefix and outgrow a small block pool, on the simulator."""
    rng = random.Random(seed)
    config = EngineConfig.make(max_num_batched_tokens=512, num_blocks=72, max_num_seqs=6)
    engine = simulated_engine(CostModel("llama-2-7b", "a100-80g-sxm"), config)
    for i in range(9):
        prompt = PromptShape(rng.randint(100, 400), (1, 2, 3))
        params = SamplingParams(max_tokens=rng.randint(120, 200))
        engine.add_request(prompt, params, request_id=f"user-{i}", arrival_time=0.04 * i)
    while engine.has_unfinished_requests():
        engine.step()
        if len(engine.trace.steps) == 40:
            engine.cancel("user-1")
    return engine.trace
