"""Checks for notebook 04: static and continuous batching.

Each check plays a student's answer against the real scheduler on a simulated GPU, on small
workloads drawn anew, and shows the first one on which the two disagree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minichunk.core.diff import diff_traces
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.core.trace import Trace
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.run import simulate

MODEL = "llama-2-7b"
GPU = "a100-80g-sxm"


@exercise("static-steps")
def static_steps(answer: Callable[[list[int], int], int]) -> str:
    """`answer(output_lengths, slots)`: the steps that static batching takes."""
    for lengths, slots in _static_cases(random.Random()):
        trace = simulate(
            [RequestSpec(0.0, PromptShape(8), length) for length in lengths],
            model=MODEL,
            gpu=GPU,
            policy="static",
            max_num_seqs=slots,
        )
        got, expected = answer(list(lengths), slots), len(trace.steps)
        if got != expected:
            raise Wrong(
                f"static_steps({lengths}, slots={slots}) gave {got!r}; the engine took {expected} "
                "steps. The timeline shows them.",
                trace.timeline(),
            )
    return "your count is the engine's, batch by batch"


def _static_cases(rng: random.Random) -> Iterator[tuple[list[int], int]]:
    yield [5], 1
    yield [3, 9, 2, 2], 2
    yield [2, 2, 9, 3, 7], 3  # the last batch is not full
    for _ in range(8):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(2, 10))]
        yield lengths, rng.randint(1, 5)


@exercise("idle-share")
def idle_share(answer: Callable[[Trace, int], float]) -> str:
    """`answer(trace, slots)`: the share of slot-steps in which a slot computed nothing."""
    rng = random.Random()
    for policy in ("static", "continuous", "static", "continuous", "decode-first"):
        slots = rng.randint(2, 5)
        trace = simulate(
            mixed_workload(rng), model=MODEL, gpu=GPU, policy=policy, max_num_seqs=slots
        )
        busy = sum(span.last_step - span.first_step + 1 for span in trace.spans)
        expected = 1 - busy / (slots * len(trace.steps))
        got = answer(trace, slots)
        if not isinstance(got, int | float) or abs(got - expected) > 1e-9:
            raise Wrong(
                f"for a run of {policy!r} with {slots} slots and {len(trace.steps)} steps you gave "
                f"{got!r}; requests were in a step {busy} times, so {expected:.4f} of the "
                f"{slots * len(trace.steps)} slot-steps were idle",
                trace.timeline(),
            )
    return "you count a slot as busy only in the steps that compute something for its request"


@exercise("continuous-policy")
def continuous_policy(answer: Callable[..., Any]) -> str:
    """`answer(view)`: a policy that batches continuously, with whole prompts."""
    same_schedule(answer, "continuous", max_num_batched_tokens=256)
    return "on every workload your scheduler made the same steps as the engine's own"


def same_schedule(answer: Callable[..., Any], reference: str, **knobs: Any) -> None:
    """Run both policies on workloads drawn anew; `Wrong` with the first step that differs."""
    rng = random.Random()
    for _ in range(6):
        workload = mixed_workload(rng)
        options = dict(model=MODEL, gpu=GPU, max_num_seqs=rng.randint(2, 4), **knobs)
        theirs = simulate(workload, policy=reference, **options)
        yours = simulate(workload, policy=answer, **options)
        difference = diff_traces(yours, theirs)
        if difference is not None:
            raise Wrong(
                f"{difference}\nWorkload (arrival, prompt, outputs): {_told(workload)}; "
                f"max_num_seqs={options['max_num_seqs']}.",
                _side_by_side(yours, theirs, reference),
            )


def _side_by_side(yours: Trace, theirs: Trace, reference: str) -> Any:
    from minichunk.viz.timeline import timeline

    return timeline({"yours": yours, reference: theirs})


def mixed_workload(rng: random.Random) -> list[RequestSpec]:
    """Requests that meet: some at once, some while others decode, some prompts above a budget."""
    prompts = [rng.randint(5, 60), rng.randint(150, 200), rng.randint(300, 400)]
    specs = [RequestSpec(0.0, PromptShape(p), rng.randint(3, 12)) for p in prompts]
    for _ in range(rng.randint(3, 6)):
        arrival = round(rng.uniform(0.0, 0.3), 3)
        specs.append(RequestSpec(arrival, PromptShape(rng.randint(5, 250)), rng.randint(2, 15)))
    return sorted(specs, key=lambda spec: spec.arrival)


def _told(workload: Sequence[RequestSpec]) -> str:
    return ", ".join(f"({w.arrival:g} s, {len(w.prompt)}, {w.output_tokens})" for w in workload)
