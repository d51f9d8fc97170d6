"""The kernels without the engine: their times on a GPU, or their machine code without one.

Run: python -m benchmarks.kernels            on a GPU: times, as a share of each kernel's floor
     python -m benchmarks.kernels --static   anywhere: machine code for GPUs that are not there
     TRITON_INTERPRET=1 python -m benchmarks.kernels --dry-run   tiny shapes on a CPU: outputs only

What the columns mean is said in `kernels_timed.py` and `kernels_static.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from minichunk.kernels.ahead_of_time import TARGETS


def heading(name: str) -> str:
    import triton

    today = datetime.date.today().isoformat()
    return f"{today}, {name}; torch {torch.__version__}, Triton {triton.__version__}"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(text + "\n")
    os.replace(scratch, path)
    print(f"written to {path}")


def run_static(targets: list[str], processes: int, out: Path | None) -> int:
    from benchmarks.kernels_static import HEADER, compile_all

    print(table(HEADER, []), flush=True)
    rows = []
    for row in compile_all(targets, processes):
        rows.append(row)
        print("| " + " | ".join(row) + " |", flush=True)
    bad = [row for row in rows if row[-1] != "ok"]
    summary = f"{len(rows)} kernels, {len(bad)} with problems"
    print(summary)
    if out:
        title = "# The kernels' machine code, compiled without a GPU"
        text = f"{heading('compiled for ' + ', '.join(targets))}. {summary}."
        write(out, f"{title}\n\n{text}\n\n{table(HEADER, rows)}")
    return 1 if bad else 0


def run_timed(only: list[str], dry_run: bool, out: Path | None) -> int:
    from benchmarks.kernels_timed import HEADER, Machine, sections

    device = torch.device("cpu" if dry_run else "cuda:0")
    machine = Machine.measure(device)
    name = "dry run on a CPU" if dry_run else torch.cuda.get_device_name()
    text = [f"# Kernels against their floors\n\n{heading(name)}."]
    if not dry_run:
        text.append(
            f"Measured: copy {machine.bytes_per_second / 1e12:.2f} TB/s, bfloat16 product "
            f"{machine.flops_per_second / 1e12:.0f} TFLOP/s."
        )
    for section, rows in sections(machine, dry_run).items():
        if only and section not in only:
            continue
        cells = [row.cells(machine) for row in rows]
        text.append(table((section, *HEADER), cells))
        print(text[-1], flush=True)
    if out:
        write(out, "\n\n".join(text))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--static", action="store_true", help="compile for absent GPUs and read")
    parser.add_argument("--targets", default=",".join(TARGETS), help="with --static")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="with --static")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, no times")
    parser.add_argument("--only", default="", help="sections: decode,chunk,mixed,small")
    parser.add_argument("--out", type=Path, help="write a Markdown file, as in benchmarks/results/")
    options = parser.parse_args()
    if options.static:
        return run_static(options.targets.split(","), options.processes, options.out)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "no GPU here: nothing can be timed. --static compiles the kernels for GPUs that are "
            "not here, and --dry-run (with TRITON_INTERPRET=1) runs this file on tiny shapes",
            file=sys.stderr,
        )
        return 2
    return run_timed([s for s in options.only.split(",") if s], options.dry_run, options.out)


if __name__ == "__main__":
    sys.exit(main())
