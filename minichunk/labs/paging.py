"""Checks for notebook 02: block tables, slots, the blocks of a chunk, and shared prefixes.

Answers are compared with what the engine did on small cases drawn anew: the slots that its batch
builder hands to the model, the blocks that its trace records, the hits that it was given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine
from minichunk.core.kv_cache import BlockTable
from minichunk.core.request import SamplingParams
from minichunk.labs.batching import GPU, MODEL
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.cost import CostModel
from minichunk.sim.run import simulated_engine


@exercise("slot-mapping")
def slot_mapping(answer: Callable[[tuple[int, ...], int, int, int], list[int]]) -> str:
    """`answer(block_table, block_size, start, num_tokens)`: the slots of a chunk's positions."""
    rng = random.Random()
    cases = [((7, 2, 5), 4, 0, 10), ((7, 2, 5), 4, 6, 3), ((3,), 16, 15, 1)]
    for _ in range(10):
        size, start, count = rng.choice([1, 4, 16]), rng.randint(0, 40), rng.randint(1, 20)
        table = tuple(rng.sample(range(100), -(-(start + count) // size)))
        cases.append((table, size, start, count))
    for blocks, size, start, count in cases:
        expected = [
            BlockTable(blocks).slot(position, size) for position in range(start, start + count)
        ]
        got = [int(slot) for slot in answer(blocks, size, start, count)]
        if got != expected:
            wrong = next(
                (
                    i
                    for i, pair in enumerate(zip(got, expected, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(got), len(expected)),
            )
            position = start + wrong
            if wrong >= len(expected):
                detail = f"there are only {count} positions, and you gave {len(got)} slots"
            else:
                detail = (
                    f"position {position} lies in entry {position // size} of the table, which is "
                    f"block {blocks[position // size]}, at offset {position % size}: slot "
                    f"{expected[wrong]}"
                )
            raise Wrong(
                f"slot_mapping(block_table={blocks}, block_size={size}, start={start}, num_tokens="
                f"{count}) gave {got}; {detail}",
                pool_picture({"this chunk": expected}, size),
            )
    return "every position finds its block, wherever it lies"


@exercise("new-blocks")
def new_blocks(answer: Callable[[int, int, int], int]) -> str:
    """`answer(start, num_tokens, block_size)`: blocks that a chunk takes from the pool."""
    rng = random.Random()
    for block_size, chunk_size, prompt in (
        (4, 6, 22),
        (16, 5, 40),
        (16, 32, 64),
        (rng.randint(1, 12), rng.randint(1, 20), rng.randint(20, 60)),
        (rng.randint(1, 12), rng.randint(1, 20), rng.randint(20, 60)),
    ):
        engine = small_engine(block_size=block_size, chunk_size=chunk_size)
        engine.add_request(tuple(range(prompt)), SamplingParams(max_tokens=12, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        taken = {
            event.step: len(event.blocks)
            for event in engine.trace.block_events
            if event.kind == "alloc"
        }
        for step, start, count in _chunks(engine):
            got, expected = answer(start, count, block_size), taken.get(step, 0)
            if got != expected:
                raise Wrong(
                    f"new_blocks(start={start}, num_tokens={count}, block_size={block_size}) gave "
                    f"{got!r}; the engine took {expected}: positions up to {start} need "
                    f"{-(-start // block_size)} blocks, up to {start + count} they need "
                    f"{-(-(start + count) // block_size)}",
                    engine.trace.timeline(),
                )
    return "your count is the engine's, chunk by chunk and decode by decode"


def _chunks(engine: Engine) -> list[tuple[int, int, int]]:
    """(step, start, tokens) of everything that was computed, a decode being a chunk of one."""
    chunks = []
    for span in engine.trace.spans:
        if span.kind == "prefill":
            chunks.append((span.first_step, span.first_position, span.tokens))
        else:
            chunks += [
                (span.first_step + i, span.first_position + i, 1) for i in range(span.tokens)
            ]
    return chunks


@exercise("prefix-hits")
def prefix_hits(answer: Callable[[Sequence[Sequence[int]], Sequence[int], int], int]) -> str:
    """`answer(computed, prompt, block_size)`: prompt tokens that need not be computed again."""
    rng = random.Random()
    same = list(range(40))
    cases: list[tuple[list[list[int]], list[int], int]] = [
        ([same], same, 16),
        ([same[:32]], same[:32], 16),  # the last token must be computed
        ([[9, *same]], same, 4),  # the same tokens, one position later
        ([same[:6]], same, 4),  # half a block is not shared
        ([same], [*same[:8], 99, *same[9:]], 4),  # equal blocks behind a different one
    ]
    for _ in range(10):
        computed = [[rng.randint(0, 1) for _ in range(rng.randint(1, 14))] for _ in range(4)]
        cut = rng.randint(0, len(computed[0]))
        prompt = computed[0][:cut] + [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
        cases.append((computed, prompt, rng.choice([1, 2, 4])))
    for computed, prompt, block_size in cases:
        engine = small_engine(block_size=block_size)
        for known in computed:
            engine.add_request(tuple(known), SamplingParams(max_tokens=1, ignore_eos=True))
            while engine.has_unfinished_requests():
                engine.step()
        newcomer = engine.add_request(tuple(prompt), SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        events = engine.trace.events
        expected = next(e.tokens for e in events if e.kind == "admit" and e.request_id == newcomer)
        got = answer([list(known) for known in computed], list(prompt), block_size)
        if got != expected:
            raise Wrong(
                f"computed={computed}, prompt={prompt}, block_size={block_size}: you gave {got!r}; "
                f"the engine found {expected} of the {len(prompt)} tokens in its cache"
            )
    return "whole blocks, from the start, and never the last token"


def small_engine(
    *, block_size: int, chunk_size: int | None = None, num_blocks: int = 200, **knobs: Any
) -> Engine:
    """A simulated engine with a pool small enough to be looked at."""
    config = EngineConfig(
        policy="decode-first",
        block_size=block_size,
        chunk_size=chunk_size,
        num_blocks=num_blocks,
        **knobs,
    )
    return simulated_engine(CostModel(MODEL, GPU), config)


def pool_picture(owners: dict[str, Sequence[int]], block_size: int, num_blocks: int = 0) -> Any:
    """The pool as columns of slots, one column per block; each owner's slots in its colour.

    The number in a slot is the order in which its owner fills it.
    """
    from minichunk.viz.figure_style import Picture

    colours = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
    last = max((max(slots, default=0) for slots in owners.values()), default=0)
    columns = max(num_blocks, last // block_size + 1)
    figure = Picture(figsize=(min(10.0, 0.9 + 0.34 * columns), 0.9 + 0.24 * block_size))
    axis = figure.subplots()
    for number, (name, slots) in enumerate(owners.items()):
        colour = colours[number % len(colours)]
        x, y = [slot // block_size for slot in slots], [slot % block_size for slot in slots]
        axis.scatter(x, y, marker="s", s=130, color=colour, label=name)
        if columns <= 40:
            for order, place in enumerate(zip(x, y, strict=True)):
                axis.annotate(
                    str(order), place, ha="center", va="center", fontsize=6, color="white"
                )
    axis.set(
        xlim=(-0.6, columns - 0.4), ylim=(block_size - 0.4, -0.6),
        xlabel="block", ylabel="offset in the block",
    )  # fmt: skip
    axis.set_xticks(range(0, columns, max(1, columns // 20)))
    axis.set_yticks(range(0, block_size, max(1, block_size // 4)))
    axis.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    axis.grid(which="minor", axis="x", color="#dddddd", lw=0.7)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.set_layout_engine("constrained")
    return figure
