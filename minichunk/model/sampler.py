"""From logits to tokens: the filters of `SamplingParams`, then one draw for each row.

The last thing of a step. A row's draw depends on its logits, its seed and its position only, so a
seeded request writes the same text whatever the chunk size and whoever else is in the batch, and
again after a preemption (the noise itself is in `kernels/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minichunk.core.plan import ScheduledChunk
from minichunk.core.request import SamplingParams
from minichunk.kernels.sampling import greedy, gumbel_sample

LOWEST_TEMPERATURE = 1e-6  # differences of logits below this are lost in float32 anyway


def sample(logits: Tensor, sampled: Sequence[ScheduledChunk], *, backend: str = "torch") -> Tensor:
    """The next token of each row, [rows] int64. logits [rows, vocab_size], rows as in `sampled`.

    The position of the drawn token is its chunk's `stop`.
    """
    params = [chunk.sampling for chunk in sampled if chunk.sampling is not None]
    if all(param.temperature == 0 for param in params):
        return greedy(logits, backend=backend)
    device = logits.device
    temperatures = host_to(device, [_temperature(param) for param in params], torch.float32)
    seeds = host_to(device, [as_int64(param.seed or 0) for param in params], torch.int64)
    positions = host_to(device, [chunk.stop for chunk in sampled], torch.int64)
    logits = filter_logits(logits, params)
    return gumbel_sample(logits, temperatures, seeds, positions, backend=backend)


def filter_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits with -inf for the tokens that top-k, top-p or min-p rule out.

    All three look at softmax(logits / temperature), in this order: the `top_k` likeliest tokens; of
    these, the fewest that together reach probability `top_p`; of these, the ones at least `min_p`
    times as likely as the likeliest (which is therefore always kept).
    """
    rows = [
        row
        for row, param in enumerate(params)
        if _temperature(param) > 0 and (param.top_k or param.top_p < 1 or param.min_p > 0)
    ]
    if not rows:
        return logits
    device, vocab_size = logits.device, logits.shape[-1]
    chosen = [params[row] for row in rows]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return host_to(device, values, dtype)[:, None]

    temperature = column([param.temperature for param in chosen])
    top_k = column([param.top_k or vocab_size for param in chosen], torch.int64)
    top_p = column([param.top_p for param in chosen])
    min_p = column([param.min_p for param in chosen])

    index = host_to(device, rows, torch.int64)
    logits = logits.float()
    ordered, order = (logits[index] / temperature).sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(vocab_size, device=device) < top_k
    probability = ordered.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability  # what the likelier tokens have together
    # A top_p of 1 must drop nothing, though the rounded sum can reach 1 before the last token.
    kept &= (before < top_p) | (top_p >= 1)
    kept &= probability >= min_p * probability[:, :1]
    kept[:, 0] = True
    dropped = torch.empty_like(kept).scatter_(1, order, ~kept)
    filtered = logits[index].masked_fill(dropped, -torch.inf)
    return logits.index_copy(0, index, filtered)


def _temperature(param: SamplingParams) -> float:
    """0 where it is so low that logits / temperature would overflow: that is greedy, too."""
    return param.temperature if param.temperature >= LOWEST_TEMPERATURE else 0.0


def as_int64(seed: int) -> int:
    """Any whole number as a signed 64-bit one, so that every seed a user types is usable."""
    return (seed + 2**63) % 2**64 - 2**63


def host_to(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A few numbers to the device, from page-locked memory so that the host does not wait."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
