"""The checks of notebook 08 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

import math

import pytest

import minichunk as mc
from minichunk.labs import check

NOTEBOOK = "08_mixing"


def test_solutions_pass(solution) -> None:
    for name in ("prefill-steps", "capped-policy", "choose-preset"):
        result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
        assert result.passed, str(result)


def forgets_the_decodes(policy, prompt_tokens, budget, decodes):
    left = {"balanced": budget // 2}.get(policy, budget)
    steps = math.ceil(prompt_tokens / left)
    return 2 * steps - 1 if policy == "alternating" else steps


def counts_a_decode_step_after_the_last_chunk(policy, prompt_tokens, budget, decodes):
    left = {"balanced": budget // 2, "decode-first": budget - decodes}.get(policy, budget)
    steps = math.ceil(prompt_tokens / left)
    return 2 * steps if policy == "alternating" else steps


def lets_decodes_go_first_always(policy, prompt_tokens, budget, decodes):
    left = budget // 2 if policy == "balanced" else budget - decodes
    steps = math.ceil(prompt_tokens / left)
    return 2 * steps - 1 if policy == "alternating" else steps


@pytest.mark.parametrize(
    "wrong",
    [
        forgets_the_decodes,
        counts_a_decode_step_after_the_last_chunk,
        lets_decodes_go_first_always,
    ],
)
def test_prefill_steps_shows_where_a_count_is_wrong(wrong) -> None:
    result = check.prefill_steps(wrong)
    assert result.status == "wrong"
    assert "the engine took" in result.message
    assert result.picture is not None


def caps_each_prompt(view, cap=256):
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        yield request, min(cap, request.num_uncomputed_tokens)


def caps_without_decodes_too(view, cap=256):
    for request in view.decoding:
        yield request, 1
    left = cap
    for request in view.prefilling:
        if left < 1:
            break
        left -= yield request, min(left, request.num_uncomputed_tokens)


def serves_one_prompt_per_step(view, cap=256):
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        yield request, min(cap if view.decoding else view.budget, request.num_uncomputed_tokens)
        break


@pytest.mark.parametrize(
    "wrong", [caps_each_prompt, caps_without_decodes_too, serves_one_prompt_per_step]
)
def test_capped_policy_shows_the_step_that_breaks_the_rule(wrong) -> None:
    result = check.capped_policy(wrong)
    assert result.status == "wrong"
    assert "step" in result.message
    assert result.picture is not None


def always_chat(workload, candidates, ttft, itl):
    return "chat"


def earliest_first_token(workload, candidates, ttft, itl):
    runs = {name: _run(workload, knobs) for name, knobs in candidates.items()}
    return min(runs, key=lambda name: runs[name].metrics().ttft.p50)


def smoothest(workload, candidates, ttft, itl):
    runs = {name: _run(workload, knobs) for name, knobs in candidates.items()}
    return min(runs, key=lambda name: runs[name].metrics().itl.p99)


def _run(workload, knobs):
    return mc.simulate(workload, model="llama-2-7b", gpu="a100-80g-sxm", **knobs)


@pytest.mark.parametrize("wrong", [always_chat, earliest_first_token, smoothest])
def test_choose_preset_shows_the_goodput_that_was_missed(wrong) -> None:
    result = check.choose_preset(wrong)
    assert result.status == "wrong"
    assert "goodput" in result.message


def test_an_unwritten_answer_is_not_called_wrong() -> None:
    def unwritten(*_):
        raise NotImplementedError

    assert check.prefill_steps(unwritten).status == "not written"
