"""Simulated runs: one, a grid of them, the highest load that keeps a promise, the right chunk size.

`simulate` is `core.Engine` on a virtual clock with a `SimulatedExecutor`; nothing else differs from
a real run. `sweep` takes any `concurrent.futures.Executor`, so one machine's processes or a whole
Dask or Ray cluster share the work.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor as FuturesExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minichunk.core.clock import VirtualClock
from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine
from minichunk.core.policies import PolicyError
from minichunk.core.request import RequestSpec
from minichunk.core.trace import Trace
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.sim.executor import SimulatedExecutor

_COST_OPTIONS = ("tensor_parallel", "efficiency", "step_overhead", "host_time", "tile")


def simulate(
    workload: Iterable[RequestSpec],
    *,
    model: Any,
    gpu: Any,
    preset: str | None = None,
    memory_fraction: float = 0.9,
    **options: Any,
) -> Trace:
    """Serve a workload on a modelled GPU and return the trace, its times in virtual seconds.

    `model` and `gpu` are slugs (or a `ModelShape`, a `GPU`). `options` are those of `CostModel`
    (`tensor_parallel`, `efficiency`, `step_overhead`, `host_time`, `tile`) and the engine's knobs
    (`policy`, `order`, `max_num_batched_tokens`, `chunk_size`, …; see `EngineConfig`). Unless
    `num_blocks` is given, the block pool fills `memory_fraction` of the GPU's memory beside the
    weights.
    Raises ValueError for an unknown slug or option, and if the weights do not fit.
    """
    cost_options = {key: options.pop(key) for key in _COST_OPTIONS if key in options}
    cost_model = CostModel(model, gpu, **cost_options)
    config = EngineConfig.make(preset, **options)
    return simulated_engine(cost_model, config, memory_fraction=memory_fraction).run(workload)


def simulated_engine(
    cost_model: CostModel, config: EngineConfig, *, memory_fraction: float = 0.9
) -> Engine:
    """An engine on a virtual clock, for those who want to drive its steps themselves."""
    if config.num_blocks is None:
        blocks = num_blocks_for(cost_model, config.block_size, memory_fraction)
        config = replace(config, num_blocks=blocks)
    split = cost_model.tensor_parallel
    meta = {
        "model": cost_model.shape.slug,
        "device": cost_model.gpu.slug + (f" x {split}" if split > 1 else ""),
        "tensor_parallel": split,
        "peak_flops": cost_model.peak_flops,
        "peak_bandwidth": cost_model.peak_bandwidth,
        "step_overhead": cost_model.step_overhead,
        "host_time": cost_model.host_time,
        "versions": dict(_versions()),
    }
    executor = SimulatedExecutor(cost_model)
    return Engine(executor, config, clock=VirtualClock(), meta=meta)


@functools.cache
def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("minichunk")
    except importlib.metadata.PackageNotFoundError:  # used from a source folder
        own = "unknown"
    return {"minichunk": own, "python": platform.python_version()}


def num_blocks_for(cost_model: CostModel, block_size: int, memory_fraction: float = 0.9) -> int:
    """How many KV blocks fit beside the weights, on all GPUs together."""
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction} must be above 0 and at most 1")
    shape, gpu, split = cost_model.shape, cost_model.gpu, cost_model.tensor_parallel
    memory = gpu.memory_bytes * split * memory_fraction
    copies = max(1.0, split / shape.num_kv_heads)  # KV heads are copied where GPUs outnumber them
    per_block = block_size * shape.kv_bytes_per_token * copies
    blocks = int((memory - shape.weight_bytes) // per_block)
    if blocks < 1:
        raise ValueError(
            f"{shape.name} needs {shape.weight_bytes / 1e9:.1f} GB for its weights and "
            f"{per_block / 1e6:.1f} MB per block, but memory_fraction={memory_fraction:g} of "
            f"{split} x {gpu.name} is {memory / 1e9:.1f} GB: raise tensor_parallel, or take a GPU "
            "with more memory or a smaller model"
        )
    return blocks


# Many runs --------------------------------------------------------------------------------------


def sweep(
    grid: Mapping[str, Sequence[Any]],
    *,
    executor: FuturesExecutor | None = None,
    summarise: Callable[[Trace], Mapping[str, Any]] | None = None,
    **fixed: Any,
) -> list[dict[str, Any]]:
    """Simulate every combination of `grid` and return one row (a dict) for each, in grid order.

    `grid` and `fixed` are arguments of `simulate`, `workload` among them. A row holds the grid's
    values and `summarise(trace)` (default: `summary`). With an `executor` (a process pool, Dask's
    `client.get_executor()`, …) the runs are spread over its workers; a combination that is
    impossible gives a row with an `error` and does not stop the others.
    """
    clash = sorted(set(grid) & set(fixed))
    if clash:
        raise ValueError(f"{', '.join(clash)}: given both in the grid and as a fixed argument")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    tasks = [({**fixed, **point}, summarise or summary) for point in points]
    if executor is None:
        results = [_run_task(*task) for task in tasks]
    else:
        futures = [executor.submit(_run_task, *task) for task in tasks]
        results = [future.result() for future in futures]
    return [{**point, **result} for point, result in zip(points, results, strict=True)]


def _run_task(
    arguments: dict[str, Any], summarise: Callable[[Trace], Mapping[str, Any]]
) -> dict[str, Any]:
    try:
        return dict(summarise(simulate(**arguments)))
    except (ValueError, PolicyError) as error:
        return {"error": str(error)}


def summary(trace: Trace) -> dict[str, float | None]:
    """The figures of one run that a sweep compares; times in seconds, throughput in tokens/s."""
    metrics = trace.metrics()
    return {
        "num_requests": metrics.num_requests,
        "num_steps": metrics.num_steps,
        "duration": metrics.duration,
        "throughput": metrics.throughput,
        "ttft_p50": metrics.ttft.p50,
        "ttft_p99": metrics.ttft.p99,
        "itl_p50": metrics.itl.p50,
        "itl_p99": metrics.itl.p99,
        "itl_max": metrics.itl.max,
        "queue_time_p50": metrics.queue_time.p50,
        "num_stalls": metrics.num_stalls,
        "longest_stall": metrics.longest_stall,
        "num_preemptions": metrics.num_preemptions,
    }


# How much load, and which chunk size -----------------------------------------------------------


@dataclass(frozen=True)
class SLO:
    """A promise to users, in seconds: P99 of the gaps between tokens, median wait for admission."""

    p99_itl: float
    median_scheduling_delay: float = 2.0

    def is_met(self, figures: Mapping[str, float | None]) -> bool:
        """Are `itl_p99` and `queue_time_p50` of a `summary` at most the promised seconds?

        A figure that is None (no gaps, because no request had two tokens; nobody admitted) breaks
        nothing and counts as 0.
        """
        gap, wait = figures["itl_p99"], figures["queue_time_p50"]
        return (gap or 0.0) <= self.p99_itl and (wait or 0.0) <= self.median_scheduling_delay


@dataclass(frozen=True, repr=False)
class Capacity:
    """The highest rate (requests per second) that kept the promise, and every rate tried."""

    rate: float
    slo: SLO
    tried: dict[float, dict[str, float | None]] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float | None]:
        """The summary at that rate; empty if even the lowest rate tried broke the promise."""
        return self.tried.get(self.rate, {})

    def __repr__(self) -> str:
        return (
            f"<Capacity of {self.rate:.4g} requests/s, {len(self.tried)} rates tried: {self.slo}>"
        )


def _as_slo(limits: Any) -> SLO:
    known = [limit.name for limit in fields(SLO)]
    if not isinstance(limits, Mapping) or "p99_itl" not in limits or set(limits) - set(known):
        raise ValueError(
            f"slo={limits!r}: give an SLO, or a dict with p99_itl and, unless it is to be "
            f"{SLO.median_scheduling_delay}, median_scheduling_delay (both in seconds)"
        )
    return SLO(**limits)


def capacity(
    slo: SLO | Mapping[str, float],
    workload: Any,
    *,
    start: float = 1.0,
    tolerance: float = 0.05,
    max_doublings: int = 12,
    **arguments: Any,
) -> Capacity:
    """The highest arrival rate that meets `slo`, by doubling and then bisection.

    `workload(rate)` makes the requests, e.g. `lambda rate: poisson(rate, 300, prompt=…)`, with the
    same seed at every rate to keep the comparison fair; a `Workload` is sped up or slowed down to
    each rate. `arguments` go to `simulate`. The rate is found within `tolerance` (relative); it is
    0 if the promise is broken even at the lowest rate tried, start / 2**(max_doublings - 1).
    Method of Sarathi-Serve (Agrawal et al., OSDI 2024, section 5.1).
    """
    if not isinstance(slo, SLO):
        slo = _as_slo(slo)
    at_rate: Callable[[float], Iterable[RequestSpec]] = getattr(workload, "at_rate", workload)
    if not start > 0 or not 0 < tolerance < 1:
        raise ValueError(f"start={start} must be above 0, tolerance={tolerance} between 0 and 1")
    tried: dict[float, dict[str, float | None]] = {}

    def is_met(rate: float) -> bool:
        tried[rate] = summary(simulate(at_rate(rate), **arguments))
        return slo.is_met(tried[rate])

    good, bad = 0.0, math.inf
    rate = start
    for _ in range(max_doublings):
        if is_met(rate):
            good = rate
        else:
            bad = rate
        if good and bad < math.inf:
            break
        rate = rate * 2 if good else rate / 2
    while good > 0 and bad < math.inf and bad / good > 1 + tolerance:
        middle = math.sqrt(good * bad)
        if is_met(middle):
            good = middle
        else:
            bad = middle
    return Capacity(good, slo, tried)


def choose_chunk_size(
    target_itl: float,
    *,
    model: Any,
    gpu: Any,
    num_decodes: int = 32,
    decode_context: int = 1024,
    prompt_tokens: int = 8192,
    multiple: int = 64,
    **cost_options: Any,
) -> int:
    """The largest chunk whose mixed step still ends within `target_itl` seconds.

    The step is the worst of its prompt: its last chunk, over the longest prefix, beside
    `num_decodes` decodes of `decode_context` tokens each. Chunks are multiples of `multiple`.
    Raises ValueError if even the smallest chunk takes longer, and says what the decodes alone cost.
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple} must be at least 1")
    cost_model = CostModel(model, gpu, **cost_options)

    def seconds(chunk: int) -> float:
        pairs = chunk * (max(0, prompt_tokens - chunk) + (chunk + 1) / 2)
        rows, context = num_decodes + chunk, num_decodes * decode_context
        load = StepLoad(
            rows, num_decodes + 1, chunk, pairs, max(prompt_tokens, chunk), num_decodes, context
        )
        return sum(part.seconds for part in cost_model.parts(load))

    sizes = range(multiple, max(prompt_tokens, multiple) + 1, multiple)
    fitting = [chunk for chunk in sizes if seconds(chunk) <= target_itl]
    if not fitting:
        alone = StepLoad(
            num_decodes, num_decodes, num_decodes=num_decodes,
            decode_context=num_decodes * decode_context,
        )  # fmt: skip
        floor = sum(part.seconds for part in cost_model.parts(alone))
        raise ValueError(
            f"target_itl={target_itl} s cannot be met: a chunk of {multiple} tokens beside "
            f"{num_decodes} decodes takes {seconds(multiple):.4f} s, the decodes alone "
            f"{floor:.4f} s; raise target_itl, lower num_decodes or take a faster GPU"
        )
    return max(fitting)
