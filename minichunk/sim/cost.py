"""How long a StepPlan takes on a GPU: the seconds of each part, by a smooth roofline.

Each part takes as long as its operations at a share of peak rate, or its bytes at a share of peak
bandwidth, whichever is longer (Williams et al., Roofline, CACM 2009), and a little more near the
ridge. The simulated executor asks here what the step it was given would have cost.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from minichunk.core.plan import StepCost, StepPlan
from minichunk.sim.counter import Part, StepCounter, StepLoad, load_of
from minichunk.sim.efficiency import EFFICIENCIES, Efficiency
from minichunk.sim.hardware import GPU, get_gpu
from minichunk.sim.shapes import BYTES_PER_ELEMENT, ModelShape, get_shape


class StepBreakdown(NamedTuple):
    """A step's cost, split. Utilisation is the share of peak over the step's whole duration."""

    parts: tuple[Part, ...]
    peak_flops: float
    peak_bandwidth: float

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def compute_utilisation(self) -> float:
        return self.flops / (self.seconds * self.peak_flops)

    @property
    def bandwidth_utilisation(self) -> float:
        return self.bytes / (self.seconds * self.peak_bandwidth)


class CostModel:
    """Seconds of a step on a GPU (or `tensor_parallel` of them), part by part.

    Each GPU computes its share of every matrix and of the heads; two all-reduces per layer join
    the results. Two constants stand for the serving software: `step_overhead` is paid in every
    step (scheduling, input preparation, sampling); `host_time` is what the host needs to launch
    the step's kernels, hidden behind the GPU's work where that takes longer (near 0 with CUDA
    graphs, tens of milliseconds where a deep model is launched kernel by kernel). `tile` rounds
    the rows of a matrix product up to whole tiles, as kernels do (128 is typical): it shows why a
    chunk of 264 tokens costs more than one of 256.
    """

    def __init__(
        self,
        model: str | ModelShape,
        gpu: str | GPU,
        *,
        tensor_parallel: int = 1,
        efficiency: Efficiency | None = None,
        step_overhead: float = 0.001,
        host_time: float = 0.0,
        tile: int | None = None,
    ) -> None:
        self.shape, self.gpu = get_shape(model), get_gpu(gpu)
        self.tensor_parallel = tensor_parallel
        if efficiency is None and self.gpu.family not in EFFICIENCIES:
            raise ValueError(
                f"no efficiencies are known for the GPU family {self.gpu.family!r} (known: "
                f"{', '.join(EFFICIENCIES)}): pass efficiency=, for instance from calibrate.fit"
            )
        self.efficiency = efficiency or EFFICIENCIES[self.gpu.family]
        self.step_overhead = step_overhead
        self.host_time = host_time
        self.tile = tile
        self.counter = StepCounter(self.shape)
        if tensor_parallel < 1 or self.shape.num_heads % tensor_parallel:
            raise ValueError(
                f"tensor_parallel={tensor_parallel} must divide the {self.shape.num_heads} "
                f"attention heads of {self.shape.name}"
            )
        if step_overhead < 0 or host_time < 0:
            raise ValueError(
                f"step_overhead={step_overhead} and host_time={host_time} must be 0 seconds or more"
            )
        if tile is not None and tile < 1:
            raise ValueError(f"tile={tile} must be at least 1 row")
        # What depends on one number only is remembered: a simulation asks for it in every step.
        self._rows: dict[int, tuple[Part, ...]] = {}
        self._heads: dict[int, Part] = {}
        self._sums: dict[tuple[int, int], tuple[float, float, float]] = {}

    @property
    def peak_flops(self) -> float:
        """Of all GPUs together."""
        return self.gpu.peak_flops * self.tensor_parallel

    @property
    def peak_bandwidth(self) -> float:
        return self.gpu.peak_bandwidth * self.tensor_parallel

    @property
    def context_per_token(self) -> float:
        """The context length whose KV reads take as long as one more token of linear layers."""
        linear = self.linear_seconds(4096) / 4096
        return linear / (self.decode_attention_seconds(1, 1_000_000) / 1_000_000)

    def step(self, plan: StepPlan) -> StepBreakdown:
        """The whole account of one step."""
        parts = self.parts(load_of(plan.chunks))
        return StepBreakdown(tuple(parts), self.peak_flops, self.peak_bandwidth)

    def cost(self, plan: StepPlan) -> tuple[float, StepCost]:
        """The step's seconds and its `StepCost`: the short form that a simulation needs."""
        load = load_of(plan.chunks)
        seconds, flops, moved = self._totals(load)
        floor: float | None = None
        if load.num_decodes:
            floor = seconds
            if load.prefill_tokens:
                count, context = load.num_decodes, load.decode_context
                alone = StepLoad(count, count, num_decodes=count, decode_context=context)
                floor = self._totals(alone)[0]
        return seconds, StepCost(flops, moved, floor)

    def parts(self, load: StepLoad) -> list[Part]:
        """The parts of a step with that load."""
        parts = self._fixed_parts(load.num_tokens, load.num_sampled)
        if load.prefill_tokens:
            seconds = self._prefill_seconds(load)
            parts.append(self.counter.prefill_attention(load)._replace(seconds=seconds))
        if load.num_decodes:
            seconds = self.decode_attention_seconds(load.num_decodes, load.decode_context)
            parts.append(self.counter.decode_attention(load)._replace(seconds=seconds))
        overhead = self._overhead(sum(part.seconds for part in parts))
        return [*parts, Part("overhead", 0.0, 0.0, overhead)]

    def _totals(self, load: StepLoad) -> tuple[float, float, float]:
        """Seconds, operations and bytes: the sums of `parts`, without making them."""
        key = load.num_tokens, load.num_sampled
        sums = self._sums.get(key)
        if sums is None:
            fixed = self._fixed_parts(*key)
            sums = self._sums[key] = (
                sum(part.seconds for part in fixed),
                sum(part.flops for part in fixed),
                sum(part.bytes for part in fixed),
            )
        seconds, flops, moved = sums
        if load.prefill_tokens:
            work = self.counter.prefill_attention(load)
            seconds += self._prefill_seconds(load)
            flops += work.flops
            moved += work.bytes
        if load.num_decodes:
            work = self.counter.decode_attention(load)
            seconds += self.decode_attention_seconds(load.num_decodes, load.decode_context)
            flops += work.flops
            moved += work.bytes
        return seconds + self._overhead(seconds), flops, moved

    def _fixed_parts(self, rows: int, sampled: int) -> list[Part]:
        """What does not depend on context: matrix products, small kernels, LM head."""
        if rows not in self._rows:
            self._rows[rows] = self._row_parts(rows)
        if sampled not in self._heads:
            self._heads[sampled] = self._head_part(sampled)
        return [*self._rows[rows], self._heads[sampled]]

    def _prefill_seconds(self, load: StepLoad) -> float:
        return self.prefill_attention_seconds(
            load.prefill_tokens, load.prefill_pairs, load.prefill_context
        )

    def _overhead(self, gpu_seconds: float) -> float:
        return self.step_overhead + max(0.0, self.host_time - gpu_seconds)

    def linear_seconds(self, rows: int) -> float:
        """All layers' matrix products for `rows` tokens."""
        split, total = self.tensor_parallel, 0.0
        for name, inputs, outputs in self.shape.matrices:
            # The first product of a pair is split by columns, the second by rows (Megatron-LM).
            if name in ("qkv_proj", "up_proj"):
                total += self._product_seconds(rows, inputs, outputs / split)
            else:
                total += self._product_seconds(rows, inputs / split, outputs)
        return total * self.shape.num_layers

    def prefill_attention_seconds(self, rows: int, pairs: float, context: int = 0) -> float:
        """All layers' attention of chunks with `rows` tokens and `pairs` query-key pairs.

        Computing hides the reading of `context` keys and values, unless chunks are so small that
        reading takes longer: then each small chunk pays for reading its whole prefix again.
        """
        eff, shape = self.efficiency, self.shape
        work = 4.0 * shape.query_size / self.tensor_parallel * (pairs + rows * eff.attention_setup)
        compute = work / (self.gpu.peak_flops * eff.attention_compute)
        return (eff.launch + max(compute, self._kv_read_seconds(context))) * shape.num_layers

    def decode_attention_seconds(self, decodes: int, context: int) -> float:
        """All layers' attention of `decodes` tokens that read `context` keys and values in all."""
        per_layer = self.efficiency.attention_latency + self._kv_read_seconds(context)
        return per_layer * self.shape.num_layers

    def _kv_read_seconds(self, context: int) -> float:
        """One layer's reading of `context` keys and values, on one GPU."""
        shape = self.shape
        # With more GPUs than KV heads, some hold copies.
        kv_heads = max(1.0, shape.num_kv_heads / self.tensor_parallel)
        moved = 2 * BYTES_PER_ELEMENT * kv_heads * shape.head_dim * context
        return moved / (self.gpu.peak_bandwidth * self.efficiency.attention_bandwidth)

    def elementwise_seconds(self, rows: int) -> float:
        """All layers' small kernels: five per layer."""
        eff, shape = self.efficiency, self.shape
        whole = 7 * shape.hidden_size  # normalisations and residual are not split
        size = rows * (whole + (self.counter.elementwise_size - whole) / self.tensor_parallel)
        seconds = BYTES_PER_ELEMENT * size / (self.gpu.peak_bandwidth * eff.elementwise)
        return (5 * eff.launch + seconds) * shape.num_layers

    def all_reduce_seconds(self, rows: int) -> float:
        """Two ring all-reduces per layer; 0 on a single GPU."""
        split, eff = self.tensor_parallel, self.efficiency
        if split == 1:
            return 0.0
        sent = 2 * (split - 1) / split * rows * self.shape.hidden_size * BYTES_PER_ELEMENT
        seconds = eff.link_latency + sent / (self.gpu.link_gbps * 1e9 * eff.link)
        return 2 * seconds * self.shape.num_layers

    def _row_parts(self, rows: int) -> tuple[Part, ...]:
        linear = self.counter.linear(rows)._replace(seconds=self.linear_seconds(rows))
        small = self.counter.elementwise(rows)._replace(seconds=self.elementwise_seconds(rows))
        parts = [linear, small]
        if self.tensor_parallel > 1:
            parts.append(Part("all_reduce", 0.0, 0.0, self.all_reduce_seconds(rows)))
        return tuple(parts)

    def _head_part(self, rows: int) -> Part:
        part = self.counter.lm_head(rows)
        if rows == 0:
            return part
        outputs = self.shape.vocab_size / self.tensor_parallel
        return part._replace(seconds=self._product_seconds(rows, self.shape.hidden_size, outputs))

    def _product_seconds(self, rows: int, inputs: float, outputs: float) -> float:
        """One matrix product, [rows, inputs] x [inputs, outputs], on one GPU."""
        eff = self.efficiency
        padded = rows if self.tile is None else math.ceil(rows / self.tile) * self.tile
        compute = 2.0 * padded * inputs * outputs / (self.gpu.peak_flops * eff.compute)
        size = inputs * outputs + rows * (inputs + outputs)
        memory = BYTES_PER_ELEMENT * size / (self.gpu.peak_bandwidth * eff.bandwidth)
        smooth = (compute**eff.sharpness + memory**eff.sharpness) ** (1 / eff.sharpness)
        return eff.launch + smooth
