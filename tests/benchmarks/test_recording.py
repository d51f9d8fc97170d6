"""Recording: whatever a scheduler does becomes a trace that agrees with itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.side_by_side.recording import Recording
from minichunk.core.request import RequestSpec
from minichunk.core.trace import Trace


def random_run(rng: random.Random, num_requests: int, budget: int) -> tuple[Trace, list[str]]:
    """Serve requests in random portions; returns the trace and a plain account of the spans."""
    recording = Recording(budget, {"name": "test"})
    account: list[str] = []
    specs = {
        str(i): RequestSpec(0.0, tuple(range(rng.randrange(1, 40))), rng.randrange(1, 12))
        for i in range(num_requests)
    }
    waiting, now = list(specs), 0.0
    position, outputs = dict.fromkeys(specs, 0), dict.fromkeys(specs, 0)
    while waiting or recording.num_unfinished:
        if waiting and (not recording.num_unfinished or rng.random() < 0.3):
            name = waiting.pop(0)
            recording.arrive(name, specs[name], now)
        left, chunks, tokens = budget, [], {}
        for name in recording.trace.requests:
            prompt, most = len(specs[name].prompt), specs[name].output_tokens
            if outputs[name] == most or not left or rng.random() < 0.2:
                continue
            missing = prompt + outputs[name] - position[name]
            count = rng.randrange(1, min(missing, left) + 1)
            chunks.append((name, count))
            kind = "prefill" if position[name] < prompt else "decode"
            account += [f"{name} {kind}"] * count
            position[name] += count
            left -= count
            if count == missing:
                tokens[name] = rng.randrange(1000)
                outputs[name] += 1
        if chunks:
            recording.step(now, now + 0.5, chunks, tokens)
        now += 1.0
    return recording.trace, account


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 30))
def test_any_schedule_becomes_a_valid_trace(seed: int, num_requests: int, budget: int) -> None:
    trace, account = random_run(random.Random(seed), num_requests, budget)
    trace.validate()
    recorded = [f"{s.request_id} {s.kind}" for s in trace.spans for _ in range(s.tokens)]
    assert sorted(recorded) == sorted(account)
    assert sum(s.prefill_tokens + s.decode_tokens for s in trace.steps) == len(account)
    metrics = trace.metrics()
    assert metrics.num_finished == num_requests
    for record in trace.requests.values():
        assert record.finish_reason == "length"
        assert len(record.token_times) == record.max_tokens == len(record.output_token_ids or ())
        assert record.finish_time == record.token_times[-1]
        assert all(time % 1 == 0.5 for time in record.token_times)  # a token comes at a step's end


@pytest.fixture
def recording() -> Recording:
    made = Recording(8, {})
    made.arrive("a", RequestSpec(0.0, (1, 2, 3, 4), 3), 0.0)
    return made


def test_prefill_and_decode_follow_from_positions(recording: Recording) -> None:
    recording.step(0.0, 1.0, [("a", 3)], {})
    recording.step(1.0, 2.0, [("a", 1)], {"a": 7})  # one token of a prompt is no decode
    recording.step(2.0, 3.0, [("a", 1)], {"a": 8})
    recording.step(3.0, 4.0, [("a", 1)], {"a": 9})
    spans = [(s.kind, s.first_position, s.tokens) for s in recording.trace.spans]
    assert spans == [("prefill", 0, 3), ("prefill", 3, 1), ("decode", 4, 2)]
    assert recording.trace.requests["a"].output_token_ids == [7, 8, 9]
    assert recording.num_unfinished == 0


def test_an_engine_that_begins_a_request_anew_is_caught(recording: Recording) -> None:
    recording.step(0.0, 1.0, [("a", 4)], {"a": 7})
    with pytest.raises(ValueError, match="computes 5 tokens from position 4, but it has 5"):
        recording.step(1.0, 2.0, [("a", 5)], {"a": 8})


def test_a_token_out_of_nowhere_is_caught(recording: Recording) -> None:
    with pytest.raises(ValueError, match="2 of its 4 tokens computed"):
        recording.step(0.0, 1.0, [("a", 2)], {"a": 7})
    with pytest.raises(ValueError, match="a token but no chunk in step 0"):
        recording.step(1.0, 2.0, [], {"a": 7})


def test_a_static_batch_may_take_more_than_a_budget(recording: Recording) -> None:
    recording.step(0.0, 1.0, [("a", 4)], {"a": 7}, budget=4)
    recording.trace.validate()
    assert recording.trace.steps[0].budget == 4
