"""How good and how fast the simulator is: calibration, the course's scene, an hour of traffic.

Run: python benchmarks/simulator.py [--linear FILE] [--attention FILE] [--azure FILE]

Without files it prints the scene and the cost of chunk sizes. `--linear` and `--attention` are
profiles in the column format of `minichunk.sim.profiles` (`--attention` on an A100);
`--azure` is the Azure LLM inference trace, simulated whole and timed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import minichunk as mc
from minichunk.compare import Table
from minichunk.sim import calibrate, profiles
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.sim.efficiency import EFFICIENCIES


def scene() -> Table:
    """10 decodes and one long prompt, Llama-2-7B, beside what the source chapter says."""
    said = {8000: "300 ms", 32000: "1-2 s"}
    rows = []
    for gpu in ("a100-80g-sxm", "h100-sxm"):
        for prompt, chapter in said.items():
            begin = time.perf_counter()
            both = mc.compare(
                mc.workloads.stall_scene(10, prompt),
                {
                    "whole": {"policy": "continuous", "max_num_batched_tokens": 8192},
                    "chunked": {"chunk_size": 1000, "max_num_batched_tokens": 1024},
                },
                model="llama-2-7b",
                gpu=gpu,
            )
            wall = (time.perf_counter() - begin) / 2
            steps = {
                name: [step.duration for step in trace.steps if step.prefill_tokens >= 500]
                for name, trace in both.traces.items()
            }
            chunks = steps["chunked"]
            rows.append(
                {
                    "gpu": gpu,
                    "prompt": prompt,
                    "the chapter": chapter,
                    "whole": f"{steps['whole'][0] * 1e3:.0f} ms",
                    "chunks": len(chunks),
                    "mixed step": f"{min(chunks) * 1e3:.0f}-{max(chunks) * 1e3:.0f} ms",
                    "all chunks": f"{sum(chunks) * 1e3:.0f} ms",
                    "simulated in": f"{wall * 1e3:.0f} ms",
                }
            )
    return Table(rows)


def chunk_sizes(prompt: int = 8192) -> Table:
    """What a prompt costs in chunks of each size, against one step for all of it."""
    rows = []
    for gpu in ("a100-80g-sxm", "h100-sxm"):
        model = CostModel("llama-2-7b", gpu)
        row: dict[str, Any] = {"gpu": gpu}
        whole = _prefill_seconds(model, prompt, prompt)
        for chunk in (32, 64, 128, 256, 512, 1024, 2048):
            row[str(chunk)] = f"{_prefill_seconds(model, prompt, chunk) / whole:.2f}x"
        rows.append(row)
    return Table(rows)


def _prefill_seconds(model: CostModel, prompt: int, chunk: int) -> float:
    total = 0.0
    for start in range(0, prompt, chunk):
        pairs = chunk * (start + (chunk + 1) / 2)
        load = StepLoad(chunk, int(start + chunk == prompt), chunk, pairs, start + chunk)
        total += sum(part.seconds for part in model.parts(load))
    return total


def calibration(measurements: list[calibrate.Measurement]) -> None:
    """Fit each GPU family's rows anew, beside the efficiencies that the package ships."""
    for family in dict.fromkeys(row.gpu.family for row in measurements):
        rows = [row for row in measurements if row.gpu.family == family]
        found = calibrate.fit(rows, EFFICIENCIES[family])
        print(f"{family}: fitted anew, a quarter of the rows held out\n{found.table()}")
        print(found.efficiency)
        shipped = calibrate.Calibration(EFFICIENCIES[family], 0.0, 0.0, tuple(rows), ())
        print(f"{family}: as shipped, all rows\n{shipped.table()}\n")


def azure(path: str) -> None:
    workload = mc.workloads.load_azure(path)
    print(mc.workloads.describe(workload))
    begin = time.process_time()
    trace = mc.simulate(workload, model="llama-3-8b", gpu="h100-sxm")
    taken = time.process_time() - begin
    steps, scheduled = len(trace.steps), sum(s.num_decodes + 1 for s in trace.steps)
    print(
        f"simulated in {taken:.1f} s of one core: {steps:,} steps, "
        f"{steps / taken:,.0f} steps/s, {taken / scheduled * 1e6:.1f} µs per scheduled request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--linear", metavar="FILE")
    parser.add_argument("--attention", metavar="FILE")
    parser.add_argument("--azure", metavar="FILE")
    files = parser.parse_args()
    print(f"{scene.__doc__}\n{scene()}\n")
    print(f"{chunk_sizes.__doc__}\n{chunk_sizes()}\n")
    measurements = profiles.read_linear_layers(files.linear) if files.linear else []
    if files.attention:
        measurements += profiles.read_attention(files.attention, "a100-80g-pcie")
    if measurements:
        calibration(measurements)
    if files.azure:
        azure(files.azure)


if __name__ == "__main__":
    main()
