"""The checks of notebook 10 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

import pytest

from minichunk.labs import check

NOTEBOOK = "10_orders"


def test_solutions_pass(solution) -> None:
    for name in ("aged-key", "length-predictor", "serve-until-they-leave"):
        result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
        assert result.passed, str(result)


def priority_then_arrival(priority, arrival, ageing_seconds):
    return (priority, arrival)


def ages_backwards(priority, arrival, ageing_seconds):
    return (priority - arrival / ageing_seconds, arrival)


def adds_seconds_to_levels(priority, arrival, ageing_seconds):
    return (priority * 60 + arrival, arrival)


@pytest.mark.parametrize("wrong", [priority_then_arrival, ages_backwards, adds_seconds_to_levels])
def test_aged_key_shows_two_requests_in_the_wrong_order(wrong) -> None:
    result = check.aged_key(wrong)
    assert result.status == "wrong"
    assert "ageing_seconds" in result.message


class AlwaysTheSame:
    def predict(self, request):
        return 200

    def learn(self, request):
        pass


class TrustsTheLimit(AlwaysTheSame):
    def predict(self, request):
        return request.params.max_tokens


class OneRatioForAll(AlwaysTheSame):
    """Learns the ratio of answer to prompt, over all tenants."""

    def __init__(self):
        self.prompts = self.outputs = 1

    def predict(self, request):
        return request.num_prompt_tokens * self.outputs / self.prompts

    def learn(self, request):
        self.prompts += request.num_prompt_tokens
        self.outputs += len(request.output_token_ids)


@pytest.mark.parametrize("wrong", [AlwaysTheSame, TrustsTheLimit, OneRatioForAll])
def test_length_predictor_shows_how_far_off_it_is(wrong) -> None:
    result = check.length_predictor(wrong)
    assert result.status == "wrong"
    assert "off by" in result.message


def never_looks(engine, leaves_at):
    while engine.has_unfinished_requests():
        engine.step()


def notices_at_the_next_token(engine, leaves_at):
    while engine.has_unfinished_requests():
        for event in engine.step():
            if event.time >= leaves_at.get(event.request_id, float("inf")):
                engine.cancel(event.request_id)


def cancels_everybody_who_will_leave(engine, leaves_at):
    while engine.has_unfinished_requests():
        engine.step()
        for request_id in leaves_at:
            engine.cancel(request_id)


@pytest.mark.parametrize(
    "wrong", [never_looks, notices_at_the_next_token, cancels_everybody_who_will_leave]
)
def test_serve_until_they_leave_shows_the_zombie(wrong) -> None:
    result = check.serve_until_they_leave(wrong)
    assert result.status == "wrong"
    assert "client" in result.message
    assert result.picture is not None
