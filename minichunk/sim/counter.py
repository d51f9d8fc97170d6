"""What a StepPlan asks of any hardware: floating-point operations and bytes, counted.

The counter needs only the model's shape and serves simulated and real steps alike. It shows why
mixing works: decode tokens ride in the same matrix products as a chunk, and the weights, which are
nearly all that a decode step reads, are read once for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minichunk.core.plan import ScheduledChunk, StepCost, StepPlan
from minichunk.sim.shapes import BYTES_PER_ELEMENT, ModelShape, get_shape


class StepLoad(NamedTuple):
    """The sums over a plan that its cost depends on; decodes need no row of their own."""

    num_tokens: int  # rows of the matrix products
    num_sampled: int  # rows of the LM head
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0  # query-key pairs under the causal mask
    prefill_context: int = 0  # keys and values read: Σ end of chunk
    num_decodes: int = 0
    decode_context: int = 0  # keys and values read: Σ sequence length


def load_of(chunks: Sequence[ScheduledChunk]) -> StepLoad:
    """Sum up the chunks of a plan."""
    sampled = rows = context = decodes = decode_context = 0
    pairs = 0.0
    for _, start, count, _, _, sampling, is_decode, _ in chunks:
        if sampling is not None:
            sampled += 1
        if is_decode:
            decodes += 1
            decode_context += start + 1
        else:
            rows += count
            pairs += count * (start + (count + 1) / 2)
            context += start + count
    return StepLoad(rows + decodes, sampled, rows, pairs, context, decodes, decode_context)


class Part(NamedTuple):
    """One kind of work in a step: totals over all layers (and over all GPUs)."""

    name: str
    flops: float
    bytes: float
    seconds: float = 0.0


class StepCounter:
    """Counts a step's operations and bytes from the model's shape alone, for any hardware.

    Pass it to the engine as `annotate=`: `counter(plan)` is a `StepCost` without a decode floor.
    Every weight is read once per step, activations move between memory and kernel once per
    product, and attention reads each chunk's keys and values once. `element_size` is in bytes: 4
    for a model that runs in float32.
    """

    def __init__(self, model: str | ModelShape, *, element_size: int = BYTES_PER_ELEMENT) -> None:
        self.shape = get_shape(model)
        self.element_size = element_size
        # Elements of one token's activations that the small kernels of a layer read and write:
        # two normalisations, rotary embedding of queries and keys, activation, residual sum.
        shape = self.shape
        self.elementwise_size = (
            4 * shape.hidden_size
            + 2 * (shape.query_size + shape.kv_size)
            + (3 if shape.gated_mlp else 2) * shape.ffn_size
            + 3 * shape.hidden_size
        )

    def __call__(self, plan: StepPlan) -> StepCost:
        parts = self.count(load_of(plan.chunks))
        return StepCost(sum(part.flops for part in parts), sum(part.bytes for part in parts))

    def count(self, load: StepLoad) -> list[Part]:
        """All parts of a step, without seconds."""
        return [
            self.linear(load.num_tokens),
            self.elementwise(load.num_tokens),
            self.prefill_attention(load),
            self.decode_attention(load),
            self.lm_head(load.num_sampled),
        ]

    def linear(self, rows: int) -> Part:
        """The matrix products of all layers for `rows` tokens."""
        flops = 2.0 * rows * self.shape.linear_params
        size = sum(m + rows * (a + b) for m, a, b in self._products()) * self.shape.num_layers
        return Part("linear", flops, float(self.element_size * size))

    def elementwise(self, rows: int) -> Part:
        size = rows * self.elementwise_size * self.shape.num_layers
        return Part("elementwise", float(size), float(self.element_size * size))

    def prefill_attention(self, load: StepLoad) -> Part:
        """Attention of each chunk over its prefix and, causally, over itself."""
        shape = self.shape
        flops = 4.0 * shape.query_size * load.prefill_pairs * shape.num_layers
        return Part(
            "prefill_attention",
            flops,
            self._attention_bytes(load.prefill_context, load.prefill_tokens),
        )

    def decode_attention(self, load: StepLoad) -> Part:
        """Attention of one token each over its whole context."""
        shape = self.shape
        flops = 4.0 * shape.query_size * load.decode_context * shape.num_layers
        return Part(
            "decode_attention", flops, self._attention_bytes(load.decode_context, load.num_decodes)
        )

    def lm_head(self, rows: int) -> Part:
        """Logits, only for the rows that sample: the last token of a prompt, and each decode."""
        if rows == 0:
            return Part("lm_head", 0.0, 0.0)
        weights = self.shape.hidden_size * self.shape.vocab_size
        size = weights + rows * (self.shape.hidden_size + self.shape.vocab_size)
        return Part("lm_head", 2.0 * rows * weights, float(self.element_size * size))

    def _products(self) -> list[tuple[int, int, int]]:
        return [(a * b, a, b) for _, a, b in self.shape.matrices]

    def _attention_bytes(self, context: int, rows: int) -> float:
        """Keys and values read, those of the new rows written, queries read, outputs written."""
        shape = self.shape
        queries = 2.0 * rows * shape.query_size
        keys_and_values = 2.0 * (context + rows) * shape.kv_size
        return (queries + keys_and_values) * shape.num_layers * self.element_size
