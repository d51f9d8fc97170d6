"""Predictors of a request's output length, for the order `shortest`.

Nobody knows how long an answer will be. These guess from what a real engine can see (the prompt's
length, the tenant's past), or cheat, exactly or noisily, to show what a better guess would buy.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar

from minichunk.core.request import Request


class Predictor:
    """Guesses `max_tokens`: what one knows of a request without any model of it."""

    name: ClassVar[str] = "max-tokens"

    def predict(self, request: Request) -> float:
        return float(request.params.max_tokens)

    def learn(self, request: Request) -> None:
        """Called once for each request that ended."""


class Oracle(Predictor):
    """The true length, where the workload says it (`max_tokens` with `ignore_eos`)."""

    name = "oracle"


class NoisyOracle(Predictor):
    """The true length times a log-normal factor of the given `sigma`, reproducible by request."""

    name = "noisy-oracle"

    def __init__(self, sigma: float = 0.5, seed: int = 0) -> None:
        self.sigma = sigma
        self.seed = seed

    def predict(self, request: Request) -> float:
        noise = random.Random(f"{self.seed}:{request.request_id}").gauss(0.0, self.sigma)
        return float(request.params.max_tokens) * math.exp(noise)


class FromPromptLength(Predictor):
    """Long prompts get long answers: `slope` output tokens per prompt token. Often wrong."""

    name = "prompt-length"

    def __init__(self, slope: float = 0.5) -> None:
        self.slope = slope

    def predict(self, request: Request) -> float:
        return self.slope * request.num_prompt_tokens


class TenantMean(Predictor):
    """The running mean of the tenant's finished answers; `start` before there is one."""

    name = "tenant-mean"

    def __init__(self, start: float = 128.0) -> None:
        self.start = start
        self._seen: dict[str, tuple[int, int]] = {}

    def predict(self, request: Request) -> float:
        count, total = self._seen.get(request.tenant, (0, 0))
        return total / count if count else self.start

    def learn(self, request: Request) -> None:
        count, total = self._seen.get(request.tenant, (0, 0))
        self._seen[request.tenant] = (count + 1, total + len(request.output_token_ids))


PREDICTORS: dict[str, type[Predictor]] = {
    predictor.name: predictor
    for predictor in (Predictor, Oracle, NoisyOracle, FromPromptLength, TenantMean)
}


def resolve_predictor(choice: str | Predictor) -> Predictor:
    if isinstance(choice, Predictor):
        return choice
    if choice not in PREDICTORS:
        raise ValueError(f"unknown predictor {choice!r}; known: {', '.join(sorted(PREDICTORS))}")
    return PREDICTORS[choice]()
