"""How long prompts and answers are: constant, lognormal by median and P90, or given values.

Token counts of real services are skewed: a few prompts are very long, and those are the ones that
stall everybody else. Papers report a median and a 90th percentile, which fix a lognormal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from statistics import median

# The quantile of the standard normal distribution at 0.9: fixes a lognormal by median and P90.
_Z90 = 1.2815515655446004


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, drawn as whole numbers in [minimum, maximum].

    `Lengths(500)` is constant. `Lengths(1730, p90=5696)` is lognormal with that median and 90th
    percentile, the way papers report their data sets. `Lengths.of([…])` draws from given values.
    """

    median: float
    p90: float | None = None
    minimum: int = 1
    maximum: int | None = None
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("median", "p90", "minimum", "maximum"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (value is not None or name in ("median", "minimum")):
                raise ValueError(
                    f"{name}={value!r} must be a number of tokens, as in Lengths(1730, p90=5696)"
                )
        if self.median < 1:
            raise ValueError(f"median={self.median} tokens must be at least 1")
        if self.p90 is not None and self.p90 < self.median:
            raise ValueError(f"p90={self.p90} must not be below median={self.median}")
        if self.minimum < 1 or (self.maximum is not None and self.maximum < self.minimum):
            raise ValueError(
                f"minimum={self.minimum} and maximum={self.maximum}: need 1 <= minimum <= maximum"
            )

    @classmethod
    def of(cls, values: Iterable[int]) -> Lengths:
        """Draw from these values, each as likely as it is frequent."""
        values = tuple(values)
        if not values:
            raise ValueError("Lengths.of needs at least one value")
        return cls(median(values), minimum=min(values), values=values)

    def draw(self, rng: random.Random) -> int:
        if self.values:
            return rng.choice(self.values)
        length = float(self.median)
        if self.p90 is not None:
            length *= math.exp(rng.gauss(0.0, math.log(self.p90 / self.median) / _Z90))
        return max(self.minimum, min(round(length), self.maximum or round(length)))


LengthsLike = int | Lengths


def as_lengths(value: LengthsLike) -> Lengths:
    return value if isinstance(value, Lengths) else Lengths(value)
