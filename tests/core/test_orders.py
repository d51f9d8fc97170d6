"""Each order keeps its promise on a small scene, and first come first served breaks it there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from minichunk.core import orders
from minichunk.core.engine import Engine
from minichunk.core.orders import Fair, Order, Priority, Shortest, order, resolve_order
from minichunk.core.policies import PolicyError
from minichunk.core.predictors import PREDICTORS, Predictor, resolve_predictor
from minichunk.core.request import Request

from .fake_executor import drain, expected_tokens, greedy, make_engine, random_prompt, tokens_of

Promise = Callable[[Any], None]


def kept_only_by(spelling: Any) -> Callable[[Promise], Callable[[], None]]:
    """Turns `promise(order)` into a test: it holds under that order and fails under fcfs."""

    def wrap(promise: Promise) -> Callable[[], None]:
        def test() -> None:
            promise(spelling)
            with pytest.raises(AssertionError):
                promise("fcfs")

        test.__name__, test.__doc__ = promise.__name__, promise.__doc__
        return test

    return wrap


def serve(engine: Engine) -> Engine:
    drain(engine)
    engine.trace.validate()
    return engine


def finish_order(engine: Engine) -> list[str]:
    return [event.request_id for event in engine.trace.events if event.kind == "finish"]


def admissions(engine: Engine) -> list[str]:
    return [event.request_id for event in engine.trace.events if event.kind == "admit"]


def prompt(length: int) -> list[int]:
    return random_prompt(random.Random(length), length)


# priority ---------------------------------------------------------------------------------------


@kept_only_by("priority")
def test_priority_takes_the_urgent_first(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=1)
    for rid, priority in (("a", 2), ("b", 2), ("urgent", 0), ("soon", 1)):
        engine.add_request(prompt(5), greedy(3), request_id=rid, priority=priority)
    assert finish_order(serve(engine)) == ["urgent", "soon", "a", "b"]


@kept_only_by("priority")
def test_priority_preempts_a_less_urgent_request_for_its_slot(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=2)
    for rid in ("low0", "low1"):
        engine.add_request(prompt(5), greedy(20), request_id=rid, priority=1)
    engine.add_request(prompt(6), greedy(2), request_id="high", priority=0, arrival_time=4.0)
    serve(engine)
    assert engine.trace.metrics().requests["high"].ttft == 1.0
    preempted = [event.request_id for event in engine.trace.events if event.kind == "preempt"]
    assert preempted == ["low1"]


def test_equal_priority_never_preempts() -> None:
    engine = make_engine(order="priority", max_num_seqs=1)
    engine.add_request(prompt(5), greedy(9), request_id="first", priority=1)
    engine.add_request(prompt(5), greedy(9), request_id="second", priority=1, arrival_time=2.0)
    assert finish_order(serve(engine)) == ["first", "second"]
    assert engine.trace.metrics().num_preemptions == 0


def late_low_priority_ttft(order: str) -> float:
    """One unimportant request among a steady stream of important ones, as many as can be served."""
    engine = make_engine(order=order, max_num_seqs=1)
    engine.add_request(prompt(5), greedy(2), request_id="low", priority=3)
    for i in range(60):
        engine.add_request(prompt(5), greedy(2), priority=0, arrival_time=2.0 * i)
    serve(engine)
    return engine.trace.metrics().requests["low"].ttft or 0.0


def test_priority_ages_so_that_nobody_starves() -> None:
    assert late_low_priority_ttft("priority(ageing_seconds=inf)") >= 120  # after all the others
    assert late_low_priority_ttft("priority(ageing_seconds=10)") <= 3 * 10 + 4


# fair -------------------------------------------------------------------------------------------


@kept_only_by("fair")
def test_fair_alternates_between_tenants_after_every_admission(order: Any) -> None:
    engine = make_engine(order=order, max_num_batched_tokens=64)
    for tenant in ("A", "B"):
        for i in range(4):
            engine.add_request(prompt(6), greedy(2), request_id=f"{tenant}{i}", tenant=tenant)
    engine.step()
    assert admissions(engine) == ["A0", "B0", "A1", "B1", "A2", "B2", "A3", "B3"]


@kept_only_by("fair")
def test_fair_protects_a_light_tenant_from_a_heavy_one(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=2)
    for i in range(20):
        engine.add_request(prompt(10), greedy(5), request_id=f"heavy{i}", tenant="heavy")
    for i in range(3):
        engine.add_request(
            prompt(10), greedy(5), request_id=f"light{i}", tenant="light", arrival_time=12.0 * i + 1
        )
    serve(engine)
    ttfts = [engine.trace.metrics().requests[f"light{i}"].ttft for i in range(3)]
    assert max(ttft or 99.0 for ttft in ttfts) <= 6.0


def test_fair_charges_each_token_once_even_where_it_is_recomputed() -> None:
    engine = make_engine(order="fair", num_blocks=8, prefix_caching=False)
    for tenant in ("A", "B"):
        engine.add_request(prompt(6), greedy(18), tenant=tenant)
    serve(engine)
    assert engine.trace.metrics().num_preemptions >= 1
    counters = engine.scheduler.order.counters  # type: ignore[attr-defined]
    # B's counter starts at A's when it joins; at that time nobody was served yet.
    assert counters == {"A": 6 + 2 * 18, "B": 6 + 2 * 18}
    last = {row.group: row.value for row in engine.trace.counters}
    assert last == counters


def test_fair_lifts_a_returning_tenant_so_that_idling_saves_no_credit() -> None:
    engine = make_engine(order="fair", max_num_seqs=1)
    engine.add_request(prompt(4), greedy(2), request_id="early", tenant="idler")
    for i in range(12):
        engine.add_request(prompt(4), greedy(2), request_id=f"busy{i}", tenant="busy")
    for i in range(4):
        engine.add_request(
            prompt(4), greedy(2), request_id=f"back{i}", tenant="idler", arrival_time=12.5
        )
    serve(engine)
    order_of_start = admissions(engine)
    first = order_of_start.index("back0")
    kinds = [rid[:4] for rid in order_of_start[first : first + 6]]
    assert kinds.count("back") == 3  # turn by turn, not four in a row


def test_fair_lifts_to_the_last_served_where_nobody_waits() -> None:
    fair = Fair()
    one = Request("1", (1,) * 10, greedy(), tenant="A")
    fair.charge(one, 10, 0)
    fair.group_joins("B", None)
    assert fair.counters == {"A": 10.0, "B": 10.0}
    fair.counters["C"] = 25.0
    fair.group_joins("D", "C")
    fair.group_joins("C", "B")
    assert fair.counters["D"] == 25.0
    assert fair.counters["C"] == 25.0  # never lowered


# shortest ---------------------------------------------------------------------------------------


@kept_only_by("shortest")
def test_shortest_lets_short_answers_pass_long_ones(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=1)
    for rid, length in (("long", 20), ("middle", 9), ("short", 2)):
        engine.add_request(prompt(5), greedy(length), request_id=rid)
    serve(engine)
    assert finish_order(engine) == ["short", "middle", "long"]
    latencies = [m.latency or 0.0 for m in engine.trace.metrics().requests.values()]
    assert sum(latencies) == 2 + (2 + 9) + (2 + 9 + 20)


@kept_only_by(Shortest(reserve=True))
def test_shortest_can_reserve_blocks_for_the_predicted_answer(order: Any) -> None:
    """Two requests that would outgrow the pool together are not started together."""
    engine = make_engine(order=order, num_blocks=8, block_size=4)
    for _ in range(2):
        engine.add_request(prompt(6), greedy(18))
    assert serve(engine).trace.metrics().num_preemptions == 0


def test_a_reserve_beyond_the_pool_does_not_keep_a_request_out() -> None:
    engine = make_engine(order="shortest(reserve=True)", num_blocks=8, block_size=4)
    rid = engine.add_request(prompt(6), greedy(500))
    assert len(tokens_of(drain(engine), rid)) == 8 * 4 - 6 + 1


@kept_only_by("shortest(predictor='prompt-length')")
def test_shortest_may_guess_from_the_prompts_length(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=1)
    for rid, length in (("long", 20), ("short", 4)):
        engine.add_request(prompt(length), greedy(3), request_id=rid)
    assert finish_order(serve(engine)) == ["short", "long"]


@kept_only_by("shortest(predictor='tenant-mean')")
def test_shortest_may_learn_what_a_tenants_answers_are_like(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=1)
    for tenant, length in (("verbose", 15), ("terse", 2)):
        engine.add_request(prompt(4), greedy(length), tenant=tenant)
    drain(engine)
    for tenant, length in (("verbose", 15), ("terse", 2)):
        engine.add_request(prompt(4), greedy(length), request_id=tenant, tenant=tenant)
    assert finish_order(serve(engine))[-2:] == ["terse", "verbose"]


@kept_only_by("shortest(predictor='noisy-oracle')")
def test_a_noisy_oracle_still_beats_no_oracle(order: Any) -> None:
    """Mean latency of 20 answers of 1 to 39 tokens, the longest first, one at a time."""
    engine = make_engine(order=order, max_num_seqs=1)
    for length in range(39, 0, -2):
        engine.add_request(prompt(4), greedy(length), request_id=f"r{length}")
    serve(engine)
    latencies = [m.latency or 0.0 for m in engine.trace.metrics().requests.values()]
    assert sum(latencies) / len(latencies) < 200


def test_shortest_ages_long_jobs_where_asked() -> None:
    def ttft(order: str) -> float:
        engine = make_engine(order=order, max_num_seqs=1)
        engine.add_request(prompt(4), greedy(30), request_id="long", arrival_time=0.5)
        for i in range(50):
            engine.add_request(prompt(4), greedy(2), arrival_time=2.0 * i)
        serve(engine)
        return engine.trace.metrics().requests["long"].ttft or 0.0

    assert ttft("shortest") >= 99
    assert ttft("shortest(ageing_seconds=1)") <= 32


# deadline ---------------------------------------------------------------------------------------


@kept_only_by("deadline")
def test_deadline_serves_the_least_slack_first(order: Any) -> None:
    engine = make_engine(order=order, max_num_seqs=1)
    for rid, timeout in (("relaxed", 90.0), ("tight", 12.0), ("tighter", 6.0)):
        engine.add_request(prompt(4), greedy(5), request_id=rid, timeout=timeout)
    serve(engine)
    reasons = [engine.trace.requests[r].finish_reason for r in ("relaxed", "tight", "tighter")]
    assert reasons == ["length"] * 3  # everybody is in time


def test_deadline_counts_the_prompts_own_work() -> None:
    order = orders.Deadline(slo=10.0, seconds_per_prompt_token=0.1)
    long = Request("long", (1,) * 50, greedy(), arrival_time=1.0)
    short = Request("short", (1,) * 5, greedy(), arrival_time=0.0)
    assert order.key(long) < order.key(short)


# The machinery ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_every_predictor_has_a_name_that_leads_back_to_it(name: str) -> None:
    spelled = str(resolve_order(Shortest(name)))
    assert spelled == ("shortest" if name == "oracle" else f"shortest(predictor={name!r})")
    assert type(resolve_predictor(name)).name == name
    assert str(resolve_order(spelled)) == spelled


def test_an_order_is_copied_so_that_no_engine_inherits_anothers_counters() -> None:
    fair = Fair(output_weight=3.0)
    for _ in range(2):
        engine = make_engine(order=fair)
        engine.add_request(prompt(5), greedy(2), tenant="A")
        drain(engine)
        assert engine.scheduler.order.counters == {"A": 5 + 3.0 * 2}  # type: ignore[attr-defined]
        assert engine.trace.meta["order"] == "fair(output_weight=3.0)"
    assert fair.counters == {}


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        ("bogus", "unknown order 'bogus'; known: deadline, fair, fcfs"),
        ("priority(age=1)", "unexpected keyword argument 'age'"),
        ("priority(ageing_seconds=0)", "ageing_seconds=0 must be positive"),
        ("priority(ageing_seconds='x')", "ageing_seconds='x' must be a number"),
        ("priority(ageing_seconds=nan)", "nan is not a value"),
        ("shortest(ageing_seconds=0)", "ageing_seconds=0 must be positive"),
        ("deadline(slo='x')", "slo='x' must be a number"),
        ("shortest(predictor='tarot')", "unknown predictor 'tarot'"),
        (3, "must be a name, an Order or an Order class"),
    ],
)
def test_an_unknown_order_or_parameter_is_refused_when_the_engine_is_made(
    choice: Any, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        make_engine(order=choice)


def test_a_students_order_is_registered_and_may_bring_its_own_predictor() -> None:
    class Longest(Predictor):
        def predict(self, request: Request) -> float:
            return -float(request.params.max_tokens)

    @order("test-lifo")
    class Lifo(Order):
        def key(self, request: Request) -> tuple[float, ...]:
            return (-request.arrival_time, -request.index)

    try:
        for choice, expected in (
            ("test-lifo", ["c", "b", "a"]),
            (Lifo, ["c", "b", "a"]),
            (Shortest(Longest()), ["b", "a", "c"]),
        ):
            engine = make_engine(order=choice, max_num_seqs=1)
            for rid, length in (("a", 3), ("b", 4), ("c", 2)):
                engine.add_request(prompt(4), greedy(length), request_id=rid)
            assert finish_order(serve(engine)) == expected
    finally:
        del orders.REGISTRY["test-lifo"]


class NoNumber(Order):
    name = "no-number"

    def key(self, request: Request) -> Any:
        return (float("nan"),) if request.request_id == "bad" else (1.0,)


class NoGroup(Order):
    name = "no-group"

    def group(self, request: Request) -> Any:
        return 7 if request.request_id == "bad" else ""


@pytest.mark.parametrize("bad", [NoNumber, NoGroup])
@pytest.mark.parametrize("arrival_time", [None, 2.0])
def test_a_bad_order_is_named_and_the_others_are_served(
    rng: random.Random, bad: type[Order], arrival_time: float | None
) -> None:
    engine = make_engine(order=bad)
    good = [engine.add_request(random_prompt(rng, 5), greedy(4)) for _ in range(3)]
    events, complaints = [], []
    try:
        engine.add_request(prompt(5), greedy(), request_id="bad", arrival_time=arrival_time)
    except PolicyError as error:
        complaints.append(str(error))
    for _ in range(20):
        try:
            events += engine.step()
        except PolicyError as error:
            complaints.append(str(error))
    assert [bad.name in complaint for complaint in complaints] == [True]
    assert not engine.has_unfinished_requests()
    assert all(len(tokens_of(events, rid)) == 4 for rid in good)


def test_a_bad_order_leaves_nothing_of_a_request_that_finds_the_queue_full() -> None:
    engine = make_engine(order=NoNumber, max_num_seqs=1, max_queued_requests=1)
    engine.add_request(prompt(5), greedy(6))
    engine.step()
    engine.add_request(prompt(5), greedy(6))
    engine.add_request(prompt(5), greedy(6), request_id="bad", arrival_time=2.0)
    engine.step()
    with pytest.raises(PolicyError, match="order 'no-number': key of request 'bad'"):
        engine.step()
    drain(engine)
    assert list(engine.trace.requests) == ["0", "1"]


class PreemptsAnybody(Order):
    name = "preempts-anybody"

    def may_preempt(self, asker: Request, victim: Request) -> bool:
        return True


def test_an_order_that_lets_everybody_preempt_everybody_still_gets_everybody_done(
    rng: random.Random,
) -> None:
    engine = make_engine(order=PreemptsAnybody, num_blocks=8, max_num_seqs=2)
    prompts = {f"r{i}": random_prompt(rng, 9) for i in range(5)}
    for rid, tokens in prompts.items():
        engine.add_request(tokens, greedy(6), request_id=rid)
    events = drain(engine, max_steps=100)
    for rid, tokens in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(tokens, greedy(), 6)


class RaisesAtTimes(Order):
    """Each of its methods raises at its first, second, fourth, eighth, ... call."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.armed = False

    def _count(self, what: str) -> None:
        self.calls[what] += self.armed
        if self.armed and self.calls[what].bit_count() == 1:
            raise LookupError(f"of {what}")

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival_time)

    def group(self, request: Request) -> str:
        return request.tenant

    def group_key(self, group: str) -> float:
        self._count("group_key")
        return 0.0

    def group_joins(self, group: str, next_group: str | None) -> None:
        self._count("group_joins")

    def may_preempt(self, asker: Request, victim: Request) -> bool:
        self._count("may_preempt")
        return self.key(asker) < self.key(victim)

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self._count("prompt charge" if prompt_tokens else "output charge")

    def reserve_tokens(self, request: Request) -> int:
        self._count("reserve_tokens")
        return 0

    def finished(self, request: Request) -> None:
        self._count("finished")

    def changed_counters(self) -> dict[str, float]:
        self._count("changed_counters")
        return {}


def test_an_orders_own_errors_name_it_and_cost_nobody_a_token(rng: random.Random) -> None:
    engine = make_engine(order=RaisesAtTimes, num_blocks=12, block_size=4, max_num_seqs=4)
    prompts = {f"r{i}": random_prompt(rng, rng.randint(5, 9)) for i in range(10)}
    events, failures = [], []
    for i, (rid, tokens) in enumerate(prompts.items()):
        if i == 4:  # these decode when more urgent ones come
            events += engine.step()
        engine.add_request(tokens, greedy(9), request_id=rid, tenant=rid, priority=-i)
    engine.scheduler.order.armed = True  # type: ignore[attr-defined]
    for _ in range(300):
        try:
            events += engine.step()
        except PolicyError as error:
            failures.append(error)
    methods = ("changed_counters", "finished", "group_joins", "group_key", "may_preempt")
    named = {f"{method} raised LookupError: of {method}" for method in methods}
    named |= {f"charge raised LookupError: of {what} charge" for what in ("prompt", "output")}
    named.add("reserve_tokens raised LookupError: of reserve_tokens")
    assert set(map(str, failures)) == {f"order 'RaisesAtTimes': {name}" for name in named}
    assert {type(failure.__cause__) for failure in failures} == {LookupError}
    assert not engine.has_unfinished_requests()
    for rid, tokens in prompts.items():
        assert tokens_of(events, rid) == expected_tokens(tokens, greedy(), 9)
    engine.trace.validate()


def test_priority_key_does_not_move_while_a_request_waits() -> None:
    order = Priority(ageing_seconds=10.0)
    request = Request("r", (1,), greedy(), arrival_time=20.0, priority=3)
    assert order.key(request) == (5.0, 20.0)


def test_an_order_that_fails_is_named(rng: random.Random) -> None:
    class Broken(Order):
        name = "broken"

        def key(self, request: Request) -> tuple[float, ...]:
            raise LookupError("no such tenant")

    engine = make_engine(order=Broken())
    with pytest.raises(PolicyError, match=r"order 'broken'.*'r0'.*LookupError: no such tenant"):
        engine.add_request(random_prompt(rng, 4), greedy(2), request_id="r0")


def test_an_order_that_is_not_registered_goes_by_the_name_of_its_class() -> None:
    class Fairer(Fair):
        pass

    assert str(resolve_order(Fairer)) == "Fairer"
    assert str(resolve_order(Fairer(output_weight=3.0))) == "Fairer(output_weight=3.0)"
    assert str(resolve_order(Fair)) == "fair"


def test_a_bad_parameter_of_an_order_names_the_order() -> None:
    with pytest.raises(
        ValueError, match=r"order 'priority\(ageing_seconds=-1\)': ageing_seconds=-1"
    ):
        resolve_order("priority(ageing_seconds=-1)")
