"""What scheduling costs, in microseconds of pure Python per scheduled request and step.

`python -m benchmarks.scheduler` prints two tables: the scheduler alone with 256 decoding requests
and ever more waiting, and a whole engine step with an executor that does nothing. Medians over many
steps of the CPU time, with the spread between the quartiles; ratios are against the first row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence

from minichunk.core.clock import VirtualClock
from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine
from minichunk.core.plan import StepPlan, StepResult
from minichunk.core.request import PromptShape, Request, SamplingParams
from minichunk.core.scheduler import Scheduler

NUM_DECODING = 256
NUM_BLOCKS = 200_000
PARAMS = SamplingParams(max_tokens=10**9, temperature=0.0, seed=0)


def decoding_scheduler(
    num_waiting: int, policy: str = "decode-first", order: str = "fcfs"
) -> Scheduler:
    """A scheduler with 256 requests decoding, all slots taken, and others waiting."""
    config = EngineConfig(
        policy=policy, order=order, max_num_seqs=NUM_DECODING, num_blocks=NUM_BLOCKS
    )
    scheduler = Scheduler(config, NUM_BLOCKS)
    for index in range(NUM_DECODING):
        scheduler.add(_request(index))
    while scheduler.num_waiting or not all(r.is_decoding for r in scheduler.running.values()):
        _apply(scheduler, scheduler.schedule())
    for index in range(num_waiting):
        scheduler.add(_request(NUM_DECODING + index))
    return scheduler


def seconds_per_request(scheduler: Scheduler, num_steps: int) -> list[float]:
    """The time of `Scheduler.schedule`, per decode scheduled, in each of some steps."""
    seconds = []
    for _ in range(num_steps):
        start = time.process_time()
        plan = scheduler.schedule()
        seconds.append((time.process_time() - start) / len(plan.chunks))
        _apply(scheduler, plan)
    return seconds


def engine_seconds_per_token(num_steps: int) -> tuple[list[float], list[float]]:
    """The time of `Engine.step` per token, in all and without `Scheduler.schedule`.

    The executor's own time is left out.
    """
    executor = _NullExecutor()
    config = EngineConfig(num_blocks=NUM_BLOCKS)
    engine = Engine(executor, config, clock=VirtualClock())
    for _ in range(NUM_DECODING):
        engine.add_request(PromptShape(32), PARAMS)
    whole, apart = [], []
    for step in range(num_steps + 20):
        start = time.process_time()
        engine.step()
        seconds = time.process_time() - start - executor.seconds
        if step >= 20:  # all are decoding by now
            whole.append(seconds / NUM_DECODING)
            apart.append((seconds - engine.trace.steps[-1].scheduling_time) / NUM_DECODING)
    return whole, apart


class _NullExecutor:
    seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.process_time()
        result = StepResult({chunk.request_id: 0 for chunk in plan.chunks if chunk.sampling}, 0.01)
        self.seconds = time.process_time() - start
        return result


def _request(index: int) -> Request:
    return Request(str(index), PromptShape(32), PARAMS, tenant=f"t{index % 4}", index=index)


def _apply(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(plan)
    for chunk in plan.chunks:
        if chunk.sampling is not None:
            scheduler.running[chunk.request_id].output_token_ids.append(0)


def _scheduler_measurements(steps: int) -> Iterator[tuple[str, list[float]]]:
    for num_waiting in (10, 100, 1_000, 10_000, 100_000):
        scheduler = decoding_scheduler(num_waiting)
        yield f"fcfs, {num_waiting:,} waiting", seconds_per_request(scheduler, steps)
    for order in ("priority", "fair", "shortest", "deadline"):
        scheduler = decoding_scheduler(10, order=order)
        yield f"{order}, 10 waiting", seconds_per_request(scheduler, steps)


def _rows(named: Iterable[tuple[str, Sequence[float]]]) -> list[str]:
    lines, first = [], None
    for name, seconds in named:
        low, middle, high = (value * 1e6 for value in statistics.quantiles(seconds, n=4))
        first = first or middle
        lines.append(f"{name:<34}{middle:8.2f}   {low:5.2f} to {high:5.2f}{middle / first:10.2f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What scheduling costs per scheduled request.")
    parser.add_argument("--steps", type=int, default=300, help="steps per row")
    steps = parser.parse_args(arguments).steps
    head = f"{'':<34}{'µs':>8}   {'quartiles':>14}{'ratio':>8}"
    print(f"Scheduler.schedule with {NUM_DECODING} decoding, per scheduled request\n{head}")
    print("\n".join(_rows(_scheduler_measurements(steps))))
    whole, apart = engine_seconds_per_token(steps)
    print(f"\nEngine.step with {NUM_DECODING} decoding, per token, without the executor\n{head}")
    print("\n".join(_rows([("in all", whole), ("without Scheduler.schedule", apart)])))


if __name__ == "__main__":
    main()
