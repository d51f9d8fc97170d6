"""The evidence of notebook 13: steps as loads, real lengths, and three ways to read a result.

A result is often quoted without what it depends on: how its promise was read, which rows it was
fitted to, on what load it was taken. These small tools make such choices visible.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.workloads import load

# Steps as loads, for the cost model ------------------------------------------------------------


def prefill(tokens: int, prefix: int = 0, ends: bool = True) -> StepLoad:
    """A step with one chunk of `tokens` behind `prefix` computed ones; `ends`: it samples."""
    pairs = tokens * (prefix + (tokens + 1) / 2)
    return StepLoad(tokens, int(ends), tokens, pairs, prefix + tokens)


def decodes(count: int, context: int) -> StepLoad:
    """A step with `count` decodes of `context` tokens each and nothing else."""
    return StepLoad(count, count, num_decodes=count, decode_context=count * context)


def mixed(tokens: int, count: int, context: int) -> StepLoad:
    """Both in one step."""
    return prefill(tokens)._replace(
        num_tokens=tokens + count,
        num_sampled=1 + count,
        num_decodes=count,
        decode_context=count * context,
    )


def milliseconds(model: CostModel, step: StepLoad) -> float:
    return 1e3 * sum(part.seconds for part in model.parts(step))


def in_chunks(prompt: int, chunk: int) -> list[StepLoad]:
    """The steps of a whole prompt, alone, chunk by chunk."""
    return [
        prefill(min(chunk, prompt - at), at, at + chunk >= prompt) for at in range(0, prompt, chunk)
    ]


# Lengths of real requests, where the reader has them --------------------------------------------


def real_lengths() -> dict[str, list[tuple[int, int]]]:
    """(prompt, output) lengths from the files that the variable MINICHUNK_TRACES names.

    A folder, or several files joined by the system's path separator, in any format that
    `mc.workloads.load` reads. Empty where the variable is not set.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for entry in filter(None, os.environ.get("MINICHUNK_TRACES", "").split(os.pathsep)):
        path = Path(entry)
        files = sorted(path.glob("*.csv*")) if path.is_dir() else [path]
        for file in files:
            name = file.name.removesuffix(".gz").removesuffix(".csv")
            found[name] = [(len(spec.prompt), spec.output_tokens) for spec in load(file)]
    return found


# Ways to read a result ------------------------------------------------------------------------


def keeps_rate(token_times: Sequence[float], limit: float, start: str) -> bool:
    """Does an exponential moving average of the gaps (over 16) never exceed `limit` seconds?

    `start`: "mean" begins at the mean of all gaps, "first" at the first gap, "zero" at 0.
    """
    gaps = [later - earlier for earlier, later in pairwise(token_times)]
    if not gaps:
        return True
    average = {"mean": fmean(gaps), "first": gaps[0], "zero": 0.0}[start]
    for gap in gaps:
        average += 2 / 17 * (gap - average)
        if average > limit:
            return False
    return True


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing their mean rank."""
    a, b = _ranks(xs), _ranks(ys)
    mean_a, mean_b = fmean(a), fmean(b)
    cross = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return cross / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]


def judge(values: Sequence[float], low: float, high: float) -> str:
    """ "holds" if every value lies in [low, high], "does not hold" if none does, else "depends"."""
    inside = [low <= value <= high for value in values]
    return "holds" if all(inside) else "depends" if any(inside) else "does not hold"
