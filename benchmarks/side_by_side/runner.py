"""Runs every engine on every case, in turn: round by round, so that a slow minute hits them all.

Each round starts every engine anew, alone on the machine, and another one first; it serves the
shortened cases once before anything counts. Engines that stay loaded side by side are not
comparable: on a virtual machine a worker that gave 178 tokens/s when it had just started gave 138
to 150 after 20 seconds of idling while another one started, and three equal workers 106, 167 and
191 in the order of their starts, round after round. An engine that fails is named, with the reason,
and the others go on.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.client import Worker, WorkerError
from benchmarks.side_by_side.engines import ENGINES, interpreter
from benchmarks.side_by_side.measures import Measure, measures
from benchmarks.side_by_side.workloads import Case
from minichunk.core.trace import Trace


@dataclass
class Measured:
    """What is known of one engine: its runs by case, and what it took to get it going."""

    versions: dict[str, str]
    start_seconds: float
    warm_up_seconds: float = 0.0
    compile_seconds: float = 0.0
    runs: dict[str, list[Trace]] = field(default_factory=dict)

    def values(self, case: Case, measure: Measure) -> list[float]:
        return [measure.of(trace) for trace in self.runs.get(case.name, [])]

    def median_run(self, case: Case) -> Trace | None:
        """The run whose first figure is the median (of an even number, the lower one)."""
        first = measures(case)[0]
        ranked = sorted(self.runs.get(case.name, []), key=first.of)
        return ranked[(len(ranked) - 1) // 2] if ranked else None


@dataclass
class Results:
    """All that was measured, and the engines that could not be, with the reasons."""

    cases: list[Case]
    options: Options  # of the first engine; sizes, dtype and threads are everybody's
    repeats: int
    engines: dict[str, Measured]
    failures: list[str]


def run(
    engines: Sequence[str],
    cases: Sequence[Case],
    options: Callable[[str], Options],
    *,
    repeats: int,
    out: Path,
    vllm_python: str | None,
    say: Callable[[str], None],
) -> Results:
    """Measure. Writes `traces/` and `logs/` into `out`."""
    for folder in ("traces", "logs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    results = Results(list(cases), options(engines[0]), repeats, {}, [])
    left = list(engines)
    with tempfile.TemporaryDirectory("-bench", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        for repeat in range(1, repeats + 1):
            for name in rotated(left, repeat - 1):
                say(f"round {repeat} of {repeats}: starting {name}")
                try:
                    worker = _started(name, options(name), out, scratch, vllm_python)
                    with contextlib.closing(worker):
                        _measure(worker, results, repeat, out, scratch, say)
                except (WorkerError, ValueError, OSError) as error:
                    results.failures.append(str(error))
                    say(f"left out: {error}")
                    left.remove(name)
    return results


def rotated(names: list[str], places: int) -> list[str]:
    """Another one begins each round: who runs first finds the machine in another state."""
    places %= max(1, len(names))
    return names[places:] + names[:places]


def _started(
    name: str, options: Options, out: Path, scratch: Path, vllm_python: str | None
) -> Worker:
    """Compiled code is kept in `scratch`: empty in the first round, whose seconds are reported."""
    python = interpreter(name, vllm_python)
    return Worker(options, python, out / "logs" / f"{name}.log", scratch / name)


def _measure(
    worker: Worker,
    results: Results,
    repeat: int,
    out: Path,
    scratch: Path,
    say: Callable[[str], None],
) -> None:
    """One engine's round: the warm-up, then each case once."""
    fresh = _warmed_up(worker, results.cases, scratch)
    measured = results.engines.setdefault(worker.name, fresh)  # start-up of the first round
    for case in results.cases:
        trace = worker.run(case, out / "traces" / f"{worker.name}-{case.name}-{repeat}.jsonl")
        measured.runs.setdefault(case.name, []).append(trace)
        figures = _figures(case, trace)
        say(f"round {repeat} of {results.repeats}: {case.name} {worker.name}: {figures}")
    if repeat == 1:
        measured.compile_seconds = worker.compile_seconds


def _warmed_up(worker: Worker, cases: Sequence[Case], scratch: Path) -> Measured:
    """Every case once, shortened: nobody pays for the first use of a shape in a run that counts."""
    started = time.perf_counter()
    for case in cases:
        worker.run(case.shortened(), scratch / "warm-up.jsonl")
    seconds = time.perf_counter() - started
    return Measured(worker.versions, worker.start_seconds, seconds, worker.compile_seconds)


def _figures(case: Case, trace: Trace) -> str:
    return ", ".join(f"{m.label} {m.of(trace):.3g} {m.unit}" for m in measures(case))


def baseline(name: str, engines: Sequence[str]) -> str | None:
    """The minichunk that an engine is compared with: compiled with compiled, eager with eager."""
    wanted = "minichunk-compiled" if ENGINES[name].compiled else "minichunk"
    return wanted if wanted in engines and not name.startswith("minichunk") else None


def ratio(results: Results, name: str, case: Case, measure: Measure) -> float | None:
    """How many times as fast as this engine minichunk is, by medians."""
    ours = baseline(name, list(results.engines))
    if ours is None:
        return None
    mine = results.engines[ours].values(case, measure)
    theirs = results.engines[name].values(case, measure)
    return measure.times_as_good(median(mine), median(theirs)) if mine and theirs else None
