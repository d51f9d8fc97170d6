"""Checks for notebook 07: what small chunks cost, tiles, and the choice of a chunk size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from minichunk.labs.result import Wrong, exercise
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.sim.run import choose_chunk_size


@exercise("kv-tokens-read")
def kv_tokens_read(answer: Callable[[int, int], int]) -> str:
    """`answer(prompt_tokens, chunk_size)`: positions whose keys and values all chunks read."""
    rng = random.Random()
    cases = [(8000, 8000), (8000, 1000), (10, 4), (10, 100), (7, 1)]
    cases += [(rng.randint(1, 10_000), rng.randint(1, 2_000)) for _ in range(10)]
    for prompt, chunk in cases:
        stops = [*range(chunk, prompt, chunk), prompt]
        got = answer(prompt, chunk)
        if got != sum(stops):
            shown = stops if len(stops) <= 6 else [*stops[:3], "…", stops[-1]]
            raise Wrong(
                f"kv_tokens_read({prompt:,}, {chunk:,}) gave {got!r}; the chunks end at {shown} "
                f"and read {sum(stops):,} positions in all"
            )
    return "each chunk reads everything up to its own end"


@exercise("align-chunk")
def align_chunk(answer: Callable[[int, int, int], int]) -> str:
    """`answer(limit, num_decodes, tile)`: the largest chunk that fills its step's tiles."""
    rng = random.Random()
    cases = [(512, 10, 128), (512, 0, 128), (100, 10, 128), (118, 10, 128), (256, 300, 128)]
    cases += [
        (rng.randint(1, 2000), rng.randint(0, 200), rng.choice([64, 128, 256])) for _ in range(20)
    ]
    for limit, decodes, tile in cases:
        full = [c for c in range(1, limit + 1) if (c + decodes) % tile == 0]
        expected, got = max(full, default=limit), answer(limit, decodes, tile)
        if got != expected:
            why = (
                f"{expected} + {decodes} = {expected + decodes} rows are "
                f"{(expected + decodes) // tile} full tiles"
                if full
                else "no chunk up to the limit fills its tiles, so the limit itself is the answer"
            )
            raise Wrong(
                f"align_chunk(limit={limit}, num_decodes={decodes}, tile={tile}) gave {got!r}, "
                f"expected {expected}: {why}"
            )
    return "the tile does not care which of its rows are decodes"


@exercise("choose-chunk")
def choose_chunk(answer: Callable[..., int]) -> str:
    """`answer(target, seconds, prompt_tokens, sizes)`; `seconds(start, chunk)` is a step's time."""
    rng = random.Random()
    for gpu in ("a100-80g-sxm", "h100-sxm", "l4"):
        for prompt in (2048, 8192, 32768):
            num_decodes, context = rng.randint(1, 64), rng.choice([256, 1024])
            cost_model = CostModel("llama-3-8b", gpu)
            seconds = step_seconds(cost_model, num_decodes, context)
            sizes = list(range(64, prompt + 1, 64))
            fastest = seconds(prompt - sizes[0], sizes[0])
            for target in (fastest * 1.001, fastest * rng.uniform(1.2, 4), fastest * 50):
                expected = choose_chunk_size(
                    target,
                    model="llama-3-8b",
                    gpu=gpu,
                    num_decodes=num_decodes,
                    decode_context=context,
                    prompt_tokens=prompt,
                )
                got = answer(target, seconds, prompt, sizes)
                if got != expected:
                    raise Wrong(_choice_text(got, expected, target, seconds, prompt, gpu, sizes))
            _must_refuse(answer, fastest * 0.9, seconds, prompt, sizes)
    return "as `mc.choose_chunk_size` chooses, and it refuses what cannot be met"


def step_seconds(
    cost_model: CostModel, num_decodes: int, decode_context: int
) -> Callable[[int, int], float]:
    """`seconds(start, chunk)`: a step of one chunk from position `start` beside the decodes."""

    def seconds(start: int, chunk: int) -> float:
        load = StepLoad(
            num_tokens=num_decodes + chunk,
            num_sampled=num_decodes + 1,
            prefill_tokens=chunk,
            prefill_pairs=chunk * (start + (chunk + 1) / 2),
            prefill_context=start + chunk,
            num_decodes=num_decodes,
            decode_context=num_decodes * decode_context,
        )
        return sum(part.seconds for part in cost_model.parts(load))

    return seconds


def _must_refuse(
    answer: Callable[..., int],
    target: float,
    seconds: Callable[[int, int], float],
    prompt: int,
    sizes: Sequence[int],
) -> None:
    try:
        got = answer(target, seconds, prompt, list(sizes))
    except ValueError:
        return
    raise Wrong(
        f"target={target * 1e3:.1f} ms cannot be met: even a last chunk of {sizes[0]} takes "
        f"{seconds(prompt - sizes[0], sizes[0]) * 1e3:.1f} ms. You returned {got!r}; raise a "
        "ValueError that says so"
    )


def _choice_text(
    got: object,
    expected: int,
    target: float,
    seconds: Callable[[int, int], float],
    prompt: int,
    gpu: str,
    sizes: Sequence[int],
) -> str:
    text = (
        f"target {target * 1e3:.1f} ms, prompt of {prompt:,} tokens on {gpu}: you chose {got!r}, "
        f"expected {expected}."
    )
    if isinstance(got, int) and got in sizes:
        first, last = seconds(0, got) * 1e3, seconds(prompt - got, got) * 1e3
        text += (
            f" A chunk of {got} takes {first:.1f} ms as the first one and {last:.1f} as the last."
        )
    return text
