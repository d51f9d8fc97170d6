"""Checks for notebook 03: the online softmax, keys behind a block table, tiles of a ragged batch.

The softmax is compared with torch's, the student's kernel with torch's indexing over a cache whose
other slots hold NaN, and the tiles by counting how often each token of a step is covered.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minichunk.labs.result import Wrong, exercise

if TYPE_CHECKING:
    from torch import Tensor

    State = tuple[Tensor, Tensor, Tensor]


@exercise("online-softmax")
def online_softmax(answer: Callable[[State, Tensor, Tensor], State]) -> str:
    """`answer((acc, maximum, total), scores, values)`: the state after one more tile of keys."""
    import torch

    rng = random.Random()
    for magnitude, sizes in (
        (1.0, [5]),
        (1.0, [4, 4]),
        (1.0, [3, 1, 7]),
        (300.0, [4, 4, 4]),  # exp(300) is no float32 number
        (300.0, [rng.randint(1, 6) for _ in range(8)]),
    ):
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        scores = magnitude * torch.randn(sum(sizes), generator=generator)
        values = torch.randn(sum(sizes), 3, generator=generator)
        state: State = (torch.zeros(3), torch.tensor(-1.0e30), torch.tensor(0.0))
        seen = 0
        for size in sizes:
            tile = slice(seen, seen + size)
            state = answer(state, scores[tile].clone(), values[tile].clone())
            seen += size
            acc, _, total = state
            got = acc / total
            expected = torch.softmax(scores[:seen], dim=0) @ values[:seen]
            if got.shape != expected.shape or not torch.allclose(got, expected, atol=1e-4):
                raise Wrong(
                    f"scores of size about {magnitude:g}, tiles of {sizes} keys: after {seen} keys "
                    f"acc / total is {_numbers(got)}, attention over them is "
                    f"{_numbers(expected)}. Largest score so far {scores[:seen].max():.2f}, in "
                    f"this tile {scores[tile].max():.2f}"
                )
    return "exact after every tile, and no exponential overflows"


@exercise("gather-keys")
def gather_keys(kernel: Any) -> str:
    """`kernel[(tiles,)](out, k_cache, block_table, num_keys, DIM, BLOCK_SIZE, TILE_KEYS)`."""
    import torch

    from minichunk.kernels._triton import INTERPRETED, launch_problem

    problem = launch_problem(on_cpu=INTERPRETED or not torch.cuda.is_available())
    if problem:
        raise Wrong(f"no kernel can be launched in this process: {problem}")
    device = "cpu" if INTERPRETED else "cuda"
    rng = random.Random()
    cases = [(8, 4, 8), (8, 4, 4), (11, 4, 8), (1, 16, 4)]
    cases += [(rng.randint(2, 60), rng.choice([1, 2, 4, 16]), 8) for _ in range(4)]
    for num_keys, block_size, tile_keys in cases:
        dim, num_tiles = 16, -(-num_keys // tile_keys)
        blocks = rng.sample(range(80), -(-num_keys // block_size))
        keys = torch.randn(num_keys, dim)
        cache = torch.full((80 * block_size, dim), torch.nan)
        positions = torch.arange(num_keys)
        slots = torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size
        cache[slots] = keys
        room = torch.full((num_tiles * tile_keys, dim), 7.0, device=device)
        table = torch.tensor(blocks, dtype=torch.int32, device=device)
        arguments = (room, cache.to(device), table, num_keys, dim, block_size, tile_keys)
        _launch(kernel, num_tiles, arguments)
        got = room.cpu()
        told = (
            f"num_keys={num_keys}, BLOCK_SIZE={block_size}, TILE_KEYS={tile_keys}, "
            f"block_table={blocks}: "
        )
        wrong = (got[:num_keys] != keys).any(dim=1).nonzero()
        if len(wrong):
            key = int(wrong[0])
            found = (cache[slots] == got[key]).all(dim=1).nonzero()
            if len(found):
                instead = f"holds the key of position {int(found[0])}"
            elif got[key].isnan().any():
                instead = "holds NaN: it came from a slot that is not the request's"
            else:
                instead = f"begins with {_numbers(got[key][:3])}"
            raise Wrong(
                f"{told}row {key} of out {instead}; the key of position {key} lies in slot "
                f"{int(slots[key])}"
            )
        if (got[num_keys:] != 7.0).any():
            raise Wrong(f"{told}rows from {num_keys} on are not the request's, but were written")
    return "key by key from its block, and nothing beyond the last"


def _launch(kernel: Any, num_tiles: int, arguments: tuple[Any, ...]) -> None:
    """Launch; Triton's interpreter wraps what a kernel raises, and the reason is what counts."""
    try:
        kernel[(num_tiles,)](*arguments)
    except Exception as error:
        reason = error.__cause__ or error
        if isinstance(reason, NotImplementedError) or "NotImplementedError" in str(error):
            raise NotImplementedError from error
        raise reason from None


@exercise("tile-of-program")
def tile_of_program(
    answer: Callable[[int, list[int], int], tuple[int, int] | None],
) -> str:
    """`answer(tile, cu_seqlens_q, tile_tokens)`: (sequence, its first token in the tile), or None.

    Any numbering will do in which tiles 0 … num_tokens // tile_tokens + num_seqs - 1 cover every
    token of the step exactly once.
    """
    rng = random.Random()
    cases = [([5], 4), ([1, 1, 1], 4), ([8, 1, 4], 4), ([1, 9, 1, 3], 4), ([3, 2], 1)]
    for _ in range(12):
        lengths = [rng.choice([1, 1, rng.randint(1, 40)]) for _ in range(rng.randint(1, 8))]
        cases.append((lengths, rng.choice([1, 2, 5, 16])))
    for lengths, tile_tokens in cases:
        cu_seqlens_q = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        num_tiles = cu_seqlens_q[-1] // tile_tokens + len(lengths)
        told = f"cu_seqlens_q={cu_seqlens_q}, tile_tokens={tile_tokens}, {num_tiles} tiles: "
        covered: Counter[tuple[int, int]] = Counter()
        by_tile: dict[tuple[int, int], int] = {}
        for tile in range(num_tiles):
            place = answer(tile, list(cu_seqlens_q), tile_tokens)
            if place is None:
                continue
            seq, first = place
            if not 0 <= seq < len(lengths) or not 0 <= first < lengths[seq]:
                raise Wrong(
                    f"{told}tile {tile} gave {place}, but "
                    + (
                        f"sequence {seq} has only {lengths[seq]} tokens in this step"
                        if 0 <= seq < len(lengths)
                        else f"there are only sequences 0 to {len(lengths) - 1}"
                    )
                    + " (None says that a tile has nothing to do)"
                )
            for token in range(first, min(first + tile_tokens, lengths[seq])):
                covered[seq, token] += 1
                by_tile.setdefault((seq, token), tile)
                if covered[seq, token] > 1:
                    raise Wrong(
                        f"{told}token {token} of sequence {seq} is computed by tile "
                        f"{by_tile[seq, token]} and again by tile {tile}"
                    )
        for seq, length in enumerate(lengths):
            missing = [token for token in range(length) if not covered[seq, token]]
            if missing:
                raise Wrong(f"{told}nobody computes token {missing[0]} of sequence {seq}")
    return "every token of every sequence has exactly one program"


def _numbers(values: Tensor) -> str:
    return "[" + ", ".join(f"{float(value):.3f}" for value in values.flatten()) + "]"
