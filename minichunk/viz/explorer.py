"""The scheduler explorer: turn a knob, see the stall come and go at once.

Ipywidgets around the simulator and one timeline: every change simulates the scene anew and updates
the same widget. Two schedulers can stand side by side, or one beside a trace from a file. A curve
shows what every chunk size would give, with today's choice marked on it.
"""

from __future__ import annotations

import asyncio
import html
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from minichunk import workloads
from minichunk.core import orders, policies
from minichunk.core.metrics import Metrics
from minichunk.core.trace import Trace, TraceError
from minichunk.sim.hardware import GPUS
from minichunk.sim.run import simulate
from minichunk.sim.shapes import MODELS
from minichunk.viz.columns import duration
from minichunk.viz.curve import Point, curve_svg
from minichunk.viz.timeline import Timeline, completed

CHUNK_SIZES = (64, 128, 256, 512, 1000, 1024, 2048, 4096, None)
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NO_LIMIT = 0  # a slider's value cannot be None
PROMPTS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
# The curve is a luxury: it waits until the reader's hand rests, and then comes point by point.
CURVE_DELAY = 0.4
KEPT_RUNS = 8


@dataclass(frozen=True)
class Scene:
    """What is served, and on what: the course's scene on a modelled GPU."""

    num_decodes: int = 10
    prompt_tokens: int = 8000
    model: str = "llama-2-7b"
    gpu: str = "a100-80g-sxm"


@dataclass(frozen=True)
class Setting:
    """One scheduler: the knobs that the explorer turns."""

    policy: str = "decode-first"
    order: str = "fcfs"
    chunk_size: int | None = 512
    budget: int = 1024

    def label(self) -> str:
        chunk = "no chunk limit" if self.chunk_size is None else f"chunk {self.chunk_size:,}"
        return f"{self.policy}, {self.order}, {chunk}, budget {self.budget:,}"


WHOLE_PROMPTS = Setting("continuous", "fcfs", None, 8192)


def run(scene: Scene, setting: Setting) -> Trace:
    """The scene under one scheduler. Raises ValueError where model, GPU and prompt do not fit."""
    return simulate(
        workloads.stall_scene(num_decodes=scene.num_decodes, prompt_tokens=scene.prompt_tokens),
        model=scene.model,
        gpu=scene.gpu,
        policy=setting.policy,
        order=setting.order,
        chunk_size=setting.chunk_size,
        max_num_batched_tokens=setting.budget,
    )


def point(metrics: Metrics, chunk_size: int | None) -> Point:
    """What a chunk size trades: the longest gap of those who decode, the longest wait to start."""
    return Point(chunk_size, metrics.itl.max or 0.0, metrics.ttft.max or 0.0)


class Explorer(widgets.VBox):
    """The explorer, ready to display. `timeline.traces` holds what is shown, by name.

    `recompute_seconds` is what the last change took in Python: simulation, metrics and columns.
    """

    def __init__(
        self,
        scene: Scene | None = None,
        a: Setting | None = None,
        b: Setting | None = WHOLE_PROMPTS,
        trace: Trace | str | Path | None = None,
    ) -> None:
        scene, a = scene or Scene(), a or Setting()
        self.recompute_seconds = 0.0
        self._quiet = False  # while several controls change together, recompute once
        self._curve_key: tuple[Scene, Setting] | None = None
        self._points: list[Point] = []
        self._pending: list[int | None] = []
        self._timer: asyncio.TimerHandle | None = None
        self._file: Trace | None = None
        self._metrics: dict[str, Metrics] = {}
        self._runs: dict[tuple[Any, ...], Trace] = {}
        self.scene_controls = _scene_controls(scene)
        self.controls = {"A": _setting_controls(a), "B": _setting_controls(b or WHOLE_PROMPTS)}
        self.compare = widgets.Checkbox(b is not None, description="compare with B", indent=False)
        self.path = widgets.Text(
            "", description="trace file", placeholder="run.jsonl, instead of simulating A",
            continuous_update=False, layout={"width": "46%"},
        )  # fmt: skip
        self.message = widgets.HTML()
        self.table = widgets.HTML()
        self.curve = widgets.HTML()
        self.timeline = Timeline(run(scene, a))
        for control in self._all_controls():
            control.observe(self._on_change, "value")
        self.path.observe(self._on_path, "value")
        row_a = widgets.HBox([widgets.HTML("<b>A</b>"), *self.controls["A"].values()], layout=_WRAP)
        # A layout of its own: hiding this row must not hide the others.
        own = widgets.Layout(flex_flow="row wrap", align_items="center")
        row_b = widgets.HBox([widgets.HTML("<b>B</b>"), *self.controls["B"].values()], layout=own)
        self._row_b = row_b
        super().__init__(
            [
                widgets.HBox(list(self.scene_controls.values()), layout=_WRAP),
                row_a,
                row_b,
                widgets.HBox([self.compare, self.path], layout=_WRAP),
                self.message,
                self.timeline,
                widgets.HBox([self.table, self.curve], layout=_WRAP),
            ]
        )
        if isinstance(trace, Trace):
            self._file = trace
        elif trace is not None:
            self.path.value = str(trace)
        self.recompute()

    # What the controls say.

    @property
    def scene(self) -> Scene:
        return Scene(**{name: control.value for name, control in self.scene_controls.items()})

    def setting(self, which: str) -> Setting:
        """The setting of "A" or "B"."""
        values = {name: control.value for name, control in self.controls[which].items()}
        return Setting(**{**values, "chunk_size": values["chunk_size"] or None})

    def set(self, **values: Any) -> None:
        """Set several controls at once: `set(num_decodes=20, chunk_size=256, b_order="fair")`."""
        self._quiet = True
        try:
            for name, value in values.items():
                which = "B" if name.startswith("b_") else "A"
                name = name.removeprefix("b_").removeprefix("a_")
                group = self.scene_controls if name in self.scene_controls else self.controls[which]
                if name not in group:
                    raise ValueError(f"unknown control {name!r}; known: {', '.join(group)}")
                group[name].value = NO_LIMIT if value is None else value
        finally:
            self._quiet = False
        self.recompute()

    # Simulate, measure, show.

    def recompute(self) -> None:
        """Simulate what the controls say and show it in the same widget."""
        began = time.perf_counter()
        scene, settings = self.scene, self._settings()
        try:
            traces = {f"{which}: {s.label()}": self._run(scene, s) for which, s in settings.items()}
        except ValueError as error:
            self.message.value = f'<p style="color:#c4500a">{html.escape(str(error))}</p>'
            return
        if self._file is not None:
            traces = {"from the file": self._file, **traces}
        self.message.value = ""
        self._row_b.layout.display = "flex" if self.compare.value else "none"
        self.timeline.show(traces)
        self._metrics = {name: trace.metrics() for name, trace in traces.items()}
        self.table.value = metrics_table(self._metrics)
        self.recompute_seconds = time.perf_counter() - began
        self._plan_curve(scene)

    def _run(self, scene: Scene, setting: Setting) -> Trace:
        """A run, or the same one from a moment ago: what did not change is not simulated again."""
        # By the code too, not only by its name: a student may have just redefined a policy.
        policy = policies.REGISTRY.get(setting.policy)
        order = orders.REGISTRY.get(setting.order)
        key = (scene, setting, policy.function if policy else None, order)
        if key not in self._runs:
            self._runs[key] = run(scene, setting)
            if len(self._runs) > KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
        return self._runs[key]

    def _settings(self) -> dict[str, Setting]:
        """The schedulers to simulate; a trace from a file stands in for A."""
        shown = [] if self._file is not None else ["A"]
        return {which: self.setting(which) for which in [*shown, *["B"] * self.compare.value]}

    def _on_change(self, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            self.recompute()

    def _on_path(self, change: Mapping[str, Any]) -> None:
        name = change["new"].strip()
        self._file = None
        if name:
            try:
                self._file = Trace.load(name)
            except (OSError, TraceError) as error:
                text = html.escape(f"{name}: {error}")
                self.recompute()
                self.message.value = f'<p style="color:#c4500a">{text}</p>'
                return
        self.recompute()

    def _all_controls(self) -> list[Any]:
        groups = (self.scene_controls, self.controls["A"], self.controls["B"])
        return [control for group in groups for control in group.values()] + [self.compare]

    # The curve.

    def _plan_curve(self, scene: Scene) -> None:
        """Mark today's point at once; find the rest of the curve when there is time for it."""
        base = replace(self.setting("A"), chunk_size=None)
        if (scene, base) != self._curve_key:
            self._curve_key = (scene, base)
            self._points = []
            sizes = [c for c in CHUNK_SIZES if c is None or c <= scene.prompt_tokens]
            self._pending = sizes
        self._draw_curve()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # no notebook around: `finish_curve` is there for whoever wants it
        if self._pending:
            self._timer = loop.call_later(CURVE_DELAY, self._next_point, loop)

    def _next_point(self, loop: asyncio.AbstractEventLoop) -> None:
        """One chunk size, then let the kernel see to its messages before the next."""
        self._timer = None
        if self._pending:
            self._add_point()
            self._draw_curve()
            self._timer = loop.call_later(0.01, self._next_point, loop)

    def _add_point(self) -> None:
        assert self._curve_key is not None
        scene, base = self._curve_key
        chunk_size = self._pending.pop(0)
        try:
            trace = self._run(scene, replace(base, chunk_size=chunk_size))
        except ValueError:
            return  # this chunk size is impossible here; the others may not be
        self._points.append(point(trace.metrics(), chunk_size))

    def finish_curve(self) -> list[Point]:
        """The whole curve now, for those who have no event loop."""
        while self._pending:
            self._add_point()
        self._draw_curve()
        return self._points

    def _draw_curve(self) -> None:
        today = {
            name.split(":")[0]: point(self._metrics[name], trace.meta.get("chunk_size"))
            for name, trace in self.timeline.traces.items()
        }
        self.curve.value = curve_svg(self._points, today)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return completed(super()._repr_mimebundle_(**kwargs), self.timeline)


def explorer(**options: Any) -> Explorer:
    """An `Explorer` to display. `options`: scene, a, b (None: one scheduler only), trace."""
    return Explorer(**options)


def metrics_table(metrics: Mapping[str, Metrics]) -> str:
    """TTFT, ITL and throughput of each run, as an HTML table."""
    head = ["", "TTFT p50", "TTFT max", "ITL p50", "p95", "p99", "max", "stalls", "tokens/s"]
    rows = []
    for name, m in metrics.items():
        times = [m.ttft.p50, m.ttft.max, m.itl.p50, m.itl.p95, m.itl.p99, m.itl.max]
        cells = ["–" if value is None else duration(value) for value in times]
        rows.append([name, *cells, str(m.num_stalls), f"{m.throughput:,.0f}"])
    style = 'style="padding:1px 10px 1px 0;text-align:{}"'

    def row(tag: str, cells: list[str]) -> str:
        aligned = [style.format("right" if i else "left") for i in range(len(cells))]
        return "".join(
            f"<{tag} {how}>{html.escape(cell)}</{tag}>"
            for how, cell in zip(aligned, cells, strict=True)
        )

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    top = f"<thead><tr>{row('th', head)}</tr></thead>"
    return f'<table style="line-height:1.5">{top}<tbody>{body}</tbody></table>'


# Controls -----------------------------------------------------------------------------------------

_WRAP = widgets.Layout(flex_flow="row wrap", align_items="center")


def _scene_controls(scene: Scene) -> dict[str, Any]:
    return {
        "num_decodes": widgets.IntSlider(
            scene.num_decodes, 0, 64, description="decodes", layout={"width": "280px"}
        ),
        "prompt_tokens": _slider(PROMPTS, scene.prompt_tokens, "prompt"),
        "model": _dropdown(MODELS, scene.model, "model"),
        "gpu": _dropdown(GPUS, scene.gpu, "GPU"),
    }


def _setting_controls(setting: Setting) -> dict[str, Any]:
    return {
        "policy": _dropdown(policies.REGISTRY, setting.policy, "policy"),
        "order": _dropdown(orders.REGISTRY, setting.order, "order"),
        "chunk_size": _slider(CHUNK_SIZES, setting.chunk_size, "chunk size"),
        "budget": _slider(BUDGETS, setting.budget, "budget"),
    }


def _dropdown(names: Mapping[str, Any], value: str, label: str) -> Any:
    options = list(dict.fromkeys([*names, value]))
    layout = {"width": "240px"}
    return widgets.Dropdown(options=options, value=value, description=label, layout=layout)


def _slider(values: tuple[int | None, ...], value: int | None, label: str) -> Any:
    """A slider over sizes that people use; a value of one's own takes its place among them."""
    ordered = sorted({*values, value}, key=lambda size: math.inf if size is None else size)
    options = [("no limit", NO_LIMIT) if n is None else (f"{n:,}", n) for n in ordered]
    layout = {"width": "280px"}
    chosen = value or NO_LIMIT
    return widgets.SelectionSlider(options=options, value=chosen, description=label, layout=layout)
