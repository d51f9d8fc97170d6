"""What can be said about the kernels without a GPU: all of them compiled for all targets, and read.

Run by `python -m benchmarks.kernels --static`. Each row is one kernel's machine code: shared memory
within the device's limit, no spilled registers, tensor-core instructions, 16-byte loads, and keys
that are fetched while others are computed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

from minichunk.kernels.ahead_of_time import SHARED_MEMORY, Case, Report, all_cases, compile_case

HEADER = (
    "target",
    "operation",
    "dtype",
    "head dim",
    "group",
    "block",
    "tile",
    "shared KB",
    "registers",
    "spilled",
    "tensor core",
    "wide loads",
    "verdict",
)


def compile_all(targets: list[str], processes: int) -> Iterator[tuple[str, ...]]:
    """The table's rows, in order of cases, as they become ready."""
    work = [(case, target) for target in targets for case in all_cases(target)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for rows in pool.imap(rows_of, work):
            yield from rows


def rows_of(work: tuple[Case, str]) -> list[tuple[str, ...]]:
    """Compiles one case; a compiler that gives up is a row like any other."""
    case, target = work
    try:
        return [row_of(report) for report in compile_case(case, target)]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        return [(*what(case, target), *("-",) * 6, f"FAILED {reason}")]


def what(case: Case, target: str) -> tuple[str, ...]:
    if not case.head_dim:
        return (target, case.operation, case.dtype, "-", "-", "-")
    numbers = (case.head_dim, case.group_size, case.block_size)
    return (target, case.operation, case.dtype, *map(str, numbers))


def row_of(report: Report) -> tuple[str, ...]:
    case, tile = report.case, "-"
    if report.kernel == "attention_kernel":
        chosen = case.tile(report.target)
        tile = f"{chosen.rows}x{chosen.keys}, {chosen.num_warps}w, {chosen.num_stages}s"
    operation = case.operation
    if report.kernel in ("combine_kernel", "best_of_tiles_kernel"):
        operation += " (2nd)"
    limit = SHARED_MEMORY[report.target] // 1024
    return (
        report.target,
        operation,
        *what(case, report.target)[2:],
        tile,
        f"{report.shared / 1024:.0f}/{limit}",
        str(report.registers),
        str(report.spilled),
        "+".join(report.tensor_core) or "-",
        str(report.wide_loads),
        "; ".join(report.problems()) or "ok",
    )
