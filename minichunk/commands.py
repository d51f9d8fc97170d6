"""The small commands: generate, simulate, timeline, export, bench, lab.

Each takes the parsed arguments and prints; what it prints comes from a trace or from the library,
never from a second implementation. Errors are raised and told by `cli.main`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minichunk.console import milliseconds, side_by_side
from minichunk.core.config import EngineConfig
from minichunk.core.policies import parse_spelling, resolve_policy
from minichunk.core.request import SamplingParams
from minichunk.core.stalls import STALL_FACTOR, STALL_SLO
from minichunk.core.trace import Trace

if TYPE_CHECKING:
    from minichunk.workloads import Workload

WORDS = (
    "TTFT: from arrival to the first token. ITL: the gap between two tokens.\n"
    f"Stall: a gap above {STALL_FACTOR:g} decode steps and above {STALL_SLO * 1e3:g} ms."
)


def simulate(arguments: Namespace) -> None:
    """One simulated run per policy, side by side."""
    from rich.console import Console

    from minichunk.compare import compare
    from minichunk.sim.hardware import get_gpu
    from minichunk.sim.shapes import get_shape
    from minichunk.viz.columns import policy_line
    from minichunk.workloads import describe

    shape, gpu = get_shape(arguments.model), get_gpu(arguments.gpu)
    workload = workload_from(arguments.workload, limit=arguments.limit)
    runs = {spelling: {"policy": spelling} for spelling in split_policies(arguments.policy)}
    options = {**engine_options(arguments), "tensor_parallel": arguments.tensor_parallel}
    options.pop("policy", None)
    both = compare(workload, runs, model=shape, gpu=gpu, **options)

    console = Console()
    devices = f"{arguments.tensor_parallel} × " if arguments.tensor_parallel > 1 else ""
    console.print(f"simulated: {shape.name} on {devices}{gpu.name}", highlight=False)
    console.print(describe(workload), highlight=False)
    meta = next(iter(both.traces.values())).meta
    console.print(f"order {policy_line({**meta, 'policy': None})}", highlight=False)
    console.print(side_by_side(both.table()))
    console.print(WORDS, style="dim", highlight=False)
    for name, trace in both.traces.items():
        console.print(f"{name}: {longest_stall(trace)}", highlight=False, soft_wrap=True)
    if arguments.trace:
        for name, trace in both.traces.items():
            path = trace_path(Path(arguments.trace), name, len(both.traces))
            console.print(f"wrote {trace.save(path)}", highlight=False, soft_wrap=True)
    if arguments.html:
        both.to_html(arguments.html)
        console.print(f"wrote {arguments.html}", highlight=False, soft_wrap=True)


def generate(arguments: Namespace) -> None:
    """Stream an answer, token by token as the engine makes it."""
    from minichunk.llm import LLM

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
    )
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    llm = LLM(arguments.model, device=arguments.device, dtype=arguments.dtype, max_num_seqs=1)
    raw = arguments.raw or not getattr(llm.tokenizer, "chat_template", None)
    prompt = llm.encode(text) if raw else llm.encode_chat([{"role": "user", "content": text}])
    for event in llm.stream(prompt, params):
        print(event.text, end="", flush=True)
    print()
    metrics = llm.trace.metrics()
    print(
        f"[{len(prompt)} + {metrics.output_tokens} tokens, time to first token "
        f"{milliseconds(metrics.ttft.p50)}, {metrics.throughput:.1f} tokens/s]",
        file=sys.stderr,
    )


def timeline(arguments: Namespace) -> None:
    """Saved traces as one page."""
    from minichunk.viz.html import to_html

    traces: dict[str, Trace] = {}
    for path in map(Path, arguments.traces):
        trace = Trace.load(path)
        name = str(trace.meta.get("name") or path.stem)
        traces[f"{name} ({path})" if name in traces else name] = trace
    output = arguments.output or str(Path(arguments.traces[0]).with_suffix(".html"))
    to_html(traces, output)
    print(f"wrote {output}")


def export(arguments: Namespace) -> None:
    """A configuration in another engine's flags."""
    from minichunk.export import export as translate

    config = EngineConfig.make(**engine_options(arguments))
    print(translate(config, arguments.engine, arguments.model))


def bench(arguments: Namespace) -> None:
    """Measure engines side by side; the benchmark lives beside the package, in a checkout."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "side_by_side").is_dir():
        raise FileNotFoundError(
            f"no folder benchmarks/side_by_side in {checkout}: the benchmark is not part of the "
            "installed package; use a clone of minichunk, installed with `pip install -e .`"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    importlib.import_module("benchmarks.side_by_side.command").bench(arguments)


def lab(arguments: Namespace) -> None:
    """Copy the notebooks, leave those that are there already, open JupyterLab."""
    source = notebooks_folder()
    target = Path(arguments.to)
    target.mkdir(parents=True, exist_ok=True)
    for notebook in sorted([*source.glob("*.ipynb"), *source.glob("*.md")]):
        place = target / notebook.name
        if place.exists():
            print(f"kept {place}, which you may have worked on")
        else:
            shutil.copyfile(notebook, place)
            print(f"copied {place}")
    if not arguments.copy_only:
        subprocess.run([sys.executable, "-m", "jupyterlab", str(target)], check=False)


def notebooks_folder() -> Path:
    """Where the notebooks are: packaged with minichunk, or beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "notebooks", package.parent / "notebooks"):
        if any(folder.glob("*.ipynb")):
            return folder
    raise FileNotFoundError(
        f"no notebooks in {package / 'notebooks'} nor in {package.parent / 'notebooks'}: "
        "run this from a checkout of minichunk that has them"
    )


# What the arguments mean ------------------------------------------------------------------------


def engine_options(arguments: Namespace) -> dict[str, Any]:
    """The engine's knobs among the arguments, and the preset."""
    known = {field.name for field in fields(EngineConfig)} | {"preset"}
    return {name: value for name, value in vars(arguments).items() if name in known}


def split_policies(text: str) -> list[str]:
    """`"a,b(x=1, y=2)"` as `["a", "b(x=1, y=2)"]`; each must be known, and named once."""
    spellings, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            spellings.append("")
        else:
            spellings[-1] += character
    spellings = [str(resolve_policy(spelling.strip())) for spelling in spellings]
    if len(set(spellings)) < len(spellings):
        raise ValueError(f"--policy {text}: name each policy once")
    return spellings


def workload_from(text: str, limit: int | None = None) -> Workload:
    """A workload from its spelling: `scene(num_decodes=20)`, `azure:FILE`, …"""
    from minichunk import workloads

    kind, colon, path = text.partition(":")
    loaders: dict[str, Callable[..., Workload]] = {
        "azure": workloads.load_azure,
        "sharegpt": lambda path, limit: workloads.load_sharegpt_lengths(path, rate=1, limit=limit),
        "mooncake": workloads.load_mooncake,
    }
    if colon and kind in loaders:
        return loaders[kind](path, limit=limit)
    makers: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "scene": (workloads.stall_scene, {}),
        "poisson": (workloads.poisson, {"rate": 2.0, "num_requests": 100}),
        "bursty": (workloads.bursty, {"rate": 2.0, "num_requests": 100}),
        "closed-loop": (workloads.closed_loop, {"num_users": 16, "requests_per_user": 4}),
    }
    name, parameters = parse_spelling(text)
    if name not in makers:
        raise ValueError(
            f"unknown workload {text!r}; known: {', '.join(makers)}, "
            + ", ".join(f"{kind}:FILE" for kind in loaders)
        )
    maker, defaults = makers[name]
    known = list(inspect.signature(maker).parameters)
    unknown = [key for key in parameters if key not in known]
    if unknown:
        raise ValueError(f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    for key, value in parameters.items():
        if isinstance(value, tuple):
            parameters[key] = workloads.Lengths(*value)
    try:
        made: Workload = maker(**{**defaults, **parameters})
    except TypeError as error:
        raise ValueError(f"workload {text!r}: {error}") from None
    return made


def trace_path(path: Path, name: str, num_runs: int) -> Path:
    """Where a run's trace goes: the path itself, or one per run with its name in it."""
    return path if num_runs == 1 else path.with_name(f"{path.stem}-{file_name(name)}.jsonl")


def file_name(name: str) -> str:
    """A run's name as part of a file's: letters, digits, dots, single hyphens."""
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def longest_stall(trace: Trace) -> str:
    """The longest stall in one sentence, or that there was none."""
    stall = max(trace.stalls(), key=lambda stall: stall.gap, default=None)
    return "no stall" if stall is None else stall.describe()
