"""The results for people and for files: one table, one page per stall scene, one JSON file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.side_by_side.measures import COMPARED_TOKENS, Measure, agreement, measures
from benchmarks.side_by_side.runner import Measured, Results, baseline, ratio
from benchmarks.side_by_side.workloads import Case
from minichunk.core.trace_io import write_whole
from minichunk.viz.html import to_html

NOTE = (
    "Each cell: the median of {repeats} interleaved runs (lowest to highest), then how many times "
    "as fast minichunk is as this engine (compiled against compiled). Throughput counts output "
    "tokens from the first arrival to the last token; the longest gap is the longest wait between "
    "two tokens of those who were decoding. Greedy, fixed lengths, no prefix caching anywhere. A "
    "static batch (Transformers' generate) has no gaps: newcomers wait until it has ended."
)
DOUBTFUL = 0.4  # engines that agree share 70 to 95% on random prompts in bfloat16


def rows(results: Results) -> Iterator[list[str]]:
    """The table's cells, the head first: one row per figure, one column per engine."""
    yield ["workload", "figure", *results.engines]
    for case in results.cases:
        for place, measure in enumerate(measures(case)):
            cells = [_cell(results, name, case, measure) for name in results.engines]
            what = f"{case.name}: {case.what}" if place == 0 else ""
            yield [what, f"{measure.label}, {measure.unit}", *cells]
    every = results.engines.values()
    yield ["", "start-up, s", *(f"{m.start_seconds:.0f}" for m in every)]
    yield ["", "warm-up, s", *(f"{m.warm_up_seconds:.0f}" for m in every)]
    yield ["", "of these compiling, s", *(f"{m.compile_seconds:.0f}" for m in every)]
    yield [
        "",
        f"same first {COMPARED_TOKENS} tokens as {next(iter(results.engines), 'none')}",
        *(_percent(agreements(results, measured)) for measured in every),
    ]


def _cell(results: Results, name: str, case: Case, measure: Measure) -> str:
    values = results.engines[name].values(case, measure)
    if not values:
        return "–"
    text = f"{_number(median(values))} ({_number(min(values))} to {_number(max(values))})"
    times = ratio(results, name, case, measure)
    return text if times is None else f"{text} {times:.2f}×"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def agreements(results: Results, measured: Measured) -> float | None:
    """The share of first tokens that an engine has in common with the first one, over all cases."""
    first = next(iter(results.engines.values()))
    shares = [
        agreement(first.runs[case.name][0], measured.runs[case.name][0])
        for case in results.cases
        if first.runs.get(case.name) and measured.runs.get(case.name)
    ]
    return sum(shares) / len(shares) if shares else None


def doubts(results: Results) -> list[str]:
    """Engines that share so few tokens with the first one that they must have done other work."""
    first = next(iter(results.engines), None)
    return [
        f"{name} has only {share:.0%} of its first tokens in common with {first}: it may not have "
        "computed the same"
        for name, measured in results.engines.items()
        if (share := agreements(results, measured)) is not None and share < DOUBTFUL
    ]


def circumstances(results: Results) -> str:
    """Where, when and with what, in one paragraph."""
    options = results.options
    versions = {pair for m in results.engines.values() for pair in m.versions.items()}
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions))
    return (
        f"{datetime.date.today().isoformat()}, {cpu_name()}, {os.cpu_count()} cores, "
        f"{options.threads} threads for each engine, {options.dtype}, "
        f"model {Path(options.model).name}; Python {platform.python_version()}, {listed}."
    )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def markdown(results: Results) -> str:
    """The table as it is kept in `benchmarks/results/`."""
    head, *body = rows(results)
    lines = [
        "# minichunk beside other engines",
        circumstances(results),
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
            for line in (head, ["---", "---", *["---:"] * (len(head) - 2)], *body)
        ),
        NOTE.format(repeats=results.repeats),
        *(f"Left out: {failure}" for failure in results.failures),
        *(f"Doubtful: {doubt}." for doubt in doubts(results)),
    ]
    return "\n\n".join(lines) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """Every single figure, for other programs."""
    return {
        "circumstances": circumstances(results),
        "threads": results.options.threads,
        "dtype": results.options.dtype,
        "cpu": cpu_name(),
        "failures": results.failures,
        "doubts": doubts(results),
        "engines": {
            name: {
                "versions": measured.versions,
                "start_seconds": measured.start_seconds,
                "warm_up_seconds": measured.warm_up_seconds,
                "compile_seconds": measured.compile_seconds,
                "same_tokens": agreements(results, measured),
                "compared_with": baseline(name, list(results.engines)),
                "figures": {
                    case.name: {
                        measure.label: {
                            "unit": measure.unit,
                            "values": measured.values(case, measure),
                            "times_as_fast": ratio(results, name, case, measure),
                        }
                        for measure in measures(case)
                    }
                    for case in results.cases
                },
            }
            for name, measured in results.engines.items()
        },
    }


def write(results: Results, out: Path, json_file: str | None) -> list[Path]:
    """Write table, pages and JSON; returns what was written."""
    written = [out / "side-by-side.md"]
    write_whole(written[0], markdown(results))
    for case in results.cases:
        runs = {name: m.median_run(case) for name, m in results.engines.items()}
        traces = {name: trace for name, trace in runs.items() if trace is not None}
        if case.late is not None and traces:
            written.append(out / f"{case.name}.html")
            to_html(traces, written[-1])
    if json_file:
        written.append(Path(json_file))
        write_whole(written[-1], json.dumps(as_json(results), indent=2) + "\n")
    return written
