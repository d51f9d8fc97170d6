"""The checks of notebook 09 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

import pytest

from minichunk.labs import check

NOTEBOOK = "09_split_fuse"


def test_solutions_pass(solution) -> None:
    for name in ("fuse-step", "context-per-token", "feedback-policy"):
        result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
        assert result.passed, str(result)


def counts_tokens_only(target, contexts, prompts, context_per_token):
    return _fill(target - len(contexts), prompts)


def cuts_the_first_prompt_only(target, contexts, prompts, context_per_token):
    left = target - sum(1 + context / context_per_token for context in contexts)
    return [max(0, min(prompts[0], int(left)))] + [0] * (len(prompts) - 1)


def always_gives_one_token(target, contexts, prompts, context_per_token):
    left = target - sum(1 + context / context_per_token for context in contexts)
    return _fill(max(1.0, left), prompts)


def _fill(left, prompts):
    chunks = []
    for prompt in prompts:
        chunk = max(0, min(prompt, int(left)))
        left -= chunk
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize(
    "wrong", [counts_tokens_only, cuts_the_first_prompt_only, always_gives_one_token]
)
def test_fuse_step_shows_what_the_policy_grants(wrong) -> None:
    result = check.fuse_step(wrong)
    assert result.status == "wrong"
    assert "the policy grants" in result.message


def upside_down(shape, gpu):
    return shape.kv_bytes_per_token / gpu.peak_bandwidth * gpu.peak_flops / shape.linear_params / 2


def one_operation_per_parameter(shape, gpu):
    return shape.linear_params / gpu.peak_flops * gpu.peak_bandwidth / shape.kv_bytes_per_token


def all_layers_against_one(shape, gpu):
    return 2 * one_operation_per_parameter(shape, gpu) * shape.num_layers


@pytest.mark.parametrize(
    "wrong", [upside_down, one_operation_per_parameter, all_layers_against_one]
)
def test_context_per_token_shows_both_times(wrong) -> None:
    result = check.context_per_token(wrong)
    assert result.status == "wrong"
    assert "µs" in result.message


def the_usual_budget(view, limit=0.06):
    yield from _fill_step(view, 512)


def aims_at_sixty_milliseconds(view, limit=0.06):
    state = view.state
    target = state.setdefault("target", 64.0)
    if view.last_plan is not None:
        target *= min(1.1, max(0.5, 0.06 / (view.now - state["start"])))
    target = min(max(16.0, target), view.max_num_batched_tokens)
    state.update(target=target, start=view.now)
    yield from _fill_step(view, int(target))


def only_grows(view, limit=0.06):
    state = view.state
    target = state.setdefault("target", 64)
    if view.last_plan is not None and view.now - state["start"] < limit:
        target = min(view.max_num_batched_tokens, target * 2)
    state.update(target=target, start=view.now)
    yield from _fill_step(view, target)


def _fill_step(view, target):
    for request in view.decoding:
        target -= yield request, 1
    for request in view.prefilling:
        if target < 1 and view.num_scheduled_tokens:
            break
        target -= yield request, max(1, min(target, request.num_uncomputed_tokens))


@pytest.mark.parametrize("wrong", [the_usual_budget, aims_at_sixty_milliseconds, only_grows])
def test_feedback_policy_shows_steps_that_miss_the_limit(wrong) -> None:
    result = check.feedback_policy(wrong)
    assert result.status == "wrong"
    assert "limit" in result.message
    assert result.picture is not None
