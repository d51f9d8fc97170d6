"""Checks for notebook 11: Jain's index, virtual token counters and tenants with shares.

Each check plays a student's answer against the engine's own on workloads drawn anew and shows the
first one on which the two disagree. `service` and `contested` are used by the notebook as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from minichunk.core.diff import diff_traces
from minichunk.core.metrics import jain_index as reference_index
from minichunk.core.orders import Fair
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.core.trace import Trace
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.run import simulate

SIMULATED: dict[str, Any] = {
    "model": "llama-2-7b",
    "gpu": "a100-80g-sxm",
    "max_num_batched_tokens": 512,
}

# Reading a trace -----------------------------------------------------------------------------


def service(
    trace: Trace, prompt_weight: float = 1.0, output_weight: float = 2.0
) -> dict[str, list[tuple[float, float]]]:
    """Each tenant's weighted tokens over time, as (time, total): prompts when they are admitted,
    output tokens when they appear. This is what virtual token counters count."""
    rows: dict[str, list[tuple[float, float]]] = {r.tenant: [] for r in trace.requests.values()}
    for event in trace.events:
        if event.kind == "admit":
            record = trace.requests[event.request_id]
            rows[record.tenant].append((event.time, prompt_weight * record.prompt_tokens))
    for record in trace.requests.values():
        rows[record.tenant] += [(time, output_weight) for time in record.token_times]
    totals = {}
    for tenant, found in rows.items():
        found.sort()
        sums = accumulate(amount for _, amount in found)
        totals[tenant] = [(time, total) for (time, _), total in zip(found, sums, strict=True)]
    return totals


def contested(trace: Trace) -> tuple[float, float]:
    """From when until when every tenant had a request waiting or just admitted."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for event in trace.events:
        tenant = trace.requests[event.request_id].tenant
        if event.kind == "arrive":
            first.setdefault(tenant, event.time)
        elif event.kind == "admit":
            last[tenant] = event.time
    return max(first.values()), min(last.values())


def at(curve: Sequence[tuple[float, float]], time: float) -> float:
    """The value of a step curve at a time; 0 before its first point."""
    return max((total for when, total in curve if when <= time), default=0.0)


def widest_gap(trace: Trace, **weights: float) -> float:
    """The largest difference in service between two tenants while all of them wait."""
    curves = service(trace, **weights)
    start, end = contested(trace)
    base = {tenant: at(curve, start) for tenant, curve in curves.items()}
    changes = sorted(
        (time, tenant, total)
        for tenant, curve in curves.items()
        for time, total in curve
        if start < time <= end
    )
    gained, widest = dict.fromkeys(curves, 0.0), 0.0
    for _, tenant, total in changes:
        gained[tenant] = total - base[tenant]
        widest = max(widest, max(gained.values()) - min(gained.values()))
    return widest


def slowdowns(trace: Trace, **simulated: Any) -> dict[str, list[float]]:
    """By tenant: each request's latency over its latency alone on the same simulated GPU.

    `simulated` are the arguments of `simulate`. The reference does not depend on the schedule, so
    runs under different policies and orders can be compared.
    """
    alone: dict[tuple[int, int], float] = {}
    result: dict[str, list[float]] = {}
    for record in trace.requests.values():
        key = (record.prompt_tokens, record.max_tokens)
        if key not in alone:
            spec = RequestSpec(0.0, PromptShape(record.prompt_tokens), record.max_tokens)
            alone[key] = simulate([spec], **simulated).metrics().duration
        if record.finish_time is not None:
            latency = record.finish_time - record.arrival
            result.setdefault(record.tenant, []).append(latency / alone[key])
    return result


# The checks ----------------------------------------------------------------------------------


@exercise("jain-index")
def jain_index(answer: Callable[[list[float]], float]) -> str:
    """`answer(shares)`: Jain's fairness index of positive shares."""
    rng = random.Random()
    cases: list[list[float]] = [[1.0], [5.0, 5.0, 5.0], [1.0, 0.0, 0.0, 0.0]]
    cases += [[rng.uniform(0, 10) for _ in range(rng.randint(2, 8))] for _ in range(8)]
    for shares in cases:
        got, expected = answer(list(shares)), reference_index(shares)
        if not isinstance(got, int | float) or not math.isclose(got, expected, rel_tol=1e-9):
            text = ", ".join(f"{share:.2f}" for share in shares)
            raise Wrong(f"jain_index([{text}]) gave {got!r}; it is {expected:.4f}")
    return "1 where all are equal, 1/n where one has everything"


@exercise("token-counters")
def token_counters(answer: Callable[[], Any]) -> str:
    """`answer` is an Order class that schedules as the engine's `fair` does."""
    rng = random.Random()
    for _ in range(6):
        workload = _tenants(rng)
        options = {**SIMULATED, "max_num_seqs": 4}
        theirs = simulate(workload, order=answer(), **options)
        reference = simulate(workload, order=Fair(), **options)
        difference = diff_traces(reference, theirs)
        if difference is not None:
            step = difference.step
            counters: dict[str, float] = {}
            for row in reference.counters:
                if row.step <= step:
                    counters[row.group] = row.value
            values = ", ".join(f"{tenant} {value:g}" for tenant, value in sorted(counters.items()))
            raise Wrong(
                f"{difference}\nThe counters of the engine's `fair` about that step: {values}",
                theirs.timeline(),
            )
    return "tenant by tenant, your counters choose as the engine's do"


def _tenants(rng: random.Random) -> list[RequestSpec]:
    """Three tenants: one has work all the time, one many small requests, one pauses."""
    specs = []
    for tenant, count, start, stop in (
        ("steady", 25, 0.0, 4.0),
        ("small", 40, 0.0, 5.0),
        ("pauses", 6, 0.0, 0.2),
        ("pauses", 20, 3.0, 3.3),
    ):
        for _ in range(count):
            prompt = rng.randint(5, 60) if tenant == "small" else rng.randint(100, 600)
            output = rng.randint(20, 60) if tenant == "small" else rng.randint(2, 30)
            arrival = rng.uniform(start, stop)
            specs.append(RequestSpec(arrival, PromptShape(prompt), output, tenant))
    return sorted(specs, key=lambda spec: spec.arrival)


@exercise("weighted-fair")
def weighted_fair(answer: Callable[[Mapping[str, float]], Any]) -> str:
    """`answer(shares)` makes an order that serves tenants in proportion to their shares."""
    rng = random.Random()
    for shares in (
        {"gold": 3.0, "iron": 1.0},
        {"gold": 1.0, "iron": 1.0},
        {"gold": float(rng.randint(2, 5)), "iron": 1.0},
        {"gold": 1.0, "iron": float(rng.randint(2, 4))},
    ):
        trace = simulate(_backlog(rng), order=answer(dict(shares)), max_num_seqs=8, **SIMULATED)
        start, end = contested(trace)
        curves = service(trace)
        gold, iron = (
            at(curves[tenant], end) - at(curves[tenant], start) for tenant in ("gold", "iron")
        )
        wanted, ratio = shares["gold"] / shares["iron"], gold / max(iron, 1.0)
        if not 0.85 * wanted < ratio < 1.15 * wanted:
            raise Wrong(
                f"shares {shares}: while both tenants waited ({start:.1f} s to {end:.1f} s), gold "
                f"was served {gold:.0f} and iron {iron:.0f} weighted tokens, {ratio:.2f} to 1; "
                f"it should be about {wanted:.2f} to 1",
                trace.timeline(),
            )
    return "while both wait, service follows the shares"


def _backlog(rng: random.Random) -> list[RequestSpec]:
    """Two tenants who ask for everything at once."""
    return [
        RequestSpec(0.0, PromptShape(rng.randint(50, 400)), rng.randint(10, 80), tenant)
        for _ in range(120)
        for tenant in ("gold", "iron")
    ]
