"""The checks of notebook 12 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, stdev

import pytest

import minichunk as mc
from minichunk.labs import check, design
from tests.labs.wrong_answers import assert_all_wrong

NOTEBOOK = "12_design"


@pytest.mark.parametrize("name", ["kept-promise", "my-policy", "my-order", "better-design"])
def test_solutions_pass(solution, name) -> None:
    result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
    assert result.passed, str(result)


def _gaps(record):
    times = record.token_times
    return [later - earlier for earlier, later in pairwise(times)]


def _first(record, limit):
    return bool(record.token_times) and record.token_times[0] - record.arrival <= limit


def test_kept_promise_shows_the_request_that_was_misjudged() -> None:
    def never_mind_the_finish(record, ttft, itl):
        longest = max(_gaps(record), default=0.0)
        return _first(record, ttft) and (itl is None or longest <= itl)

    def mean_gap(record, ttft, itl):
        gaps = _gaps(record)
        mean = fmean(gaps) if gaps else 0.0
        done = record.finish_reason in ("stop", "length")
        return done and _first(record, ttft) and (itl is None or mean <= itl)

    def first_token_only(record, ttft, itl):
        return record.finish_reason in ("stop", "length") and _first(record, ttft)

    assert_all_wrong(
        check.kept_promise,
        {
            "cancelled ones count": never_mind_the_finish,
            "the mean hides a gap": mean_gap,
            "gaps do not matter": first_token_only,
        },
    )


def test_my_policy_shows_the_run_that_gained_least() -> None:
    def prompts_first(view):
        for request in view.prefilling:
            yield request, request.num_uncomputed_tokens
        for request in view.decoding:
            yield request, 1

    def decodes_first_whole_budget(view):
        for request in view.decoding:
            yield request, 1
        for request in view.prefilling:
            yield request, request.num_uncomputed_tokens

    def starves_prompts(view):
        decodes = 0
        for request in view.decoding:
            decodes += yield request, 1
        if not decodes:
            for request in view.prefilling:
                yield request, request.num_uncomputed_tokens

    results = assert_all_wrong(
        check.my_policy,
        {
            "prompts first": prompts_first,
            "no cap": decodes_first_whole_budget,
            "prompts only when nobody decodes": starves_prompts,
        },
    )
    assert all(result.picture is not None for result in results)


def test_my_order_shows_what_it_kept() -> None:
    class ArrivalAgain(mc.Order):
        def key(self, request):
            return (request.arrival_time,)

    class LongPromptsFirst(mc.Order):
        def key(self, request):
            return (-request.num_prompt_tokens,)

    class LeastSlack(mc.Order):
        def key(self, request):
            return (request.arrival_time + 2.0 - request.num_prompt_tokens / 4000,)

    assert_all_wrong(
        check.my_order,
        {
            "fcfs again": ArrivalAgain,
            "long prompts first": LongPromptsFirst,
            "least slack": LeastSlack,
        },
    )


def test_better_design_shows_the_differences() -> None:
    def larger_mean(a, b):
        return "b" if fmean(b) > fmean(a) else "a"

    def unpaired(a, b):
        error = math.sqrt((stdev(a) ** 2 + stdev(b) ** 2) / len(a))
        difference = fmean(b) - fmean(a)
        if abs(difference) <= 2 * error:
            return "cannot tell"
        return "b" if difference > 0 else "a"

    def deviation_for_error(a, b):
        differences = [y - x for x, y in zip(a, b, strict=True)]
        if abs(fmean(differences)) <= 2 * stdev(differences):
            return "cannot tell"
        return "b" if fmean(differences) > 0 else "a"

    assert_all_wrong(
        check.better_design,
        {
            "no error": larger_mean,
            "unpaired": unpaired,
            "deviation, not error": deviation_for_error,
        },
    )


def test_a_seed_names_a_score_and_another_seed_another_workload() -> None:
    service = design.SERVICES[0]
    first, second = design.draw_seeds(2)
    again = [list(service.workload(first, 20)) for _ in range(2)]
    assert again[0] == again[1], f"seed {first}"
    assert again[0] != list(service.workload(second, 20)), f"seeds {first}, {second}"


def test_the_board_ranks_by_score_whatever_the_order_of_entry(monkeypatch) -> None:
    monkeypatch.setenv("MINICHUNK_FAST", "1")
    seeds = design.draw_seeds(1)
    designs = {"bad": {"policy": "continuous"}, "good": {"policy": "split-fuse(target=512)"}}
    backwards = dict(reversed(designs.items()))
    for entries in (designs, backwards):
        rows = list(design.leaderboard(entries, seeds))
        assert [row["design"] for row in rows] == ["good", "bad"], f"seeds {seeds}"
        assert [row["rank"] for row in rows] == [1, 2]
