"""No schedule changes a token: not the policy, the chunks, the cache, nor the company."""

from __future__ import annotations

import random

import pytest

from minichunk.core.engine import Engine

from .fake_executor import drain, expected_tokens, greedy, make_engine, random_prompt, tokens_of
from .test_field_cases import POLICIES

BLOCK = 4
LENGTHS = [k * BLOCK + extra for k in (1, 2, 5) for extra in (-1, 0, 1)]
CHUNKS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 7, 100)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_tokens_do_not_depend_on_policy_chunk_size_cache_or_company(
    rng: random.Random, policy: str, prefix_caching: bool
) -> None:
    common = random_prompt(rng, max(LENGTHS))
    for chunk_size in CHUNKS:
        for alone in (True, False):
            engine = make_engine(
                policy=policy,
                chunk_size=chunk_size,
                block_size=BLOCK,
                prefix_caching=prefix_caching,
                max_num_batched_tokens=rng.choice([8, 13, 64]),
                num_blocks=rng.choice([12, 64]),
            )
            prompts, events = {}, []
            for length in LENGTHS:
                prompt = common[: rng.randint(0, length)]
                prompt += random_prompt(rng, length - len(prompt))
                prompts[engine.add_request(prompt, greedy(6))] = prompt
                if alone:
                    events += drain(engine)
            events += drain(engine)
            for rid, prompt in prompts.items():
                assert tokens_of(events, rid) == expected_tokens(prompt, greedy(), 6), (
                    f"{len(prompt)} tokens, chunk_size={chunk_size}, alone={alone}"
                )


def run_once(engine: Engine, seed: int) -> list[object]:
    rng = random.Random(seed)
    common = random_prompt(rng, 12)
    for i in range(15):
        engine.add_request(
            common[: rng.choice([0, 4, 12])] + random_prompt(rng, rng.randint(1, 20)),
            greedy(rng.randint(1, 9)),
            tenant=rng.choice("AB"),
            arrival_time=i * rng.random(),
        )
    drain(engine)
    return list(engine.executor.plans)  # type: ignore[attr-defined]


def test_the_same_run_twice_with_another_between_makes_the_same_plans(seed: int) -> None:
    one = run_once(make_engine(num_blocks=16, order="fair"), seed)
    other = run_once(make_engine(num_blocks=16, policy="static", order="priority"), seed)
    again = run_once(make_engine(num_blocks=16, order="fair"), seed)
    assert one == again
    assert one != other
