"""Choosing the next token from the logits: greedy, or at random by the Gumbel trick.

The last thing a step does on the device. Shows the Gumbel-max trick (argmax of logits + Gumbel
noise samples from softmax(logits), with no softmax and no sum) and counter-based random numbers
(Philox; Salmon et al., SC 2011): the noise is a pure function of (seed, position, token id), so a
seeded output does not depend on who else is in the batch, on the chunk size or on the backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minichunk.kernels._triton import jit, next_power_of_2, tl
from minichunk.kernels.backend import runs_on_triton

TILE = 4096  # token ids of one program
PHILOX_ROUNDS = 10
PHILOX_ROUND_A, PHILOX_ROUND_B = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_A, PHILOX_KEY_B = 0x9E3779B9, 0xBB67AE85
MASK32 = 0xFFFFFFFF
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def greedy(logits: Tensor, *, backend: str = "torch") -> Tensor:
    """The most likely token of each row, the lowest id on a tie. [rows, vocab] -> [rows] int64."""
    if runs_on_triton(backend, logits):
        return sample_triton(logits, None, None, None)
    return logits.max(dim=-1).indices  # on a CPU several times faster than argmax, and as exact


def gumbel_sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    backend: str = "torch",
) -> Tensor:
    """One token per row, drawn from softmax(logits / temperature); greedy where temperature is 0.

    logits [rows, vocab], -inf for tokens that must not come; temperatures [rows] float32;
    seeds [rows] int64; positions [rows] int64, of the token that is drawn -> [rows] int64.
    The random bits are the same on every backend; the logarithms may differ in the last place.
    """
    if runs_on_triton(backend, logits):
        return sample_triton(logits, temperatures, seeds, positions)
    return gumbel_sample_torch(logits, temperatures, seeds, positions)


def gumbel_sample_torch(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """`gumbel_sample` in torch."""
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    hot = temperatures[:, None] > 0
    scores = logits.float() / torch.where(hot, temperatures[:, None], 1.0)
    return torch.where(hot, scores + noise, scores).max(dim=-1).indices


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, [rows, vocab_size] float32, a pure function of its arguments.

    Gumbel = -log(E) with E = -log(1 - u), u uniform. The tokens that win have a small E, and there
    1 - u would be coarse: log1p keeps all the bits of a small u.
    """
    uniform = (philox_bits(seeds, positions, vocab_size).float() * 2.0**-32).clamp(
        2.0**-33, BELOW_ONE
    )
    return -torch.log(-torch.log1p(-uniform))


def philox_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Philox4x32-10: 32 random bits for each (seed, position, token id), in int64.

    The key is the seed (low word, high word). Token id t gets word t % 4 of the counter
    (t // 4, position, 0, 0). A product of two 32-bit numbers overflows int64 only into its sign,
    so its bits are right, and shifting and masking gives the high and the low word.
    """
    c0 = torch.arange(-(-vocab_size // 4), device=seeds.device).expand(len(seeds), -1)
    c1 = positions.long()[:, None].expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (seeds & MASK32)[:, None], (seeds >> 32 & MASK32)[:, None]
    for _ in range(PHILOX_ROUNDS):
        product_a, product_b = c0 * PHILOX_ROUND_A, c2 * PHILOX_ROUND_B
        c0, c1 = (product_b >> 32 & MASK32) ^ c1 ^ k0, product_b & MASK32
        c2, c3 = (product_a >> 32 & MASK32) ^ c3 ^ k1, product_a & MASK32
        k0, k1 = k0 + PHILOX_KEY_A & MASK32, k1 + PHILOX_KEY_B & MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :vocab_size]


def sample_triton(
    logits: Tensor, temperatures: Tensor | None, seeds: Tensor | None, positions: Tensor | None
) -> Tensor:
    """Both kinds of sampling on Triton; greedy where temperatures is None.

    Two launches: the best of each tile of the vocabulary, then the best of the tiles, so that one
    row alone already keeps many multiprocessors busy.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the rows of logits must be contiguous")
    num_tiles = -(-vocab_size // TILE)
    best_scores = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    best_of_tile_kernel[(num_rows, num_tiles)](
        best_scores,
        best_ids,
        logits,
        temperatures,
        seeds,
        positions,
        logits.stride(0),
        vocab_size,
        num_tiles,
        IS_GREEDY=temperatures is None,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=True,
    )
    best_of_tiles_kernel[(num_rows,)](
        out,
        best_scores,
        best_ids,
        num_tiles,
        PADDED_TILES=next_power_of_2(num_tiles),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out


@jit()
def best_of_tile_kernel(  # type: ignore[no-untyped-def]
    best_score_ptr,
    best_id_ptr,
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    IS_GREEDY: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: the best of TILE token ids of one row, with Gumbel noise if it is to be random.

    best_score float32, best_id int32 [num_rows, num_tiles]; logits [num_rows, vocab_size];
    temperature float32, seed int64, position integer [num_rows], None with IS_GREEDY.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_id = tile * TILE + tl.arange(0, TILE)
    logits_ptrs = logits_ptr + row * logits_stride + token_id
    score = tl.load(logits_ptrs, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)
    if not IS_GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            seed = tl.load(seed_ptr + row)
            position = tl.load(position_ptr + row)
            score = tl.div_rn(score, temperature + tl.zeros_like(score))
            score += _gumbel_noise(seed, position, tile * (TILE // 4), TILE)
    best_score, best = tl.max(score, axis=0, return_indices=True)
    tl.store(best_score_ptr + row * num_tiles + tile, best_score)
    tl.store(best_id_ptr + row * num_tiles + tile, tile * TILE + best)


@jit()
def _gumbel_noise(seed, position, first_counter, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`gumbel_noise` for TILE token ids from 4 * first_counter on; see there."""
    counter = first_counter + tl.arange(0, TILE // 4)
    zero = counter * 0
    bits_0, bits_1, bits_2, bits_3 = tl.philox(
        seed, counter, zero + position.to(tl.int32), zero, zero
    )
    bits = tl.interleave(tl.interleave(bits_0, bits_2), tl.interleave(bits_1, bits_3))
    uniform = bits.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10
    uniform = tl.minimum(tl.maximum(uniform, 1.1641532182693481e-10), 0.99999994)
    # log1p(-u), which Triton lacks: log(y) for y = 1 - u, corrected for the rounding of y.
    y = 1.0 - uniform
    log1p = tl.where(y == 1.0, -uniform, tl.log(y) * (uniform / (1.0 - y)))
    return -tl.log(-log1p)


@jit()
def best_of_tiles_kernel(  # type: ignore[no-untyped-def]
    out_ptr, best_score_ptr, best_id_ptr, num_tiles, PADDED_TILES: tl.constexpr
):
    """One program: the best of one row's tiles. out int64 [num_rows]; the rest as there."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED_TILES)
    score_ptrs = best_score_ptr + row * num_tiles + tile
    score = tl.load(score_ptrs, mask=tile < num_tiles, other=float("-inf"))
    best = tl.argmax(score, axis=0)
    tl.store(out_ptr + row, tl.load(best_id_ptr + row * num_tiles + best).to(tl.int64))
