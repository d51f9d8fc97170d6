"""Choosing the next token from the logits: greedy, or at random by the Gumbel trick.

The last thing a step does on the device. Shows the Gumbel-max trick (argmax of logits + Gumbel
noise samples from softmax(logits), with no softmax and no sum) and counter-based random numbers
(Philox; Salmon et al., SC 2011): the noise is a pure function of (seed, position, token id), so a
seeded output does not depend on who else is in the batch, on the chunk size or on the backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
PHILOX_ROUND_A, PHILOX_ROUND_B = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_A, PHILOX_KEY_B = 0x9E3779B9, 0xBB67AE85
MASK32 = 0xFFFFFFFF
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def greedy(logits: Tensor, *, backend: str = "torch") -> Tensor:
    """The most likely token of each row, the lowest id on a tie. [rows, vocab] -> [rows] int64."""
    return logits.argmax(dim=-1)


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
    return gumbel_sample_torch(logits, temperatures, seeds, positions)


def gumbel_sample_torch(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """`gumbel_sample` in torch."""
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    hot = temperatures[:, None] > 0
    scores = logits.float() / torch.where(hot, temperatures[:, None], 1.0)
    return torch.where(hot, scores + noise, scores).argmax(dim=-1)


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
