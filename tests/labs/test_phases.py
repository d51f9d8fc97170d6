"""The checks of notebook 01 pass their solutions and tell plausible wrong answers apart."""

from __future__ import annotations

import math

import pytest

from minichunk.labs import check
from tests.labs.wrong_answers import assert_all_wrong


def durations(steps, condition):
    return sum(step.duration for step in steps if condition(step))


def test_time_by_phase(solution) -> None:
    assert check.time_by_phase(solution("01_two_phases", "time-by-phase")).passed
    results = assert_all_wrong(
        check.time_by_phase,
        {
            "mixed steps are decodes": lambda steps: (
                durations(steps, lambda s: not s.decode_tokens),
                durations(steps, lambda s: s.decode_tokens),
            ),
            "mixed steps counted twice": lambda steps: (
                durations(steps, lambda s: s.prefill_tokens),
                durations(steps, lambda s: s.decode_tokens),
            ),
            "only the first step": lambda steps: (
                steps[0].duration,
                durations(steps[1:], lambda s: True),
            ),
            "the other way round": lambda steps: (
                durations(steps, lambda s: not s.prefill_tokens),
                durations(steps, lambda s: s.prefill_tokens),
            ),
        },
    )
    assert all(result.picture is not None for result in results)


def intensity(shape, batch, context, weights=2, kv=1, products=2, attention=4):
    tokens = batch * context
    flops = products * shape.linear_params * batch
    flops += attention * shape.query_size * shape.num_layers * tokens
    return flops / (weights * shape.linear_params + kv * shape.kv_bytes_per_token * tokens)


def test_decode_intensity(solution) -> None:
    assert check.decode_intensity(solution("01_two_phases", "decode-intensity")).passed
    assert_all_wrong(
        check.decode_intensity,
        {
            "no keys and values": lambda s, b, c: intensity(s, b, c, kv=0),
            "keys and values shared": lambda s, b, c: (
                intensity(s, b, c)
                * (2 * s.linear_params + s.kv_bytes_per_token * b * c)
                / (2 * s.linear_params + s.kv_bytes_per_token * c)
            ),
            "weights read per request": lambda s, b, c: intensity(s, b, c, weights=2 * b),
            "weights of one byte": lambda s, b, c: intensity(s, b, c, weights=1),
            "no attention": lambda s, b, c: intensity(s, b, c, attention=0),
        },
    )


def test_tokens_to_ridge(solution) -> None:
    assert check.tokens_to_ridge(solution("01_two_phases", "tokens-to-ridge")).passed
    assert_all_wrong(
        check.tokens_to_ridge,
        {
            "the ridge itself": lambda gpu, size: math.ceil(gpu.ridge),
            "one operation per weight": lambda gpu, size: math.ceil(gpu.ridge * size),
            "narrow weights cost more": lambda gpu, size: math.ceil(gpu.ridge * 2 / size),
            "rounded down": lambda gpu, size: int(gpu.ridge * size / 2),
            "not a whole number": lambda gpu, size: gpu.ridge * size / 2,
        },
    )


@pytest.mark.parametrize("name", ["time_by_phase", "decode_intensity", "tokens_to_ridge"])
def test_an_unwritten_answer_is_said_to_be_unwritten(name: str) -> None:
    def stub(*_):
        raise NotImplementedError

    assert getattr(check, name)(stub).status == "not written"
