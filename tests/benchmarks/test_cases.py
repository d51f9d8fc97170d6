"""The workloads: what they are, that they survive the way to another process, who arrives when."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.side_by_side.driving import Arrivals, Due, drive
from benchmarks.side_by_side.workloads import (
    AFTER_TOKENS,
    STALL_BUDGETS,
    WARM_UP_OUTPUT_TOKENS,
    Case,
    all_cases,
    cases,
)
from minichunk.core.clock import WallClock
from minichunk.core.request import RequestSpec


def lengths(case: Case) -> set[tuple[int, int]]:
    return {(len(spec.prompt), spec.output_tokens) for spec in case.requests}


def test_the_workloads_are_the_published_ones(rng: random.Random) -> None:
    vocab, seed = rng.randrange(100, 50_000), rng.randrange(2**31)
    known = {case.name: case for case in all_cases(vocab, seed)}
    assert lengths(known["W1"]) == {(32, 64)}
    assert lengths(known["W2"]) == {(256, 64)}
    assert lengths(known["W3"]) == {(2048, 1)}
    assert [known[name].num_requests for name in ("W1", "W2", "W3")] == [10, 32, 1]
    for budget in STALL_BUDGETS:
        case = known[f"W4-{budget}"]
        assert (case.budget, case.num_requests) == (budget, 11)
        assert case.late is not None
        assert len(case.late.prompt) == 3000
        steps = -(-3000 // (budget - 10))  # everybody decodes until the long prompt is through
        assert all(spec.output_tokens > AFTER_TOKENS + steps for spec in case.requests)
    arrivals = [spec.arrival for spec in known["W5"].requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    for case in known.values():
        for spec in case.requests:
            assert all(0 <= token < vocab for token in spec.prompt)  # type: ignore[union-attr]


def test_prompts_depend_on_the_seed_alone_and_differ_from_each_other(rng: random.Random) -> None:
    seed = rng.randrange(2**31)
    assert all_cases(1000, seed) == all_cases(1000, seed)
    assert all_cases(1000, seed) != all_cases(1000, seed + 1)
    prompts = [spec.prompt for case in all_cases(1000, seed) for spec in case.requests]
    assert len(set(map(tuple, prompts))) == len(prompts)  # type: ignore[arg-type]


def test_a_case_survives_the_way_to_another_process(rng: random.Random) -> None:
    for case in all_cases(500, rng.randrange(2**31)):
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_cases_are_chosen_by_workload_or_by_name() -> None:
    assert [case.name for case in cases(["W4"], 100)] == [f"W4-{b}" for b in STALL_BUDGETS]
    assert [case.name for case in cases(["W3", "W4-512", "W3"], 100)] == ["W3", "W4-512"]
    with pytest.raises(ValueError, match=r"unknown workload 'W9'; known: W1, W2, .*W5"):
        cases(["W1", "W9"], 100)


def test_the_warm_up_has_the_same_prompts_at_once_and_short_answers() -> None:
    for case in all_cases(500):
        short = case.shortened()
        assert [s.prompt for s in short.requests] == [s.prompt for s in case.requests]
        assert {s.arrival for s in short.requests} == {0.0}
        assert max(s.output_tokens for s in short.requests) <= WARM_UP_OUTPUT_TOKENS
        assert (short.late is None) == (case.late is None)


def test_a_late_request_that_could_never_come_is_refused() -> None:
    spec = RequestSpec(0.0, (1, 2), AFTER_TOKENS)
    with pytest.raises(ValueError, match="one of them has only 8"):
        Case("X", "", 10, (spec,), spec)


def test_the_late_one_comes_when_everybody_has_enough_tokens(scene: Case) -> None:
    counts = {str(i): AFTER_TOKENS for i in range(len(scene.requests))}
    arrivals = Arrivals(scene)
    assert len(arrivals.due(0.0, counts.__getitem__)) == 3
    counts["1"] = AFTER_TOKENS - 1
    assert arrivals.due(5.0, counts.__getitem__) == []
    assert arrivals.pending
    counts["1"] += 1
    assert arrivals.due(7.0, counts.__getitem__) == [Due("3", scene.late, 7.0)]  # type: ignore[arg-type]
    assert not arrivals.pending


class OneAtATime:
    """An engine that serves whoever came first, a token a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.came: list[Due] = []

    def add(self, due: Due) -> None:
        self.came.append(due)
        self.left[due.request_id] = due.spec.output_tokens

    def step(self) -> None:
        name = next(iter(self.left))
        self.done[name] = self.done.get(name, 0) + 1
        self.left[name] -= 1
        if not self.left[name]:
            del self.left[name]

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def num_output_tokens(self, request_id: str) -> int:
        return self.done.get(request_id, 0)


def test_driving_serves_everybody_and_sleeps_until_the_next_arrival() -> None:
    specs = tuple(RequestSpec(at, (1, 2, 3), 9) for at in (0.0, 0.02, 0.15))
    engine, clock = OneAtATime(), WallClock()
    drive(Case("T", "", 8, specs, RequestSpec(0.0, (4,), 2)), engine, clock)
    assert clock.now() >= 0.15
    assert engine.done == {"0": 9, "1": 9, "2": 9, "3": 2}
    assert [due.arrival for due in engine.came[:3]] == [0.0, 0.02, 0.15]
    assert engine.came[3].arrival >= 0.15
