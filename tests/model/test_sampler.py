"""Top-k, top-p and min-p keep exactly the tokens that their definitions name."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minichunk.core.plan import ScheduledChunk
from minichunk.core.request import SamplingParams
from minichunk.model.sampler import as_int64, filter_logits, sample

VOCAB_SIZE = 50


def chunk(params: SamplingParams, stop: int = 10, name: str = "r") -> ScheduledChunk:
    return ScheduledChunk(name, stop - 1, 1, (0,), (0,), params, True, stop)


def kept_by_definition(logits: list[float], params: SamplingParams) -> set[int]:
    """Written as the definitions read, token by token in float64."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        order = order[: params.top_k]
    total = math.fsum(math.exp(scaled[token]) for token in order)
    probability = {token: math.exp(scaled[token]) / total for token in order}
    kept, reached = set(), 0.0
    for token in order:
        if params.top_p < 1 and reached >= params.top_p:
            break
        reached += probability[token]
        if not kept or probability[token] >= params.min_p * probability[order[0]]:
            kept.add(token)
    return kept


def test_filters_keep_what_their_definitions_say(rng: random.Random) -> None:
    params = [
        SamplingParams(
            temperature=rng.choice([0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 1, 5, VOCAB_SIZE, 1000]),
            top_p=rng.choice([1.0, 0.9, 0.5, 1e-6]),
            min_p=rng.choice([0.0, 0.1, 1.0]),
        )
        for _ in range(200)
    ]
    logits = torch.tensor([[rng.gauss(0, 2) for _ in range(VOCAB_SIZE)] for _ in params])
    filtered = filter_logits(logits, params)
    for row, before, param in zip(filtered, logits, params, strict=True):
        kept = set(row.isfinite().nonzero().flatten().tolist())
        assert kept == kept_by_definition(before.tolist(), param), param
        assert torch.equal(row[list(kept)], before[list(kept)])


def test_greedy_rows_are_greedy_among_random_ones(rng: random.Random) -> None:
    logits = torch.randn(
        6, VOCAB_SIZE, generator=torch.Generator().manual_seed(rng.randrange(2**32))
    )
    greedy = SamplingParams(temperature=0.0, top_k=3, seed=1)
    hot = SamplingParams(temperature=5.0, seed=2)
    chunks = [chunk(greedy if row % 2 else hot) for row in range(6)]
    tokens = sample(logits, chunks)
    assert tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_close_to_0_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.linspace(-20, 20, VOCAB_SIZE).roll(3)[None]
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    assert sample(logits, [chunk(params)]).item() == logits.argmax().item()


def test_a_draw_depends_on_seed_and_position_and_nothing_else(rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    row = torch.randn(VOCAB_SIZE, generator=generator)
    params = SamplingParams(temperature=2.0, seed=rng.randrange(2**64))
    [alone] = sample(row[None], [chunk(params, stop=7)]).tolist()
    others = torch.randn(9, VOCAB_SIZE, generator=generator)
    mates = [chunk(SamplingParams(temperature=1.0, seed=i), stop=i + 1) for i in range(9)]
    at = rng.randrange(10)
    logits = torch.cat((others[:at], row[None], others[at:]))
    assert sample(logits, [*mates[:at], chunk(params, stop=7), *mates[at:]])[at].item() == alone
    draws = {sample(row[None], [chunk(params, stop=stop)]).item() for stop in range(1, 60)}
    assert len(draws) > 5


def test_tokens_are_drawn_as_often_as_they_are_likely(rng: random.Random) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 5.0])
    params = SamplingParams(temperature=1.5, top_k=4, seed=rng.randrange(2**40))
    count = 20000
    chunks = [chunk(params, stop=position) for position in range(1, count + 1)]
    tokens = sample(logits.expand(count, -1), chunks)
    expected = (logits[[0, 1, 2, 4]] / 1.5).softmax(-1)
    observed = torch.bincount(tokens, minlength=5)[[0, 1, 2, 4]] / count
    assert torch.bincount(tokens, minlength=5)[3] == 0
    assert ((observed - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_any_whole_number_is_a_seed() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1, -(2**63), 2**200):
        assert -(2**63) <= as_int64(seed) < 2**63
    assert as_int64(2**63) != as_int64(0)
