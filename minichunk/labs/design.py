"""Scoring and checks for notebook 12: a scheduler of one's own, judged by goodput.

A service is a workload, a machine and a promise. A design is scored by the share of requests whose
promise it kept, on workloads whose seed is drawn when it is scored: what was tuned to one seed
does not help with the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from minichunk.compare import Table
from minichunk.core.config import EngineConfig
from minichunk.core.orders import Order, resolve_order
from minichunk.core.policies import Policy
from minichunk.core.request import PromptShape, SamplingParams
from minichunk.core.trace import Trace
from minichunk.labs.result import Wrong, exercise, is_fast
from minichunk.sim.cost import CostModel
from minichunk.sim.run import simulate, simulated_engine
from minichunk.workloads import Lengths, Workload, bursty

# Services and scores ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """What arrives, where it runs, and what was promised: TTFT and the longest gap, in seconds."""

    name: str
    model: str
    gpu: str
    rate: float
    prompt: Lengths
    output: Lengths
    ttft: float
    itl: float
    cv: float = 1.0  # of the gaps between arrivals: 1 is Poisson, more is burstier

    def workload(self, seed: int, num_requests: int) -> Workload:
        return bursty(
            self.rate, num_requests, cv=self.cv, prompt=self.prompt, output=self.output, seed=seed
        )

    def run(self, seed: int, num_requests: int, **knobs: Any) -> Trace:
        """Serve one drawn workload; the budget and the number of slots are the lab's."""
        options = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 128, **knobs}
        workload = self.workload(seed, num_requests)
        return simulate(workload, model=self.model, gpu=self.gpu, **options)

    def share_kept(self, trace: Trace) -> float:
        """The share of all requests that finished with their promise kept, from 0 to 1."""
        duration = trace.steps[-1].end - trace.steps[0].start if trace.steps else 0.0
        good = trace.goodput(ttft=self.ttft, itl=self.itl) * duration
        return good / max(1, len(trace.requests))


BUDGET = 2048  # tokens per step, the same for every design

SERVICES = (
    Service("chat", "llama-2-7b", "a100-80g-sxm", 5.0, Lengths(700, p90=3000, maximum=8000),
            Lengths(120, p90=300), ttft=1.5, itl=0.080),
    Service("documents", "llama-3-8b", "h100-sxm", 7.0, Lengths(3000, p90=8000, maximum=16000),
            Lengths(80, p90=200), ttft=2.5, itl=0.060),
    Service("small GPU", "llama-3-8b", "a10g", 1.2, Lengths(400, p90=1500, maximum=4000),
            Lengths(60, p90=150), ttft=3.0, itl=0.110, cv=2.0),
)  # fmt: skip


def num_requests() -> int:
    """Requests per workload."""
    return 40 if is_fast() else 80


def draw_seeds(count: int) -> list[int]:
    """Seeds that nobody knew before; print them, so that a result can be repeated."""
    return [random.SystemRandom().randrange(1_000_000) for _ in range(count)]


def scores(seeds: Sequence[int], **knobs: Any) -> dict[str, list[float]]:
    """Per service, the share of promises kept for each seed (a design is its engine knobs)."""
    return {
        service.name: [
            service.share_kept(service.run(seed, num_requests(), **knobs)) for seed in seeds
        ]
        for service in SERVICES
    }


def leaderboard(
    designs: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Table:
    """All designs on the same workloads, the best first. `±` is the standard error over seeds.

    `progress` may wrap the designs to show how far it is, as `tqdm.tqdm` does.
    """
    rows = []
    for name, knobs in progress(designs.items()):
        by_service = scores(seeds, **knobs)
        means = [fmean(of_seed) for of_seed in zip(*by_service.values(), strict=True)]
        error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        shares = {service: f"{fmean(values):.0%}" for service, values in by_service.items()}
        rows.append((fmean(means), {"design": name, **shares, "score": f"{fmean(means):.1%}",
                                    "±": f"{error:.1%}"}))  # fmt: skip
    rows.sort(key=lambda row: row[0], reverse=True)
    return Table([{"rank": rank, **row} for rank, (_, row) in enumerate(rows, start=1)])


# The checks ------------------------------------------------------------------------------------


@exercise("kept-promise")
def kept_promise(answer: Callable[[Any, float, float | None], bool]) -> str:
    """`answer(record, ttft, itl)`: did this request of a trace finish with its promise kept?"""
    for trace, ttft, itl in _judged_traces(random.Random()):
        for request_id, record in trace.requests.items():
            alone = Trace(meta=trace.meta)
            alone.steps, alone.requests = trace.steps, {request_id: record}
            expected = alone.goodput(ttft=ttft, itl=itl) > 0
            got = answer(record, ttft, itl)
            if bool(got) != expected:
                raise Wrong(_describe(record, ttft, itl, got, expected), trace.timeline())
    return "first token, every gap and the finish: you count as `trace.goodput` does"


def _describe(record: Any, ttft: float, itl: float | None, got: Any, expected: bool) -> str:
    times = record.token_times
    gaps = [later - earlier for earlier, later in pairwise(times)]
    first = f"{times[0] - record.arrival:.3f} s" if times else "never"
    longest = f"{max(gaps):.3f} s" if gaps else "none"
    return (
        f"request {record.request_id!r} (first token after {first}, longest gap {longest}, "
        f"{len(times)} tokens, finished by {record.finish_reason!r}) against ttft={ttft:.3f}, "
        f"itl={itl if itl is None else round(itl, 3)}: you say {got!r}, it is {expected}"
    )


def _judged_traces(rng: random.Random) -> list[tuple[Trace, float, float | None]]:
    """Crowded runs with a time-out and a cancel in each, and limits near what happened."""
    found: list[tuple[Trace, float, float | None]] = []
    for number in range(3):
        model = CostModel("llama-2-7b", "a100-80g-sxm")
        engine = simulated_engine(model, EngineConfig(policy="prefill-first"))
        for index in range(14):
            prompt = PromptShape(rng.randint(50, 4000))
            outputs = 1 if index == 5 else rng.randint(3, 30)
            patience = 0.2 if index == 11 else None
            engine.add_request(
                prompt, SamplingParams(max_tokens=outputs), request_id=f"r{index}", timeout=patience
            )
        for _ in range(12):
            engine.step()
        running = [r for r in engine.requests.values() if r.output_token_ids and not r.is_finished]
        if running:
            engine.cancel(running[-1].request_id)
        while engine.has_unfinished_requests():
            engine.step()
        metrics = engine.trace.metrics()
        waits = sorted(r.ttft for r in metrics.requests.values() if r.ttft is not None)
        longest = sorted(r.max_itl for r in metrics.requests.values() if r.max_itl is not None)
        middle = longest[len(longest) // 2] * 1.001
        found.append((engine.trace, waits[2 * len(waits) // 3], None if number == 2 else middle))
        found.append((engine.trace, 60.0, 60.0))  # only those who left early fail
    return found


@exercise("my-policy")
def my_policy(answer: Callable[..., Any], seed: int | None = None) -> str:
    """`answer(view)`: a policy that keeps more promises than `decode-first` at the same budget."""
    gains = _gains({"policy": Policy("yours", answer)}, {"policy": "decode-first"}, seed, 0.15)
    return f"beats decode-first at the same budget: {gains}"


@exercise("my-order")
def my_order(answer: Callable[[], Order], seed: int | None = None) -> str:
    """`answer` is an Order class that keeps more promises than `fcfs` when there is too much."""
    made = resolve_order(answer())
    common = {"policy": f"split-fuse(target={OVERLOAD_TARGET})"}
    gains = _gains({**common, "order": made}, common, seed, 0.08, OVERLOADED)
    return f"beats fcfs under overload: {gains}"


OVERLOAD_TARGET = 600
OVERLOADED = (
    Service("overload", "llama-2-7b", "a100-80g-sxm", 12.0, Lengths(1000, p90=4000, maximum=8000),
            Lengths(100, p90=200), ttft=2.0, itl=0.120),
)  # fmt: skip


def _gains(
    yours: Mapping[str, Any],
    baseline: Mapping[str, Any],
    seed: int | None,
    margin: float,
    services: Sequence[Service] = SERVICES,
) -> str:
    """What each service gains, in words; `Wrong` where the mean gain is below `margin`."""
    seed = draw_seeds(1)[0] if seed is None else seed
    lines, gains, worst = [], [], None
    for service in services:
        mine, theirs = (service.run(seed, 60, **knobs) for knobs in (yours, baseline))
        unfinished = [r.request_id for r in mine.requests.values() if r.finish_reason is None]
        if unfinished:
            raise Wrong(
                f"{service.name}, seed {seed}: {unfinished[:3]} never finish", mine.timeline()
            )
        kept, before = service.share_kept(mine), service.share_kept(theirs)
        lines.append(f"{service.name} {before:.0%} → {kept:.0%}")
        gains.append(kept - before)
        if worst is None or kept - before < worst[0]:
            worst = (kept - before, mine)
    text = f"{', '.join(lines)} (seed {seed})"
    if fmean(gains) < margin:
        raise Wrong(
            f"{text}: {fmean(gains):+.1%} on average, and at least {margin:+.0%} is asked for. "
            "Below: your run where it gained least",
            worst[1].timeline() if worst else None,
        )
    return text


@exercise("better-design")
def better_design(answer: Callable[[list[float], list[float]], str]) -> str:
    """`answer(a, b)`: scores of two designs on the same seeds; "a", "b" or "cannot tell"."""
    rng = random.Random()
    cases = []
    for shift in (
        0.0,
        0.01,
        0.03,
        -0.03,
        0.1,
        -0.1,
        *(rng.uniform(-0.06, 0.06) for _ in range(40)),
    ):
        hard = [rng.uniform(0.3, 0.9) for _ in range(rng.randint(4, 9))]
        cases.append((hard, [share + shift + rng.gauss(0, 0.02) for share in hard]))
    cases += [(b, a) for a, b in cases[:3]]
    for a, b in cases:
        mean, error = _paired(a, b)
        if abs(abs(mean) - 2 * error) < 1e-6:
            continue
        expected = "cannot tell" if abs(mean) <= 2 * error else "b" if mean > 0 else "a"
        got = answer(list(a), list(b))
        if got != expected:
            shown = " ".join(f"{y - x:+.3f}" for x, y in zip(a, b, strict=True))
            raise Wrong(
                f"the differences b − a, seed by seed, are {shown}: their mean is {mean:+.4f} and "
                f"its standard error {error:.4f}, so the answer is {expected!r}, not {got!r}"
            )
    return "you rank designs only where the seeds agree"


def _paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of b − a over seeds, and the standard error of that mean."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return fmean(differences), stdev(differences) / math.sqrt(len(differences))
