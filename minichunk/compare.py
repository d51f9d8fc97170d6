"""One workload under several schedulers, side by side: the experiment this package exists for.

Every run starts from an empty block pool and an empty prefix cache, with the same seeds and the
same prompts, on one real model or on one simulated GPU. What differs is the schedule and nothing
else; that tokens stay the same is checked, not assumed.

`import minichunk` loads this file, so what it needs is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minichunk.core.request import Prompt, RequestSpec
    from minichunk.core.trace import Trace
    from minichunk.llm import LLM

WARM_UP_OUTPUT_TOKENS = 4


def compare(
    workload: Iterable[RequestSpec],
    runs: Mapping[str, Mapping[str, Any]],
    *,
    llm: LLM | None = None,
    model: Any = None,
    gpu: Any = None,
    **common: Any,
) -> Comparison:
    """Serve `workload` once per entry of `runs` (a name and its engine knobs) and compare.

    Give either `llm`, to measure on a real model, or `model` and `gpu`, to simulate. `common`
    knobs hold for every run. A real model first runs each schedule once, shortened and discarded,
    so that nobody pays for the first use of a shape.
    """
    if (llm is None) == (model is None and gpu is None) or (model is None) != (gpu is None):
        raise ValueError(
            f"llm={llm!r}, model={model!r}, gpu={gpu!r}: give either llm=, or model= and gpu="
        )
    if not isinstance(runs, Mapping) or not all(isinstance(k, Mapping) for k in runs.values()):
        raise TypeError(
            f"runs={runs!r} must be a dict of names and engine knobs, "
            'e.g. {"chunked": dict(chunk_size=512)}'
        )
    if not runs:
        raise ValueError('runs is empty: name at least one, e.g. {"chunked": dict(chunk_size=512)}')
    if iter(workload) is workload:
        workload = tuple(workload)  # a generator could be read only once
    from minichunk.sim.run import simulate

    traces = {}
    for name, knobs in runs.items():
        options = {**common, **knobs}
        if llm is None:
            trace = simulate(workload, model=model, gpu=gpu, **options)
        else:
            measure(llm, _shortened(workload), options)
            trace = measure(llm, workload, options)
        trace.meta["name"] = name
        traces[name] = trace
    return Comparison(traces)


def measure(llm: LLM, workload: Iterable[RequestSpec], options: Mapping[str, Any]) -> Trace:
    """One run on a real model, on an engine of its own."""
    engine = llm.new_engine(**options)
    if engine.vocab_size is None:
        raise ValueError("the model's engine has no vocab_size: cannot make prompts for it")
    return engine.run(workload, PromptFiller(engine.vocab_size))


class PromptFiller:
    """Turns prompt shapes into token ids: random, but the same in every run.

    Pieces with the same prefix id get the same tokens, so that shared prefixes stay shared.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self._filled = 0

    def __call__(self, spec: RequestSpec) -> Prompt:
        from minichunk.core.request import PromptShape

        prompt = spec.prompt
        if not isinstance(prompt, PromptShape):
            return tuple(prompt)
        # A closed loop's turns come in an order that depends on the schedule: name them instead.
        turn, user = getattr(spec, "turn", None), getattr(spec, "user", None)
        key = f"request {self._filled}" if turn is None else f"user {user} turn {turn}"
        self._filled += 1
        tokens: list[int] = []
        for prefix in prompt.prefix_ids:
            tokens += self._draw(f"prefix {prefix}", prompt.tokens_per_prefix_id)
        tokens += self._draw(key, max(0, prompt.length - len(tokens)))
        return tuple(tokens[: prompt.length])

    def _draw(self, key: str, count: int) -> list[int]:
        from random import Random

        return Random(f"{self.seed} {key}").choices(range(self.vocab_size), k=count)


def _shortened(workload: Iterable[RequestSpec]) -> list[RequestSpec]:
    """The same prompts with short answers, all at once: the shapes without the waiting."""
    return [
        replace(spec, arrival=0.0, output_tokens=min(spec.output_tokens, WARM_UP_OUTPUT_TOKENS))
        for spec in workload
    ]


@dataclass(frozen=True)
class Comparison:
    """The traces of a comparison, by name, and the views on them."""

    traces: dict[str, Trace]

    @property
    def same_tokens(self) -> dict[str, int | None]:
        """Request id → first position at which any run's output differs from the first run's.

        None: all the same, length included. Empty for simulated runs, which have no tokens. Of no
        use for a closed loop, where the schedule decides which question gets which id.
        """
        first, *others = (trace.requests for trace in self.traces.values())
        result: dict[str, int | None] = {}
        for request_id, record in first.items():
            if record.output_token_ids is not None:
                positions = [
                    first_difference(record.output_token_ids, _tokens_of(other, request_id))
                    for other in others
                ]
                result[request_id] = min((p for p in positions if p is not None), default=None)
        return result

    def table(self) -> Table:
        """What users feel under each scheduler: one row per run."""
        rows = [_row(name, trace) for name, trace in self.traces.items()]
        return Table(rows)

    def timeline(self, **options: Any) -> Any:
        """The interactive timeline: one pane per run on one time axis."""
        from minichunk.viz.timeline import timeline

        return timeline(self.traces, **options)

    def to_html(self, path: str | Path) -> Path:
        """The timeline as one self-contained page."""
        from minichunk.viz.html import to_html

        to_html(self.traces, path)
        return Path(path)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@dataclass(frozen=True)
class Table:
    """Rows of equal keys; prints aligned, and shows as a table in a notebook."""

    rows: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html

        head, *body = ([html.escape(cell) for cell in line] for line in self._cells())
        heading = "".join(f'<th scope="col">{cell}</th>' for cell in head)
        lines = (
            f'<tr><th scope="row">{first}</th>'
            + "".join(f"<td>{cell}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in body
        )
        return f"<table><thead><tr>{heading}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def _cells(self) -> list[list[str]]:
        if not self.rows:
            return [["no rows"]]
        return [
            list(self.rows[0]),
            *([_text(value) for value in row.values()] for row in self.rows),
        ]


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position at which two token sequences differ, in content or by ending there."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


def _tokens_of(requests: Mapping[str, Any], request_id: str) -> Sequence[int]:
    record = requests.get(request_id)
    return () if record is None else record.output_token_ids or ()


def _row(name: str, trace: Trace) -> dict[str, Any]:
    metrics = trace.metrics()
    return {
        "run": name,
        "steps": metrics.num_steps,
        "TTFT p50": _milliseconds(metrics.ttft.p50),
        "TTFT max": _milliseconds(metrics.ttft.max),
        "ITL p50": _milliseconds(metrics.itl.p50),
        "ITL p99": _milliseconds(metrics.itl.p99),
        "ITL max": _milliseconds(metrics.itl.max),
        "stalls": metrics.num_stalls,
        "tokens/s": round(metrics.throughput, 1),
        "time": f"{metrics.duration:.2f} s",
    }


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
