"""Checks for notebooks 05 and 06: the stall, and chunked prefill.

Answers about time are compared with what the engine's own trace says, answers about schedules
with the engine's schedule, step by step, and the attention mask with plain causal attention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minichunk.core.stalls import gaps
from minichunk.core.trace import StepRecord
from minichunk.labs.batching import GPU, MODEL, mixed_workload, same_schedule
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.counter import StepCounter, StepLoad
from minichunk.sim.run import simulate
from minichunk.sim.shapes import ModelShape, get_shape
from minichunk.workloads import stall_scene

if TYPE_CHECKING:
    import torch


@exercise("prefill-flops")
def prefill_flops(answer: Callable[[ModelShape, int], float]) -> str:
    """`answer(shape, prompt_tokens)`: operations of a whole prompt's prefill, within 1%."""
    for slug in ("llama-2-7b", "llama-3-8b", "llama-2-70b"):
        for n in (1, 512, 8_000, 128_000):
            shape = get_shape(slug)
            counter = StepCounter(shape)
            load = StepLoad(n, 1, n, n * (n + 1) / 2, n)
            linear = counter.linear(n).flops
            attention = counter.prefill_attention(load).flops
            expected, got = linear + attention, answer(shape, n)
            # With or without the LM head's one row: both are fine.
            upper = expected + counter.lm_head(1).flops
            if not 0.99 * expected <= got <= 1.01 * upper:
                raise Wrong(
                    f"prefill_flops({slug}, {n:,}) gave {got:.4g}; the counter says "
                    f"{expected:.4g} = {linear:.4g} in the matrix products + {attention:.4g} in "
                    "attention"
                )
    return "matrix products in proportion to the length, attention to its square"


@exercise("find-stalls")
def find_stalls(answer: Callable[..., list[tuple[int, float]]]) -> str:
    """`answer(token_times, floor, factor, slo)`: the stalls of one request."""
    rng = random.Random()
    cases: list[tuple[list[float], float, float, float]] = [
        ([0.0, 0.01, 0.02], 0.01, 2.0, 0.05),
        ([5.0], 0.01, 2.0, 0.05),
        ([1.0, 1.045, 1.2], 0.01, 2.0, 0.05),  # the first gap: 4.5 floors, yet below the slo
        ([1.0, 1.06, 1.3], 0.04, 2.0, 0.05),  # the first gap: above the slo, yet 1.5 floors
    ]
    for _ in range(20):
        floor, factor, slo = rng.uniform(0.01, 0.06), rng.uniform(1.5, 3), rng.uniform(0.03, 0.1)
        times = [rng.random()]
        for _ in range(rng.randint(5, 20)):
            times.append(times[-1] + rng.choice([floor, 0.9 * slo, 1.3 * slo, 0.4]))
        cases.append((times, floor, factor, slo))
    for times, floor, factor, slo in cases:
        expected = [
            (i, times[i] - times[i - 1])
            for i in range(1, len(times))
            if times[i] - times[i - 1] > factor * floor and times[i] - times[i - 1] > slo
        ]
        got = answer(list(times), floor, factor, slo)
        if not _close(got, expected):
            shown = [round(t, 4) for t in times]
            raise Wrong(
                f"token_times={shown}, floor={floor:.4f}, factor={factor:.2f}, slo={slo:.3f}:\n"
                f"you found {_rounded(got)},\nthere are {_rounded(expected)} (index of the token "
                "after the gap, seconds)"
            )
    return "a gap must be long for the hardware and long for a reader"


@exercise("split-gap")
def split_gap(
    answer: Callable[[float, float, list[StepRecord], float], tuple[float, float, float]],
) -> str:
    """`answer(start, end, steps, floor)`: (floor, interference, waiting) of one gap, in seconds."""
    rng = random.Random()
    for policy in ("continuous", "decode-first", "prefill-first", "continuous", "decode-first"):
        budget = rng.choice([64, 128, 256])
        trace = simulate(
            mixed_workload(rng),
            model=MODEL,
            gpu=GPU,
            policy=policy,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
        )
        for gap in gaps(trace):
            if gap.floor is None:
                continue
            expected = (gap.gap - gap.interference - gap.waiting, gap.interference, gap.waiting)
            got = answer(gap.start, gap.end, trace.steps, gap.floor)
            if not _near(got, expected):
                raise Wrong(
                    f"{policy}, max_num_batched_tokens={budget}: request {gap.request_id}, the gap "
                    f"before its token {gap.token_index} ({gap.gap * 1e3:.2f} ms, steps "
                    f"{gap.first_step} to {gap.last_step}, floor {gap.floor * 1e3:.2f} ms):\n"
                    f"you split it into {_ms(got)},\nit is {_ms(expected)} (floor, interference, "
                    "waiting)",
                    trace.timeline(view=(gap.start, gap.end), selection=gap.request_id),
                )
    return "every gap of five runs is split as the trace's own account has it"


@exercise("chunk-bounds")
def chunk_bounds(answer: Callable[[int, int, int, int], list[tuple[int, int]]]) -> str:
    """`answer(prompt_tokens, chunk_size, budget, num_decodes)`: (start, stop) of each chunk."""
    rng = random.Random()
    cases = [(8000, 1000, 1024, 10), (100, 100, 110, 10), (700, 512, 256, 10)]
    for _ in range(8):
        budget = rng.randint(16, 300)
        cases.append(
            (rng.randint(1, 1500), rng.randint(8, 300), budget, rng.randint(1, budget // 2))
        )
    for prompt_tokens, chunk_size, budget, num_decodes in cases:
        scene = stall_scene(
            num_decodes, prompt_tokens, decode_prompt_tokens=1, decode_output_tokens=250
        )
        trace = simulate(
            scene,
            model=MODEL,
            gpu=GPU,
            policy="decode-first",
            chunk_size=chunk_size,
            max_num_batched_tokens=budget,
        )
        long = str(num_decodes)
        spans = [s for s in trace.spans if s.request_id == long and s.kind == "prefill"]
        expected = [(s.first_position, s.first_position + s.tokens) for s in spans]
        got = [
            (start, stop) for start, stop in answer(prompt_tokens, chunk_size, budget, num_decodes)
        ]
        if got != expected:
            raise Wrong(
                f"chunk_bounds(prompt_tokens={prompt_tokens}, chunk_size={chunk_size}, budget="
                f"{budget}, num_decodes={num_decodes}) gave {_short(got)}; the engine's chunks "
                f"were {_short(expected)}",
                trace.timeline(selection=long),
            )
    return "these are the engine's chunks"


@exercise("chunk-mask")
def chunk_mask(answer: Callable[[int, int], torch.Tensor]) -> str:
    """`answer(start, num_tokens)`: bool [num_tokens, start + num_tokens], True where allowed."""
    import torch

    rng = random.Random()
    for start, count in [(0, 5), (4, 3), (3, 1), (0, 1), (rng.randint(5, 20), rng.randint(2, 9))]:
        stop = start + count
        expected = torch.ones(stop, stop, dtype=torch.bool).tril()[start:]
        got = answer(start, count)
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
            raise Wrong(
                f"chunk_mask({start}, {count}) gave {shape}; "
                f"expected a tensor of shape {tuple(expected.shape)}"
            )
        wrong = (got.to(torch.bool) != expected).nonzero()
        if len(wrong):
            row, column = (int(x) for x in wrong[0])
            may = "may" if expected[row, column] else "may not"
            raise Wrong(
                f"chunk_mask({start}, {count}): row {row} is the query at position {start + row}; "
                f"it {may} attend to position {column}",
                _two_masks(got.to(torch.bool), expected),
            )
    return "each query sees the whole prefix, and of its own chunk what is not after it"


@exercise("decode-first-policy")
def decode_first_policy(answer: Callable[..., Any]) -> str:
    """`answer(view)`: every decode gets its token, prompts get chunks of what is left."""
    same_schedule(answer, "decode-first", max_num_batched_tokens=128)
    same_schedule(answer, "decode-first", max_num_batched_tokens=256, chunk_size=50)
    return "on every workload your scheduler made the same steps as the engine's own"


def _close(got: Any, expected: Sequence[tuple[int, float]]) -> bool:
    return len(got) == len(expected) and all(
        g[0] == e[0] and abs(g[1] - e[1]) < 1e-9 for g, e in zip(got, expected, strict=True)
    )


def _near(got: Any, expected: Sequence[float]) -> bool:
    return len(got) == len(expected) and all(
        abs(g - e) < 1e-9 for g, e in zip(got, expected, strict=True)
    )


def _rounded(stalls: Any) -> Any:
    return [(index, round(gap, 4)) for index, gap in stalls]


def _ms(parts: Sequence[float]) -> str:
    return " + ".join(f"{part * 1e3:.2f}" for part in parts) + " ms"


def _short(pairs: Sequence[tuple[int, int]]) -> str:
    return str(list(pairs)) if len(pairs) <= 8 else f"{len(pairs)} chunks, first {pairs[:4]}"


def _two_masks(got: torch.Tensor, expected: torch.Tensor) -> Any:
    """Both masks, dark where a query (row) may see a key (column)."""
    from minichunk.viz.figure_style import Picture

    figure = Picture(figsize=(6.4, 2.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, mask, title in zip(axes, (got, expected), ("yours", "expected"), strict=True):
        axis.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.4)
        axis.set(title=title, xlabel="key at position", ylabel="query at position")
        axis.set_yticks(range(len(mask)), range(mask.shape[1] - len(mask), mask.shape[1]))
    return figure
