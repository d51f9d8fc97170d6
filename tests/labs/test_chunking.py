"""The checks of notebooks 05 and 06 pass their solutions and tell plausible answers apart."""

from __future__ import annotations

import pytest
import torch

import minichunk as mc
from minichunk.labs import check
from tests.labs.wrong_answers import assert_all_wrong


def linear_flops(shape, n):
    return 2.0 * shape.linear_params * n


def attention_flops(shape, pairs):
    return 4.0 * shape.query_size * pairs * shape.num_layers


def test_prefill_flops(solution) -> None:
    assert check.prefill_flops(solution("05_the_stall", "prefill-flops")).passed
    assert_all_wrong(
        check.prefill_flops,
        {
            "no attention": linear_flops,
            "no causal mask": lambda s, n: linear_flops(s, n) + attention_flops(s, n * n),
            "scores only": lambda s, n: linear_flops(s, n) + attention_flops(s, n * n / 2) / 2,
            "one operation per weight": lambda s, n: (
                linear_flops(s, n) / 2 + attention_flops(s, n * (n + 1) / 2)
            ),
        },
    )


def gaps_of(times):
    return [(i, times[i] - times[i - 1]) for i in range(1, len(times))]


def test_find_stalls(solution) -> None:
    assert check.find_stalls(solution("05_the_stall", "find-stalls")).passed
    assert_all_wrong(
        check.find_stalls,
        {
            "slo only": lambda t, floor, factor, slo: [g for g in gaps_of(t) if g[1] > slo],
            "floors only": lambda t, floor, factor, slo: [
                g for g in gaps_of(t) if g[1] > factor * floor
            ],
            "either": lambda t, floor, factor, slo: [
                g for g in gaps_of(t) if g[1] > factor * floor or g[1] > slo
            ],
            "index of the token before": lambda t, floor, factor, slo: [
                (i - 1, gap) for i, gap in gaps_of(t) if gap > max(factor * floor, slo)
            ],
        },
    )


def own_step(end, steps):
    return next(step for step in steps if step.end == end)


def test_split_gap(solution) -> None:
    assert check.split_gap(solution("05_the_stall", "split-gap")).passed

    def all_interference(start, end, steps, floor):
        return floor, end - start - floor, 0.0

    def all_waiting(start, end, steps, floor):
        return floor, 0.0, end - start - floor

    def step_counted_as_floor(start, end, steps, floor):
        duration = own_step(end, steps).duration
        return duration, 0.0, end - start - duration

    def step_after(start, end, steps, floor):
        duration = next(step for step in steps if step.start >= start).duration
        return min(floor, duration), duration - min(floor, duration), end - start - duration

    wrong = [all_interference, all_waiting, step_counted_as_floor, step_after]
    results = assert_all_wrong(check.split_gap, {f.__name__: f for f in wrong})
    assert all(result.picture is not None for result in results)


def test_chunk_bounds(solution) -> None:
    assert check.chunk_bounds(solution("06_chunked_prefill", "chunk-bounds")).passed

    def pieces(prompt, size):
        return [(start, min(start + size, prompt)) for start in range(0, prompt, size)]

    assert_all_wrong(
        check.chunk_bounds,
        {
            "no budget": lambda prompt, chunk, budget, decodes: pieces(prompt, chunk),
            "decodes are free": lambda prompt, chunk, budget, decodes: pieces(
                prompt, min(chunk, budget)
            ),
            "decodes come off the chunk": lambda prompt, chunk, budget, decodes: pieces(
                prompt, max(1, min(chunk, budget) - decodes)
            ),
            "last chunk too long": lambda prompt, chunk, budget, decodes: [
                (start, start + min(chunk, budget - decodes))
                for start in range(0, prompt, min(chunk, budget - decodes))
            ],
        },
    )


def test_chunk_mask(solution) -> None:
    assert check.chunk_mask(solution("06_chunked_prefill", "chunk-mask")).passed
    assert_all_wrong(
        check.chunk_mask,
        {
            "the prefix forgotten": lambda start, n: torch.ones(n, n).tril().bool(),
            "no offset": lambda start, n: torch.ones(n, start + n).tril().bool(),
            "the future seen": lambda start, n: torch.ones(n, start + n).bool(),
            "itself not seen": lambda start, n: torch.ones(n, start + n).tril(start - 1).bool(),
        },
    )


def prompts_first(view):
    for request in view.prefilling:
        yield request, request.num_uncomputed_tokens
    for request in view.decoding:
        yield request, 1


def never_mixes(view):
    granted = 0
    for request in view.decoding:
        granted += yield request, 1
    if not granted:
        for request in view.prefilling:
            yield request, request.num_uncomputed_tokens


def one_prompt_per_step(view):
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        yield request, request.num_uncomputed_tokens
        break


def whole_prompts(view):
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        yield mc.Offer(request, request.num_uncomputed_tokens, whole=True)


def test_decode_first_policy(solution) -> None:
    assert check.decode_first_policy(solution("06_chunked_prefill", "decode-first-policy")).passed
    wrong = [prompts_first, never_mixes, one_prompt_per_step, whole_prompts]
    assert_all_wrong(check.decode_first_policy, {f.__name__: f for f in wrong})


@pytest.mark.parametrize(
    "name",
    ["prefill_flops", "find_stalls", "split_gap", "chunk_bounds", "chunk_mask",
     "decode_first_policy"],
)  # fmt: skip
def test_an_unwritten_answer_is_said_to_be_unwritten(name: str) -> None:
    def stub(*_):
        raise NotImplementedError

    assert getattr(check, name)(stub).status == "not written"
