"""Checks for notebook 01: prefill and decode, arithmetic intensity, the ridge of the roofline.

Answers about time are compared with what a run's own trace says, answers about operations and bytes
with the counter that annotates every step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from minichunk.core.trace import StepRecord
from minichunk.labs.batching import GPU, MODEL, mixed_workload
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.hardware import GPU as Accelerator
from minichunk.sim.hardware import GPUS
from minichunk.sim.run import simulate
from minichunk.sim.shapes import BYTES_PER_ELEMENT, MODELS, ModelShape


@exercise("time-by-phase")
def time_by_phase(answer: Callable[[list[StepRecord]], tuple[float, float]]) -> str:
    """`answer(steps)`: seconds in steps that compute prompts, seconds in decode-only steps."""
    rng = random.Random()
    for policy in ("continuous", "decode-first", "continuous", "static"):
        trace = simulate(
            mixed_workload(rng),
            model=MODEL,
            gpu=GPU,
            policy=policy,
            max_num_batched_tokens=256,
            max_num_seqs=4,
        )
        prompts = sum(step.duration for step in trace.steps if step.prefill_tokens)
        decodes = sum(step.duration for step in trace.steps if not step.prefill_tokens)
        got = answer(list(trace.steps))
        if not _near(got, (prompts, decodes)):
            mixed = sum(bool(s.prefill_tokens and s.decode_tokens) for s in trace.steps)
            raise Wrong(
                f"policy {policy!r}, {len(trace.steps)} steps, {mixed} of them mixed: you gave "
                f"{_ms(got)}; steps with prompt tokens took {prompts * 1e3:.2f} ms, the others "
                f"{decodes * 1e3:.2f} ms",
                trace.timeline(),
            )
    return "a step belongs to the prompts as soon as it computes one prompt token"


@exercise("decode-intensity")
def decode_intensity(answer: Callable[[ModelShape, int, int], float]) -> str:
    """`answer(shape, batch, context)`: FLOPs per byte of a step of `batch` decodes."""
    rng = random.Random()
    cases = [("llama-2-7b", 1, 500), ("llama-3-8b", 64, 4000), ("llama-2-7b", 256, 2000)]
    for _ in range(8):
        cases.append((rng.choice(list(MODELS)), rng.randint(1, 300), rng.randint(1, 8000)))
    for slug, batch, context in cases:
        shape = MODELS[slug]
        tokens_read = batch * context
        products = 2.0 * shape.linear_params * batch
        attention = 4.0 * shape.query_size * tokens_read * shape.num_layers
        weights = float(BYTES_PER_ELEMENT * shape.linear_params)
        keys_and_values = float(shape.kv_bytes_per_token * tokens_read)
        expected = (products + attention) / (weights + keys_and_values)
        got = answer(shape, batch, context)
        if not isinstance(got, int | float) or not math.isclose(got, expected, rel_tol=1e-3):
            raise Wrong(
                f"decode_intensity({slug}, batch={batch}, context={context}) gave {got!r}; it is "
                f"{expected:.3f}: operations {products:.3g} (matrices) + {attention:.3g} "
                f"(attention), bytes {weights:.3g} (weights) + {keys_and_values:.3g} (KV)"
            )
    return "weights are shared by the batch, keys and values are not"


@exercise("tokens-to-ridge")
def tokens_to_ridge(answer: Callable[[Accelerator, float], int]) -> str:
    """`answer(gpu, bytes_per_weight)`: tokens from which on matrix products are compute bound."""
    gpus = list(GPUS.values())
    random.shuffle(gpus)
    for gpu in gpus:
        for size in (2.0, 1.0, 0.5):
            weights = 1_000_000_000  # any number: it cancels
            reading = weights * size / gpu.peak_bandwidth

            def computing(tokens: int, weights: int = weights, gpu: Accelerator = gpu) -> float:
                return 2.0 * weights * tokens / gpu.peak_flops

            got = answer(gpu, size)
            slack = 1e-9
            right = (
                isinstance(got, int)
                and computing(got) >= reading * (1 - slack)
                and computing(got - 1) < reading * (1 + slack)
            )
            if not right:
                count = got if isinstance(got, int | float) else 0
                raise Wrong(
                    f"tokens_to_ridge({gpu.name}, bytes_per_weight={size:g}) gave {got!r}: for a "
                    f"billion weights, computing {count:g} tokens takes "
                    f"{computing(int(count)) * 1e6:.0f} µs at peak, reading the weights "
                    f"{reading * 1e6:.0f} µs. Wanted: the smallest whole number of tokens for "
                    "which computing takes at least as long as reading"
                )
    return "the ridge of the GPU, measured in tokens per step"


def _near(got: object, expected: Sequence[float]) -> bool:
    return (
        isinstance(got, tuple | list)
        and len(got) == len(expected)
        and all(abs(g - e) < 1e-9 for g, e in zip(got, expected, strict=True))
    )


def _ms(parts: object) -> str:
    if not isinstance(parts, tuple | list):
        return repr(parts)
    return " and ".join(f"{part * 1e3:.2f}" for part in parts) + " ms"
