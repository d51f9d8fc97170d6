"""`minichunk bench`: from the arguments to the results."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.side_by_side import report
from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.engines import ENGINES, chosen_engines, usable_cores
from benchmarks.side_by_side.runner import Results, run
from benchmarks.side_by_side.workloads import Case, cases
from minichunk.model.config import ModelConfig
from minichunk.model.resolve import resolve_model
from minichunk.model.weights import SafetensorsFolder


def bench(arguments: Namespace) -> None:
    """Measure the engines side by side, print one table, write table, traces and pages."""
    engines = with_compiled(chosen_engines(_listed(arguments.engines)), arguments.compiled)
    folder, config = model_folder(arguments.model)
    chosen = cases(_listed(arguments.workloads), config.vocab_size, arguments.seed)
    options = options_for(chosen, folder, config, arguments.dtype, arguments.threads)
    out = Path(arguments.out)

    progress = Console(stderr=True)
    results = run(
        engines,
        chosen,
        lambda name: replace(options, engine=name, compiled=ENGINES[name].compiled),
        repeats=arguments.repeats,
        out=out,
        vllm_python=arguments.vllm_python,
        say=lambda line: progress.print(line, style="dim", highlight=False, markup=False),
    )
    if not results.engines:
        raise ValueError(f"no engine could be measured: {'; '.join(results.failures)}")
    console = Console()
    show(results, console)
    for path in report.write(results, out, arguments.json):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    console.print(f"traces: {out / 'traces'}", highlight=False, soft_wrap=True)


def with_compiled(engines: list[str], wanted: bool) -> list[str]:
    """The engines, and the compiled modes of those that have one."""
    also = [f"{name}-compiled" for name in engines] if wanted else []
    return chosen_engines([*engines, *(name for name in also if name in ENGINES)])


def show(results: Results, console: Console) -> None:
    head, *body = report.rows(results)
    table = Table(box=box.SIMPLE_HEAD)
    for place, cell in enumerate(head):
        table.add_column(cell, justify="left" if place < 2 else "right", overflow="fold")
    for line in body:
        table.add_row(*line)
    console.print(report.circumstances(results), highlight=False)
    console.print(table)
    console.print(report.NOTE.format(repeats=results.repeats), style="dim", highlight=False)
    left_out = [f"left out: {failure}" for failure in results.failures]
    for remark in [*left_out, *report.doubts(results)]:
        console.print(remark, style="yellow", highlight=False, markup=False)


def model_folder(model: str) -> tuple[Path, ModelConfig]:
    """The folder that every engine loads; a model that has none cannot be compared."""
    resolved = resolve_model(model)
    if not isinstance(resolved.tensors, SafetensorsFolder):
        raise ValueError(
            f"{model}: other engines need a folder with config.json and safetensors, and this "
            f"model comes as {resolved.origin}. {resolved.notice}"
        )
    return Path(resolved.tensors.description), resolved.config


def options_for(
    chosen: list[Case], folder: Path, config: ModelConfig, dtype: str, threads: int | None
) -> Options:
    """Sizes that fit every case, so that nobody preempts; the same for every engine."""
    longest = max(case.longest for case in chosen)
    if longest > config.max_model_len:
        raise ValueError(
            f"the longest request has {longest} tokens, the model has room for "
            f"{config.max_model_len}: choose other workloads or another model"
        )
    return Options(
        engine="",
        model=str(folder),
        dtype=dtype,
        threads=threads or len(usable_cores()),
        compiled=False,
        max_budget=max(case.budget for case in chosen),
        max_num_seqs=max(case.num_requests for case in chosen),
        max_model_len=longest,
        kv_tokens=max(case.num_tokens for case in chosen),
    )


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
