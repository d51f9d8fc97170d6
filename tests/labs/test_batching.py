"""The checks of notebook 04 pass its solutions and show what is wrong with plausible answers."""

from __future__ import annotations

import pytest

import minichunk as mc
from minichunk.labs import check
from tests.labs.wrong_answers import assert_all_wrong


def test_static_steps(solution) -> None:
    assert check.static_steps(solution("04_batching", "static-steps")).passed
    assert_all_wrong(
        check.static_steps,
        {
            "as if no slot were ever idle": lambda lengths, slots: -(-sum(lengths) // slots),
            "the prompt step counted twice": lambda lengths, slots: sum(
                1 + max(lengths[i : i + slots]) for i in range(0, len(lengths), slots)
            ),
            "sorted first": lambda lengths, slots: sum(
                max(sorted(lengths)[i : i + slots]) for i in range(0, len(lengths), slots)
            ),
        },
    )


def test_idle_share(solution) -> None:
    assert check.idle_share(solution("04_batching", "idle-share")).passed
    assert_all_wrong(
        check.idle_share,
        {
            "prefill does not count as work": lambda trace, slots: (
                1 - sum(step.num_decodes for step in trace.steps) / (slots * len(trace.steps))
            ),
            "tokens instead of steps": lambda trace, slots: (
                1 - sum(span.tokens for span in trace.spans) / (slots * len(trace.steps))
            ),
            "the busy share": lambda trace, slots: (
                sum(s.last_step - s.first_step + 1 for s in trace.spans)
                / (slots * len(trace.steps))
            ),
        },
    )


def mixes(view):
    for request in view.prefilling:
        yield mc.Offer(request, request.num_uncomputed_tokens, whole=True)
    for request in view.decoding:
        yield request, 1


def cuts_prompts(view):
    granted = 0
    for request in view.prefilling:
        granted += yield request, request.num_uncomputed_tokens
    if not granted:
        for request in view.decoding:
            yield request, 1


def decodes_first(view):
    granted = 0
    for request in view.decoding:
        granted += yield request, 1
    if not granted:
        for request in view.prefilling:
            yield mc.Offer(request, request.num_uncomputed_tokens, whole=True)


def test_continuous_policy(solution) -> None:
    assert check.continuous_policy(solution("04_batching", "continuous-policy")).passed
    results = assert_all_wrong(
        check.continuous_policy,
        {
            "prefill and decode in one step": mixes,
            "prompts cut into chunks": cuts_prompts,
            "decodes first": decodes_first,
        },
    )
    assert all("first differ in step" in result.message for result in results)
    assert all(result.picture is not None for result in results)


def test_a_policy_that_breaks_a_rule_is_told_which() -> None:
    def twice(view):
        for request in [*view.unfinished, *view.decoding]:
            yield request, 1
            yield request, 1
        for request in view.prefilling:
            yield request, 1

    result = check.continuous_policy(twice)
    assert result.status == "wrong"
    assert "twice in one step" in result.message


@pytest.mark.parametrize("name", ["static_steps", "idle_share", "continuous_policy"])
def test_an_unwritten_answer_is_said_to_be_unwritten(name: str) -> None:
    def stub(*_):
        raise NotImplementedError

    assert getattr(check, name)(stub).status == "not written"
