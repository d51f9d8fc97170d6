"""Gaps, stalls and their causes against traces whose figures can be computed by hand."""

from __future__ import annotations

import random

import pytest

from minichunk.core.stalls import DecodeFloors, Gap, Stall, gaps
from minichunk.core.trace import LifecycleEvent, Skip, Trace

from .fake_executor import drain, greedy, make_engine, random_prompt
from .traces import chunk, decodes, request, step, trace_of


def stalled_by_a_document() -> Trace:
    """A chat decodes every 20 ms until two chunks of a document, 300 and 100 ms, come between."""
    return trace_of(
        steps=[
            step(0.00, 0.02, prefill=10),
            step(0.02, 0.04, decodes=1),
            step(0.04, 0.34, prefill=600),
            step(0.34, 0.44, prefill=200),
            step(0.44, 0.46, decodes=2),
        ],
        requests=[
            request("chat", [0.02, 0.04, 0.46]),
            request("document", [0.44, 0.46], arrival=0.03, prompt=800),
        ],
        spans=[
            chunk("chat", 0, 0, 10),
            decodes("chat", 1, 1, 10),
            chunk("document", 2, 0, 600),
            chunk("document", 3, 600, 200),
            decodes("chat", 4, 4, 11),
            decodes("document", 4, 4, 800),
        ],
    )


def test_a_gap_is_floor_plus_interference_plus_waiting() -> None:
    found = {(gap.request_id, gap.token_index): gap for gap in gaps(stalled_by_a_document())}
    plain, stalled = found["chat", 1], found["chat", 2]
    assert (plain.floor, plain.interference, plain.waiting) == pytest.approx((0.02, 0.0, 0.0))
    assert stalled.gap == pytest.approx(0.42)
    assert (stalled.first_step, stalled.last_step) == (2, 4)
    assert (stalled.floor, stalled.interference, stalled.waiting) == pytest.approx((0.02, 0.0, 0.4))
    assert stalled.times_floor == pytest.approx(21.0)


def test_a_stall_names_the_chunks_that_filled_it_longest_first() -> None:
    [stall] = stalled_by_a_document().stalls()
    assert (stall.request_id, stall.token_index) == ("chat", 2)
    causes = [(c.kind, c.request_id, c.step, c.chunk_index, c.num_chunks) for c in stall.causes]
    assert causes == [("chunk", "document", 2, 1, 2), ("chunk", "document", 3, 2, 2)]
    assert [c.seconds for c in stall.causes] == pytest.approx([0.3, 0.1])
    assert stall.describe() == (
        "request chat: gap of 420 ms = 21× a decode step, waiting for chunk 1/2 of request document"
    )


def test_the_thresholds_are_two_floors_and_50_milliseconds() -> None:
    trace = stalled_by_a_document()
    assert trace.stalls(stall_factor=22) == []
    assert trace.stalls(stall_slo=0.43) == []
    assert len(trace.stalls(stall_factor=20, stall_slo=0.41)) == 1


def test_a_longer_mixed_step_below_the_thresholds_is_interference_not_a_stall() -> None:
    trace = trace_of(
        steps=[
            step(0.00, 0.02, prefill=10),
            step(0.02, 0.04, decodes=1),
            step(0.04, 0.075, prefill=50, decodes=1),
        ],
        requests=[request("chat", [0.02, 0.04, 0.075]), request("doc", [0.075], prompt=50)],
        spans=[chunk("chat", 0, 0, 10), decodes("chat", 1, 2, 10), chunk("doc", 2, 0, 50)],
    )
    gap = list(gaps(trace))[-1]
    assert (gap.floor, gap.interference, gap.waiting) == pytest.approx((0.02, 0.015, 0.0))
    assert trace.stalls() == []


def test_a_mixed_step_above_them_shares_its_time_between_its_chunks_by_tokens() -> None:
    trace = trace_of(
        steps=[
            step(0.00, 0.02, prefill=10),
            step(0.02, 0.04, decodes=1),
            step(0.04, 0.26, prefill=400, decodes=1, floor=0.02),
        ],
        requests=[
            request("chat", [0.02, 0.04, 0.26]),
            request("a", [0.26], prompt=300),
            request("b", [0.26], prompt=100),
        ],
        spans=[
            chunk("chat", 0, 0, 10),
            decodes("chat", 1, 2, 10),
            chunk("a", 2, 0, 300),
            chunk("b", 2, 0, 100),
        ],
    )
    [stall] = trace.stalls()
    assert stall.interference == pytest.approx(0.2)
    assert [(c.request_id, c.seconds) for c in stall.causes] == [
        ("a", pytest.approx(0.15)),
        ("b", pytest.approx(0.05)),
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("slots", "waiting for a slot"),
        ("blocks", "waiting for free blocks"),
        ("budget", "waiting for a share of the budget"),
        ("policy", "while others decoded"),
    ],
)
def test_waiting_in_steps_without_prompts_is_named_by_its_reason(reason: str, words: str) -> None:
    trace = trace_of(
        steps=[
            step(0.00, 0.02, decodes=1),
            step(0.02, 0.12, decodes=1),
            step(0.12, 0.14, decodes=1),
        ],
        requests=[request("chat", [0.02, 0.14]), request("other", [0.12])],
        spans=[decodes("chat", 0, 0, 9), decodes("other", 1, 1, 9), decodes("chat", 2, 2, 10)],
        skips=[Skip("chat", 1, 1, reason)],
    )
    [stall] = trace.stalls(stall_factor=1.5)
    assert stall.causes[0].seconds == pytest.approx(0.1)
    assert words in stall.describe()


def test_a_preemption_is_the_cause_of_its_whole_gap() -> None:
    trace = trace_of(
        steps=[
            step(0.00, 0.02, decodes=2),
            step(0.02, 0.04, decodes=1),
            step(0.04, 0.30, prefill=20),
        ],
        requests=[request("victim", [0.02, 0.30]), request("other", [0.02, 0.04])],
        spans=[
            decodes("victim", 0, 0, 18),
            decodes("other", 0, 1, 9),
            chunk("victim", 2, 0, 20),
        ],
        events=[
            LifecycleEvent("victim", 1, 0.02, "preempt", 19),
            LifecycleEvent("victim", 2, 0.04, "resume", 0),
        ],
    )
    [stall] = trace.stalls()
    assert stall.causes[0].kind == "preemption"
    assert "preempted, its tokens were recomputed" in stall.describe()
    assert sum(cause.seconds for cause in stall.causes) == pytest.approx(0.28 - stall.floor)  # type: ignore[operator]


def test_time_between_steps_is_idle() -> None:
    trace = trace_of(
        steps=[step(0.00, 0.02, decodes=1), step(0.22, 0.24, decodes=1)],
        requests=[request("chat", [0.02, 0.24])],
        spans=[decodes("chat", 0, 1, 9)],
    )
    [stall] = trace.stalls()
    assert stall.causes[0].kind == "idle"
    assert stall.waiting == stall.causes[0].seconds == pytest.approx(0.2)


def test_the_floor_is_the_models_else_the_nearest_batchs_median_else_unknown() -> None:
    measured = trace_of(
        steps=[
            step(0.0, 1.0, decodes=1),
            step(1.0, 4.0, decodes=8),
            step(4.0, 9.0, decodes=8),
            step(9.0, 13.0, decodes=8),
            step(13.0, 20.0, prefill=5, decodes=2),
            step(20.0, 30.0, prefill=5, decodes=7),
            step(30.0, 40.0, prefill=5, decodes=7, floor=0.25),
        ],
        requests=[],
    )
    floors = DecodeFloors(measured)
    assert [floors.of(number) for number in (4, 5, 6)] == [1.0, 4.0, 0.25]
    unknown = trace_of(
        steps=[step(0.0, 0.1, prefill=5), step(0.1, 0.3, prefill=5, decodes=1)],
        requests=[request("chat", [0.1, 0.3])],
        spans=[chunk("chat", 0, 0, 5), decodes("chat", 1, 1, 5), chunk("doc", 1, 0, 5)],
    )
    [stall] = unknown.stalls()  # above 50 ms, and nothing says what a decode step would cost
    assert stall.floor is None
    assert stall.times_floor is None
    assert stall.describe() == "request chat: gap of 200 ms, waiting for chunk 1/1 of request doc"


def test_a_recomputed_prompts_chunks_are_counted_anew() -> None:
    trace = trace_of(
        steps=[
            step(0.0, 0.1, prefill=5),
            step(0.1, 0.2, decodes=1),
            step(0.2, 0.4, prefill=6),
            step(0.4, 0.5, prefill=2),
            step(0.5, 0.6, decodes=1),
        ],
        requests=[request("chat", [0.2, 0.6])],
        spans=[
            chunk("doc", 0, 0, 5),
            decodes("chat", 1, 1, 5),
            chunk("doc", 2, 4, 6),  # from its prefix hit onwards
            chunk("doc", 3, 10, 2),
            decodes("chat", 4, 4, 6),
        ],
    )
    [stall] = trace.stalls()
    assert [(c.chunk_index, c.num_chunks) for c in stall.causes] == [(1, 2), (2, 2)]


def test_parts_add_up_and_causes_fill_the_gap_in_a_real_run(rng: random.Random) -> None:
    engine = make_engine(
        lambda plan: 0.02 + 0.01 * plan.num_prefill_tokens, policy="prefill-first", num_blocks=20
    )
    for i in range(14):
        prompt = random_prompt(rng, rng.randint(1, 40))
        engine.add_request(prompt, greedy(rng.randint(2, 20)), arrival_time=i * 0.2)
    drain(engine)
    found = list(gaps(engine.trace))
    for gap in found:
        assert gap.floor is not None
        own = min(gap.floor, engine.trace.steps[gap.last_step].duration)
        assert own + gap.interference + gap.waiting == pytest.approx(gap.gap)
    stalls = engine.trace.stalls()
    assert stalls
    assert {(s.request_id, s.token_index) for s in stalls} == {
        (gap.request_id, gap.token_index)
        for gap in found
        if gap.gap > 0.05 and gap.gap > 2 * (gap.floor or 0.0)
    }
    for stall in stalls:
        assert isinstance(stall, Stall)
        assert isinstance(stall, Gap)
        filled = sum(cause.seconds for cause in stall.causes)
        assert filled == pytest.approx(stall.gap - (stall.floor or 0.0), abs=1e-9)
        assert [c.seconds for c in stall.causes] == sorted(
            (c.seconds for c in stall.causes), reverse=True
        )
