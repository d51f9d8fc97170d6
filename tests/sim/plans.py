"""Step plans by hand: chunks given as (start, tokens), decodes as contexts."""

from minichunk.core.plan import ScheduledChunk, StepPlan
from minichunk.core.request import SamplingParams

SAMPLING = SamplingParams(max_tokens=1000, seed=0)


def make_plan(chunks=(), decodes=(), *, prompt=None):
    """`prompt` is the length of all prompts; by default each chunk ends its prompt."""
    rows = []
    for i, (start, count) in enumerate(chunks):
        length = prompt or start + count
        ends = start + count >= length
        rows.append(
            ScheduledChunk(f"p{i}", start, count, (), (), SAMPLING if ends else None, False, length)
        )
    for i, context in enumerate(decodes):
        rows.append(ScheduledChunk(f"d{i}", context - 1, 1, (), (), SAMPLING, True, 1))
    return StepPlan(0, tuple(rows), budget=100_000, block_size=16)
