"""The queue against a sorted list, and what it costs when it is long."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from benchmarks.scheduler import decoding_scheduler, measure
from minichunk.core.orders import Fair, Order, resolve_order
from minichunk.core.request import Request, RequestStatus
from minichunk.core.waiting import WaitingLine

from .fake_executor import greedy


def new_request(rng: random.Random, index: int) -> Request:
    return Request(
        str(index),
        (1,) * rng.randint(1, 30),
        greedy(rng.randint(1, 9)),
        arrival_time=rng.random(),
        priority=rng.randint(0, 3),
        tenant=rng.choice("ABCD"),
        index=index,
    )


@pytest.mark.parametrize("order", ["fcfs", "priority", "fair", "shortest", "deadline"])
@pytest.mark.parametrize("threshold", [None, 12])
def test_the_head_is_the_least_of_all_that_wait(
    rng: random.Random, order: str, threshold: int | None
) -> None:
    chosen: Order = resolve_order(order)
    line = WaitingLine(chosen, threshold)
    waiting: list[Request] = []
    for index in range(1500):
        what = rng.choice(["add", "add", "admit", "cancel", "charge", "hold"])
        if what == "add":
            request = new_request(rng, index)
            line.add(request)
            waiting.append(request)
        elif what == "charge":
            chosen.charge(new_request(rng, index), rng.randint(0, 9), rng.randint(0, 9))
        elif waiting and what in ("admit", "cancel"):
            request = line.head() if what == "admit" else rng.choice(waiting)  # type: ignore[assignment]
            request.status = RequestStatus.RUNNING if what == "admit" else RequestStatus.FINISHED
            line.remove(request)
            waiting.remove(request)
            if what == "admit" and rng.random() < 0.3:  # preempted
                line.add(request)
                waiting.append(request)
        held = what == "hold" and threshold is not None
        pool = [r for r in waiting if not (held and line.is_long(r))]
        expected = min(pool, key=lambda r: (chosen.group_key(r.group), *r.rank), default=None)
        assert line.head(hold_long=held) is expected
        assert len(line) == len(waiting) == len(list(line))
    assert set(line) == set(waiting)


def test_ties_go_to_the_one_that_came_first() -> None:
    line = WaitingLine(Fair(), None)
    requests = [Request(str(i), (1,), greedy(), tenant=f"t{i % 3}", index=i) for i in range(9)]
    for request in reversed(requests):
        line.add(request)
    assert line.head() is requests[0]


@pytest.mark.parametrize(("order", "many"), [("fcfs", 100_000), ("fair", 10_000)])
def test_a_step_costs_at_most_3_microseconds_per_request_however_many_wait(
    order: str, many: int
) -> None:
    """The least of several medians of CPU time, since other processes use this machine too."""
    costs = {}
    for num_waiting in (10, many):
        scheduler = decoding_scheduler(num_waiting, order=order)
        rounds = [statistics.median(measure(scheduler, 15).schedule) for _ in range(8)]
        costs[num_waiting] = min(rounds)
    print(costs)
    assert costs[many] < 1.5 * costs[10]
    assert costs[10] < 3e-6


def test_queueing_under_very_many_tenants_stays_cheap() -> None:
    """Adding looks at the head of the queue, never at all groups."""
    line = WaitingLine(Fair(), None)
    start = time.process_time()
    for index in range(10_000):
        line.add(Request(str(index), (1,), greedy(), tenant=str(index), index=index))
    assert len(line) == 10_000
    assert time.process_time() - start < 2.0
