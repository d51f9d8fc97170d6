"""The checks of notebook 13 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

from itertools import pairwise
from statistics import correlation, fmean

import pytest

from minichunk.labs import check, evidence
from tests.labs.wrong_answers import assert_all_wrong

NOTEBOOK = "13_on_trial"


@pytest.mark.parametrize("name", ["keeps-rate", "judge", "rank-correlation"])
def test_solutions_pass(solution, name) -> None:
    result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
    assert result.passed, str(result)


def test_keeps_rate_shows_the_gaps() -> None:
    def mean_only(times, limit, start):
        gaps = [b - a for a, b in pairwise(times)]
        return not gaps or fmean(gaps) <= limit

    def one_beginning(times, limit, start):
        return evidence.keeps_rate(times, limit, "zero")

    def looks_at_the_end(times, limit, start):
        gaps = [b - a for a, b in pairwise(times)]
        if not gaps:
            return True
        average = {"mean": fmean(gaps), "first": gaps[0], "zero": 0.0}[start]
        for gap in gaps:
            average += 2 / 17 * (gap - average)
        return average <= limit

    def every_gap(times, limit, start):
        return all(b - a <= limit for a, b in pairwise(times))

    assert_all_wrong(
        check.keeps_rate,
        {
            "the mean": mean_only,
            "always from zero": one_beginning,
            "the last average only": looks_at_the_end,
            "no average": every_gap,
        },
    )


def test_rank_correlation_shows_the_values() -> None:
    def without_ties(xs, ys):
        def ranks(values):
            order = sorted(range(len(values)), key=values.__getitem__)
            return [order.index(place) for place in range(len(values))]

        return correlation(ranks(xs), ranks(ys))

    assert_all_wrong(
        check.rank_correlation,
        {
            "of the values": lambda xs, ys: correlation(xs, ys),
            "ties by place": without_ties,
            "ranks downwards for one": lambda xs, ys: -evidence.rank_correlation(xs, ys),
        },
    )


def test_judge_shows_the_readings() -> None:
    assert_all_wrong(
        check.judge,
        {
            "by the mean": lambda v, low, high: (
                "holds" if low <= fmean(v) <= high else "does not hold"
            ),
            "one is enough": lambda v, low, high: (
                "holds" if any(low <= x <= high for x in v) else "does not hold"
            ),
            "the first": lambda v, low, high: "holds" if low <= v[0] <= high else "does not hold",
        },
    )


def test_lengths_are_read_from_the_files_that_the_variable_names(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("MINICHUNK_TRACES", raising=False)
    assert evidence.real_lengths() == {}
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,374,44"]
    (tmp_path / "hour.csv").write_text("\n".join([*rows, "2023-11-16 18:15:50.99,396,109"]))
    monkeypatch.setenv("MINICHUNK_TRACES", str(tmp_path))
    assert evidence.real_lengths() == {"hour": [(374, 44), (396, 109)]}


def test_chunks_of_a_prompt_do_its_whole_attention() -> None:
    whole = evidence.prefill(1000)
    for chunk in (1, 64, 300, 1000):
        steps = evidence.in_chunks(1000, chunk)
        assert sum(step.prefill_pairs for step in steps) == whole.prefill_pairs
        assert sum(step.num_sampled for step in steps) == 1
