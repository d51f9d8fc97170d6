"""Metrics against a small trace whose figures can be computed by hand."""

from __future__ import annotations

import pytest

import minichunk as mc
from minichunk.core.metrics import (
    Spread,
    goodput,
    jain_index,
    percentile,
    service_by_tenant,
    slowdowns,
)
from minichunk.core.trace import LifecycleEvent, Trace

from .traces import chunk, decodes, request, step, trace_of


def small_trace() -> Trace:
    """ "a" (10 tokens) and "b" (30 tokens, from 0.5 s on, in two chunks); "c" is cancelled."""
    cancelled = request("c", [], arrival=1.0, reason="cancelled")
    cancelled.finish_time = 3.0
    trace = trace_of(
        steps=[
            step(0.0, 1.0, prefill=10),
            step(1.0, 1.5, decodes=1),
            step(1.5, 3.0, prefill=20, decodes=1),
            step(3.0, 4.0, prefill=10, decodes=1),
            step(4.0, 4.5, decodes=1),
        ],
        requests=[
            request("a", [1.0, 1.5, 3.0, 4.0]),
            request("b", [4.0, 4.5], arrival=0.5, prompt=30),
            cancelled,
        ],
        spans=[
            chunk("a", 0, 0, 10),
            decodes("a", 1, 3, 10),
            chunk("b", 2, 0, 20),
            chunk("b", 3, 20, 10),
            decodes("b", 4, 4, 30),
        ],
        events=[
            LifecycleEvent("a", 0, 0.0, "admit", 0),
            LifecycleEvent("b", 2, 1.5, "admit", 0),
        ],
    )
    trace.requests["b"].tenant = "other"
    return trace


def test_ttft_is_from_arrival_to_the_first_token_and_itl_are_the_gaps() -> None:
    figures = small_trace().metrics().requests
    a, b, c = figures["a"], figures["b"], figures["c"]
    assert (a.ttft, a.itl, a.max_itl, a.tpot, a.latency) == (1.0, (0.5, 1.5, 1.0), 1.5, 1.0, 4.0)
    assert (b.ttft, b.itl, b.tpot, b.latency, b.queue_time) == (3.5, (0.5,), 0.5, 4.0, 1.0)
    assert (c.ttft, c.itl, c.tpot, c.max_itl, c.latency) == (None, (), None, None, 2.0)
    assert c.queue_time is None


def test_totals_and_throughput() -> None:
    metrics = small_trace().metrics()
    assert (metrics.num_requests, metrics.num_finished, metrics.num_steps) == (3, 2, 5)
    assert (metrics.output_tokens, metrics.prompt_tokens) == (6, 40)
    assert metrics.duration == 4.5
    assert metrics.throughput == pytest.approx(6 / 4.5)
    assert metrics.total_throughput == pytest.approx(46 / 4.5)
    assert (metrics.itl.count, metrics.itl.mean, metrics.itl.max) == (4, 0.875, 1.5)
    assert metrics.itl.p50 == 0.75
    assert metrics.longest_stall == 1.5
    assert metrics.as_dict()["requests"]["a"]["tpot"] == 1.0


def test_goodput_counts_only_requests_that_met_every_limit() -> None:
    trace = small_trace()
    assert trace.goodput(ttft=4.0) == pytest.approx(2 / 4.5)
    assert trace.goodput(ttft=3.5) == pytest.approx(2 / 4.5)
    assert trace.goodput(ttft=2.0) == pytest.approx(1 / 4.5)
    assert trace.goodput(ttft=4.0, itl=1.0) == pytest.approx(1 / 4.5)
    assert trace.goodput(ttft=4.0, tpot=0.9) == pytest.approx(1 / 4.5)
    assert goodput(trace, ttft=4.0, itl=0.4) == 0.0


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(n) for n in range(101)], 95) == 95.0
    assert Spread.of([]) == Spread(0, None, None, None, None, None)


def test_an_empty_trace_gives_zeros_and_nones() -> None:
    metrics = Trace().metrics()
    assert (metrics.throughput, metrics.ttft.p50, metrics.longest_stall) == (0.0, None, 0.0)
    assert Trace().goodput(ttft=1.0) == 0.0


def test_jains_index() -> None:
    assert jain_index([5.0, 5.0, 5.0]) == 1.0
    assert jain_index([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain_index([0.0, 0.0]) == 1.0
    assert jain_index([1.0, 3.0]) == pytest.approx(16 / 20)


def test_service_counts_prompts_once_and_outputs_twice() -> None:
    assert service_by_tenant(small_trace()) == {"default": 10 + 2 * 4, "other": 30 + 2 * 2}


def test_slowdown_is_latency_over_what_the_tokens_cost_alone() -> None:
    trace = small_trace()
    per_output, per_prompt = 0.5, 0.1  # medians of (0.5, 0.5) and of (0.1, 0.075, 0.1)
    assert slowdowns(trace)["a"] == pytest.approx(4.0 / (10 * per_prompt + 4 * per_output))
    assert slowdowns(trace)["b"] == pytest.approx(4.0 / (30 * per_prompt + 2 * per_output))


def test_metrics_are_shown_in_one_line_whatever_the_number_of_requests() -> None:
    trace = mc.simulate(mc.workloads.poisson(20, 40, seed=1), model="llama-2-7b", gpu="h100-sxm")
    shown = repr(trace.metrics())
    assert "40 of 40 requests finished" in shown
    assert f"{len(trace.steps)} steps" in shown
    assert "\n" not in shown
    assert len(shown) < 120
