"""What scheduling costs, in microseconds of pure Python per scheduled request and step.

    python -m benchmarks.scheduler
    python -m benchmarks.scheduler --vllm-python PYTHON --out benchmarks/results/scheduler.md

Three tables: the scheduler alone against queue length, order and batch; a whole engine step with an
executor that does nothing; simulated steps per second. With the Python of an environment that has
vLLM (`--vllm-python`, or MINICHUNK_VLLM_PYTHON), vLLM's scheduler is driven alone beside ours: the
same batches, prompts of 32 token ids and budget, prefix caching off in both, in alternating rounds.

What each side does. `schedule`: both decide the step and allocate blocks. Ours also copies each
request's whole block table and its token ids into the plan, and notes why others wait; vLLM's sends
only what is new, advances `num_computed_tokens` already, and looks on the way after speculative
tokens, encoder inputs, LoRA, KV connectors and hybrid caches, none of which minichunk has. After
the step, vLLM's `update_from_output` appends the tokens, checks for stops and makes one output
object a request. "Bookkeeping" here is `Scheduler.apply` and appending the tokens; the row
"Engine.step" is the like of it in full: stop checks, token events, and the trace, which vLLM has
not; nobody waits there on our side. vLLM's is its synchronous `Scheduler`, without statistics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minichunk as mc
from minichunk.core.clock import VirtualClock
from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine
from minichunk.core.plan import StepPlan, StepResult
from minichunk.core.request import Request, SamplingParams
from minichunk.core.scheduler import Scheduler

NUM_DECODING = 256
NUM_BLOCKS = 200_000
BUDGET = 2048
PROMPT = (0,) * 32
PARAMS = SamplingParams(max_tokens=10**9, temperature=0.0, seed=0)
SHAPES = [(16, 10), (64, 10), *((256, n) for n in (10, 100, 1_000, 10_000, 100_000))]
Rows = list[tuple[str, ...]]


def decoding_scheduler(
    num_waiting: int, order: str = "fcfs", num_decoding: int = NUM_DECODING
) -> Scheduler:
    """A scheduler with requests decoding, all slots taken, and others waiting."""
    scheduler = Scheduler(_config(num_decoding, order), NUM_BLOCKS)
    for index in range(num_decoding):
        scheduler.add(_request(index))
    while scheduler.num_waiting or not all(r.is_decoding for r in scheduler.running.values()):
        _apply(scheduler, scheduler.schedule())
    for index in range(num_waiting):
        scheduler.add(_request(num_decoding + index))
    return scheduler


@dataclass
class Times:
    """Seconds per scheduled request: of the scheduling alone, and of what follows the step."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [a + b for a, b in zip(self.schedule, self.update, strict=True)]


def measure(scheduler: Scheduler, num_steps: int) -> Times:
    """`Scheduler.schedule`, then the bookkeeping, per decode scheduled, in each of some steps."""
    times = Times()
    for _ in range(num_steps):
        start = time.process_time()
        plan = scheduler.schedule()
        scheduled = time.process_time()
        _apply(scheduler, plan)
        times.schedule.append((scheduled - start) / len(plan.chunks))
        times.update.append((time.process_time() - scheduled) / len(plan.chunks))
    return times


def engine_seconds(num_steps: int, batch: int = NUM_DECODING) -> list[float]:
    """The time of `Engine.step` per token; the executor's own time is left out."""
    executor = _NullExecutor()
    engine = Engine(executor, _config(batch), clock=VirtualClock())
    for _ in range(batch):
        engine.add_request(PROMPT, PARAMS)
    seconds = []
    for step in range(num_steps + 20):
        start = time.process_time()
        engine.step()
        taken = time.process_time() - start - executor.seconds
        if step >= 20:  # all are decoding by now
            seconds.append(taken / batch)
    return seconds


class Vllm:
    """vLLM's scheduler in a child process: one JSON order a line, one JSON answer a line."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("scheduler_vllm.py")
        pipe = subprocess.PIPE
        # -I: the files beside the script must not hide packages of the same name.
        command = [python, "-I", str(script)]
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.version = self._read()["version"]

    def measure(self, batch: int, waiting: int, steps: int) -> Times:
        assert self.child.stdin is not None
        order = {"batch": batch, "waiting": waiting, "steps": steps}
        order.update(budget=BUDGET, blocks=NUM_BLOCKS)
        print(json.dumps(order), file=self.child.stdin, flush=True)
        answer = self._read()
        return Times(*([s / batch for s in answer[name]] for name in ("schedule", "update")))

    def close(self) -> None:
        self.child.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's scheduler ended with status {self.child.wait()}: see above")
        return dict(json.loads(line))


def beside_vllm(vllm: Vllm, steps: int, rounds: int = 5) -> Rows:
    """Ours and vLLM's in alternating rounds, for each shape."""
    rows: Rows = []
    for batch, waiting in SHAPES:
        scheduler = decoding_scheduler(waiting, num_decoding=batch)
        ours, theirs, whole = Times(), Times(), list[float]()
        for _ in range(rounds):
            for times, new in (
                (ours, measure(scheduler, steps // rounds)),
                (theirs, vllm.measure(batch, waiting, steps // rounds)),
            ):
                times.schedule += new.schedule
                times.update += new.update
            whole += engine_seconds(steps // rounds, batch)
        shape = f"{batch} decoding, {waiting:,} waiting"
        for name, one, two in (
            ("schedule", ours.schedule, theirs.schedule),
            ("with bookkeeping", ours.both, theirs.both),
            ("Engine.step", whole, theirs.both),
        ):
            ratio = statistics.median(two) / statistics.median(one)
            rows.append((shape, name, *_spread(one), *_spread(two), f"{ratio:.1f}"))
            print(*rows[-1], sep="  ", flush=True)
    return rows


def alone(steps: int) -> Iterator[tuple[str, list[float]]]:
    for order in ("fcfs", "priority", "fair", "shortest", "deadline"):
        yield f"{order}, 10 waiting", measure(decoding_scheduler(10, order), steps).schedule
    for num_waiting in (100, 1_000, 10_000, 100_000):
        seconds = measure(decoding_scheduler(num_waiting), steps).schedule
        yield f"fcfs, {num_waiting:,} waiting", seconds
    yield "Engine.step in all", engine_seconds(steps)


def simulated(seed: int = 0) -> Rows:
    """Simulated steps per second of CPU time: many decodes, and long prompts with short answers."""
    kinds = {
        "decode-heavy: 200 requests of 64 + 400": (50, 64, 400),
        "prefill-heavy: 200 requests of 4,000 + 8": (10, 4000, 8),
    }
    rows: Rows = []
    for name, (rate, prompt, output) in kinds.items():
        workload = mc.workloads.poisson(rate, 200, prompt=prompt, output=output, seed=seed)
        start = time.process_time()
        trace = mc.simulate(workload, model="llama-3-8b", gpu="h100-sxm")
        taken, steps = time.process_time() - start, len(trace.steps)
        prefills = sum(span.kind == "prefill" for span in trace.spans)
        scheduled = prefills + sum(step.num_decodes for step in trace.steps)
        per_request = f"{taken / scheduled * 1e6:.1f}"
        rows.append((name, f"{steps:,}", f"{steps / taken:,.0f}", per_request))
    return rows


class _NullExecutor:
    seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.process_time()
        result = StepResult({chunk.request_id: 0 for chunk in plan.chunks if chunk.sampling}, 0.01)
        self.seconds = time.process_time() - start
        return result


def _config(batch: int, order: str = "fcfs") -> EngineConfig:
    return EngineConfig(
        order=order,
        max_num_seqs=batch,
        max_num_batched_tokens=BUDGET,
        num_blocks=NUM_BLOCKS,
        prefix_caching=False,
    )


def _request(index: int) -> Request:
    return Request(str(index), PROMPT, PARAMS, tenant=f"t{index % 4}", index=index)


def _apply(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(plan)
    for chunk in plan.chunks:
        if chunk.sampling is not None:
            scheduler.running[chunk.request_id].output_token_ids.append(0)


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    low, middle, high = (value * 1e6 for value in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What scheduling costs per scheduled request.")
    parser.add_argument("--steps", type=int, default=300, help="steps per row")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("MINICHUNK_VLLM_PYTHON"),
        help="the Python of an environment with vLLM, whose scheduler is then measured too",
    )
    parser.add_argument("--out", type=Path, help="write a Markdown file, as in benchmarks/results/")
    options = parser.parse_args(arguments)
    where = f"{datetime.date.today()}, {processor()}, Python {platform.python_version()}"
    text = []
    if options.vllm_python:
        vllm = Vllm(options.vllm_python)
        where += f", vLLM {vllm.version}"
        header = ("shape", "what", "minichunk µs", "quartiles", "vLLM µs", "quartiles", "ratio")
        text.append(table(header, beside_vllm(vllm, options.steps)))
        vllm.close()
    rows = [(name, *_spread(seconds)) for name, seconds in alone(options.steps)]
    title = f"minichunk alone, {NUM_DECODING} decoding"
    text.append(table((title, "µs", "quartiles"), rows))
    header = ("simulated, Llama-3-8B on an H100", "steps", "steps/s", "µs per scheduled request")
    text.append(table(header, simulated()))
    intro = f"{where}. Per scheduled request and step, CPU time; see `benchmarks/scheduler.py`."
    page = "\n\n".join(["# What scheduling costs", intro, *text])
    print(page)
    if options.out:
        scratch = options.out.with_suffix(".part")
        scratch.write_text(page + "\n")
        os.replace(scratch, options.out)


if __name__ == "__main__":
    main()
