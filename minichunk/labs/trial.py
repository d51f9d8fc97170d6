"""Checks for notebook 13: how a promise is read, how lengths go together, what may be said.

Each check compares a student's answer with `minichunk.labs.evidence` on cases drawn anew.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

from minichunk.labs import evidence
from minichunk.labs.result import Wrong, exercise


@exercise("keeps-rate")
def keeps_rate(answer: Callable[[list[float], float, str], bool]) -> str:
    """`answer(token_times, limit, start)`: the moving average stays within the limit."""
    rng = random.Random()
    cases = [([1.0], 0.25), ([0.0, 0.3], 0.25), ([0.0, 2.0, 2.01, 2.02, 2.03], 0.25)]
    for _ in range(60):
        times = [0.0]
        for _ in range(rng.randint(2, 40)):
            slow = rng.random() < 0.15
            times.append(times[-1] + rng.uniform(0.0, 0.1) + slow * rng.uniform(0.3, 2.0))
        cases.append((times, 0.25))
    for times, limit in cases:
        for start in ("mean", "first", "zero"):
            expected = evidence.keeps_rate(times, limit, start)
            got = answer(list(times), limit, start)
            if bool(got) != expected:
                shown = ", ".join(f"{b - a:.2f}" for a, b in pairwise(times)) or "none"
                raise Wrong(
                    f"gaps {shown} (s), limit {limit}, start={start!r}: you say {got!r}, "
                    f"the average says {expected}"
                )
    return "three beginnings of one average, and you read each as it is"


@exercise("rank-correlation")
def rank_correlation(answer: Callable[[list[float], list[float]], float]) -> str:
    """`answer(xs, ys)`: Spearman's rank correlation, with ties."""
    rng = random.Random()
    cases: list[tuple[list[float], list[float]]] = [
        ([1, 2, 3, 4], [10, 20, 30, 1000]),
        ([1, 2, 3, 4], [4, 3, 2, 1]),
        ([1, 1, 2, 3], [1, 2, 2, 9]),
    ]
    for _ in range(10):
        xs = [float(round(math.exp(rng.gauss(3, 1)))) for _ in range(30)]
        cases.append((xs, [float(round(x * math.exp(rng.gauss(0, 1)))) for x in xs]))
    for xs, ys in cases:
        got, expected = answer(list(xs), list(ys)), evidence.rank_correlation(xs, ys)
        if not isinstance(got, int | float) or not math.isclose(got, expected, abs_tol=1e-6):
            raise Wrong(f"xs={xs[:8]}, ys={ys[:8]} …: you say {got!r}, it is {expected:.4f}")
    return "ranks, ties and sign as they should be"


@exercise("judge")
def judge(answer: Callable[[list[float], float, float], str]) -> str:
    """`answer(values, low, high)`: what may be said after several readings."""
    rng = random.Random()
    cases = [([2.3, 2.0, 2.8], 1.7, 2.9), ([1.0, 3.5], 1.7, 2.9), ([1.0, 3.2, 2.3], 1.7, 2.9)]
    cases += [([0.9, 1.1, 1.2], 1.7, 2.9), ([2.0, 9.0, 2.1], 1.7, 2.9), ([1.7, 2.9], 1.7, 2.9)]
    cases += [([rng.uniform(1, 3.5) for _ in range(rng.randint(1, 4))], 1.7, 2.9)
              for _ in range(30)]  # fmt: skip
    for values, low, high in cases:
        got, expected = answer(list(values), low, high), evidence.judge(values, low, high)
        if got != expected:
            shown = ", ".join(f"{value:.2f}" for value in values)
            raise Wrong(
                f"readings {shown} of a claim that lies between {low} and {high}: you say {got!r}, "
                f"it {expected}"
            )
    return "you confirm only what every reading confirms"
