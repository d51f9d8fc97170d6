"""Fits the cost model's efficiencies to measurements, and says how well it then predicts others.

Measurements come from published profiles (see `profiles.py`) or from a trace of the real executor
on one's own machine. A part of the rows is held out of the fit: their error, beside that of the
fitted ones, tells a model that understood from one that memorised.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from minichunk.core.trace import Trace
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.sim.efficiency import Efficiency
from minichunk.sim.hardware import GPU, get_gpu
from minichunk.sim.shapes import ModelShape, get_shape

# Parts that are fitted together, and the efficiencies that their times depend on. The order
# matters: attention uses the launch time that the first group settles.
_GROUPS = (
    (("linear", "elementwise"), ("compute", "bandwidth", "sharpness", "launch", "elementwise")),
    (("prefill_attention",), ("attention_compute", "attention_setup")),
    (("decode_attention",), ("attention_bandwidth", "attention_latency")),
    (("step",), ()),  # what of a whole step is fitted is the caller's choice
)
_OVERHEADS = ("step_overhead", "host_time")
_CEILING = {field.name: 1.0 for field in fields(Efficiency)} | {
    name: math.inf
    for name in ("sharpness", "launch", "attention_setup", "attention_latency", "link_latency")
}


class Measurement(NamedTuple):
    """Seconds measured, over all layers, for one part of a step (named in the table above), or for
    a whole "step"."""

    part: str
    shape: ModelShape
    gpu: GPU
    load: StepLoad
    seconds: float
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Calibration:
    """The fitted efficiencies with the rows they were fitted to and those held out."""

    efficiency: Efficiency
    step_overhead: float
    host_time: float
    fitted: tuple[Measurement, ...]
    held_out: tuple[Measurement, ...]

    @property
    def options(self) -> dict[str, Any]:
        """What was fitted, as arguments for `CostModel` and `simulate`."""
        return {
            "efficiency": self.efficiency,
            "step_overhead": self.step_overhead,
            "host_time": self.host_time,
        }

    def predict(self, measurement: Measurement) -> float:
        return predict(measurement, **self.options)

    def errors(self, measurements: Iterable[Measurement]) -> list[float]:
        """Relative errors |predicted / measured - 1|, smallest first."""
        return sorted(abs(self.predict(row) / row.seconds - 1) for row in measurements)

    def table(self) -> str:
        """Median and P90 error per part: of the fit, and of what it has not seen."""
        heading = f"{'median':>8}{'P90':>8}"
        lines = [f"{'part':<18}{'fitted':>7}{heading}{'held out':>10}{heading}"]
        for part in dict.fromkeys(row.part for row in self.fitted):
            line = f"{part:<18}"
            for rows, width in ((self.fitted, 7), (self.held_out, 10)):
                errors = self.errors(row for row in rows if row.part == part)
                line += f"{len(errors):>{width}}"
                if errors:
                    line += f"{statistics.median(errors):>8.1%}{_p90(errors):>8.1%}"
            lines.append(line)
        return "\n".join(lines)


def predict(measurement: Measurement, efficiency: Efficiency, **overheads: Any) -> float:
    """The cost model's seconds for what was measured."""
    part, shape, gpu, load, _, split = measurement
    model = CostModel(shape, gpu, tensor_parallel=split, efficiency=efficiency, **overheads)
    if part == "linear":
        return model.linear_seconds(load.num_tokens)
    if part == "elementwise":
        return model.elementwise_seconds(load.num_tokens)
    if part == "prefill_attention":
        return model.prefill_attention_seconds(
            load.prefill_tokens, load.prefill_pairs, load.prefill_context
        )
    if part == "decode_attention":
        return model.decode_attention_seconds(load.num_decodes, load.decode_context)
    if part == "step":
        return sum(piece.seconds for piece in model.parts(load))
    raise ValueError(f"part={part!r} is unknown: linear, elementwise, prefill_attention, …")


def fit(
    measurements: Sequence[Measurement],
    start: Efficiency,
    *,
    step_overhead: float = 0.001,
    host_time: float = 0.0,
    step_fields: Sequence[str] = ("compute", "bandwidth", "attention_compute", "step_overhead"),
    held_out: float = 0.25,
    seed: int = 0,
) -> Calibration:
    """Fit the efficiencies that the measured parts depend on; the others stay as in `start`.

    Minimises the mean |log(predicted / measured)|, so that a row counts the same whether it took
    microseconds or seconds and a few odd rows do not pull. `held_out` is the share of rows, drawn
    with `seed`, that the fit does not see. `step_fields` are fitted to rows of part "step".
    """
    unusable = [row for row in measurements if not row.seconds > 0]
    if unusable or not measurements:
        raise ValueError(f"need measurements of more than 0 seconds; unusable: {unusable[:3]}")
    rows = list(measurements)
    random.Random(seed).shuffle(rows)
    kept = max(1, round(len(rows) * (1 - held_out)))
    fitted, unseen = rows[:kept], rows[kept:]
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    values |= {"step_overhead": step_overhead, "host_time": host_time}
    for parts, names in _GROUPS:
        of_group = [row for row in fitted if row.part in parts]
        if of_group:
            values |= _fit_group(of_group, names or tuple(step_fields), values)
    step_overhead, host_time = (values.pop(name) for name in _OVERHEADS)
    return Calibration(Efficiency(**values), step_overhead, host_time, tuple(fitted), tuple(unseen))


def _fit_group(
    rows: Sequence[Measurement], names: tuple[str, ...], values: dict[str, float]
) -> dict[str, float]:
    def unpack(point: Sequence[float]) -> dict[str, float]:
        bounded = (
            min(math.exp(x), _CEILING.get(name, math.inf))
            for name, x in zip(names, point, strict=True)
        )
        return dict(zip(names, bounded, strict=True))

    def loss(point: Sequence[float]) -> float:
        trial = values | unpack(point)
        overheads = {name: trial.pop(name) for name in _OVERHEADS}
        efficiency = Efficiency(**trial)
        errors = (math.log(predict(row, efficiency, **overheads) / row.seconds) for row in rows)
        return sum(map(abs, errors)) / len(rows)

    point = [math.log(values[name]) for name in names]
    for _ in range(2):  # a second simplex, started where the first collapsed
        point = nelder_mead(loss, point)
    return unpack(point)


def nelder_mead(
    loss: Callable[[Sequence[float]], float],
    start: Sequence[float],
    *,
    size: float = 0.3,
    max_steps: int = 500,
    tolerance: float = 1e-7,
) -> list[float]:
    """Minimise without derivatives by moving a simplex downhill (Nelder and Mead, 1965)."""
    corners = [list(start)]
    for axis in range(len(start)):
        corner = list(start)
        corner[axis] += size
        corners.append(corner)
    simplex = [(loss(corner), corner) for corner in corners]
    for _ in range(max_steps):
        simplex.sort()
        (best, best_corner), (worst, worst_corner) = simplex[0], simplex[-1]
        if worst - best < tolerance:
            break
        others = [corner for _, corner in simplex[:-1]]
        centre = [sum(xs) / len(others) for xs in zip(*others, strict=True)]

        def along(
            step: float, origin: list[float] = centre, end: list[float] = worst_corner
        ) -> tuple[float, list[float]]:
            point = [o + step * (e - o) for o, e in zip(origin, end, strict=True)]
            return loss(point), point

        reflected = along(-1.0)
        if reflected[0] < best:
            simplex[-1] = min(reflected, along(-2.0))
        elif reflected[0] < simplex[-2][0]:
            simplex[-1] = reflected
        else:
            contracted = along(0.5)
            if contracted[0] < worst:
                simplex[-1] = contracted
            else:  # shrink towards the best corner
                simplex[1:] = [along(0.5, best_corner, corner) for _, corner in simplex[1:]]
    return min(simplex)[1]


def of_trace(trace: Trace, model: str | ModelShape, gpu: str | GPU) -> list[Measurement]:
    """The steps of a trace as measurements: what each was given to do, and how long it took."""
    shape, device = get_shape(model), get_gpu(gpu)
    return [
        Measurement("step", shape, device, load, step.duration)
        for step, load in zip(trace.steps, loads_of(trace), strict=True)
        if load.num_tokens and step.duration > 0
    ]


def fit_trace(
    trace: Trace, model: str | ModelShape, *, held_out: float = 0.25, seed: int = 0
) -> tuple[GPU, Calibration]:
    """A device from a measured run on it: a laptop's CPU, or a GPU that is not in the table.

    The peaks of the returned `GPU` are nominal, and the efficiencies are shares of those: only
    their products mean anything. Simulate with `simulate(…, gpu=gpu, **calibration.options)`.
    """
    name = str(trace.meta.get("device", "this machine"))
    gpu = GPU(name, name, "measured", 100.0, 1000.0, 16.0, 1, 16.0)
    start = Efficiency(
        compute=0.01,
        bandwidth=0.02,
        sharpness=2.0,
        launch=5e-6,
        elementwise=0.02,
        attention_compute=0.005,
        attention_setup=100.0,
        attention_bandwidth=0.02,
        attention_latency=2e-5,
    )
    rows = of_trace(trace, model, gpu)
    return gpu, fit(rows, start, held_out=held_out, seed=seed)


def loads_of(trace: Trace) -> list[StepLoad]:
    """The load of each step, put together again from the trace's spans."""
    sums = [[0] * 6 for _ in trace.steps]
    prompts = {rid: record.prompt_tokens for rid, record in trace.requests.items()}
    for span in trace.spans:
        if span.kind == "decode":
            for step in range(span.first_step, span.last_step + 1):
                row = sums[step]
                row[0] += 1
                row[4] += 1
                row[5] += span.first_position + step - span.first_step + 1
            continue
        row, start, count = sums[span.first_step], span.first_position, span.tokens
        row[1] += start + count >= prompts[span.request_id]
        row[2] += count
        row[3] += count * (2 * start + count + 1)  # twice the query-key pairs
        row[0] += start + count
    return [
        StepLoad(
            prefill + decodes, ends + decodes, prefill, pairs / 2, reads - decodes, decodes, ctx
        )
        for reads, ends, prefill, pairs, decodes, ctx in sums
    ]


def _p90(ordered: Sequence[float]) -> float:
    return ordered[max(0, math.ceil(0.9 * len(ordered)) - 1)]
