"""Paged attention in torch: the step as a few dense calls of scaled_dot_product_attention.

This is what runs where Triton does not, and, fed with float64, what its kernels are checked
against. The paged cache is made dense by gathering: decodes of similar length are one padded call,
and each chunk of a prompt is a call of its own. It shows what a paged kernel is good for: the
gathered keys and values are written and read once more than a kernel would.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from minichunk.kernels.attention_metadata import AttentionMetadata

QUERY_TILE = 512  # query tokens of a chunk that are attended at a time, behind a computed prefix
KEY_MULTIPLE = 32  # a CPU computes the keys of a chunk in vectors; the rest of one goes one by one
SHORTEST_BUCKET = 8  # decodes of up to 2**8 tokens share one padded call


@dataclass(frozen=True)
class DecodeCall:
    """B sequences with one query token each, padded to S keys.

    rows  of q, [B] or a slice
    slots [B * S] in the cache; where a sequence is shorter than S, its own last slot again,
          because an unwritten slot may hold NaN, and 0 * NaN is NaN
    bias  [B, 1, 1, S] added to the scores: 0, or -inf for padding
    """

    rows: Tensor | slice
    slots: Tensor
    bias: Tensor

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        batch, _, _, num_keys = self.bias.shape
        num_kv_heads = keys.shape[1]
        # The query heads that share a KV head become query rows, so K and V need no copies.
        folded = q[self.rows].unflatten(1, (num_kv_heads, -1))  # [B, kv heads, group, dim]

        def gathered(cache: Tensor) -> Tensor:  # [B, kv heads, S, dim]
            return cache.index_select(0, self.slots).unflatten(0, (batch, -1)).transpose(1, 2)

        attended = scaled_dot_product_attention(
            folded,
            gathered(keys),
            gathered(values),
            attn_mask=self.bias.expand(batch, 1, folded.shape[2], num_keys),
            scale=scale,
        )
        return attended.flatten(1, 2)


@dataclass(frozen=True)
class ChunkCall:
    """L query tokens of one prompt, and S keys: those up to the last of them, and padding.

    rows  of q, a slice
    slots [S] in the cache
    bias  [L, S] added to the scores: 0 or -inf; None at the beginning of a prompt, where torch's
          own causal mask spares half of the work and hides the padding, which comes last
    """

    rows: slice
    slots: Tensor
    bias: Tensor | None

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        heads = q[self.rows].transpose(0, 1)[None]  # [1, query heads, L, dim]
        group_size = q.shape[1] // keys.shape[1]

        def gathered(cache: Tensor) -> Tensor:  # [1, kv heads, S, dim]
            picked = cache.index_select(0, self.slots).transpose(0, 1)[None]
            # Of the kernels that take a mask, only the CPU's lets query heads share a KV head.
            return picked if cache.is_cpu else picked.repeat_interleave(group_size, dim=1)

        attended = scaled_dot_product_attention(
            heads,
            gathered(keys),
            gathered(values),
            attn_mask=self.bias,
            is_causal=self.bias is None,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


def paged_attention_torch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """`paged_attention` in torch, on any device and in any floating-point type."""
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, kv heads, dim]
    calls: list[ChunkCall | DecodeCall] = [
        *metadata.planned(plan_chunks, q.dtype),
        *metadata.planned(plan_decodes, q.dtype),
    ]
    if len(calls) == 1 and calls[0].rows == slice(0, len(q)):
        return calls[0](q, keys, values, scale)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for call in calls:
        out[call.rows] = call(q, keys, values, scale)
    return out


def plan_chunks(metadata: AttentionMetadata, dtype: torch.dtype) -> tuple[ChunkCall, ...]:
    """The calls for the chunks of a step's prompts, each with a bias of `dtype`.

    A chunk behind a computed prefix goes in tiles of QUERY_TILE tokens, each of which leaves out
    the keys after its last token.
    """
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    multiple = KEY_MULTIPLE if metadata.block_tables.is_cpu else 1
    calls = []
    for seq, length in enumerate(lengths):
        start, stop = starts[seq], starts[seq + 1]
        if length == 0 or stop - start < 2:
            continue
        slots = _slots(metadata, [seq], [length], multiple)[0]
        prefix = length - (stop - start)
        if prefix == 0:
            calls.append(ChunkCall(slice(start, stop), slots, None))
            continue
        for tile in range(start, stop, QUERY_TILE):
            tile_stop = min(tile + QUERY_TILE, stop)
            first, last = prefix + tile - start, prefix + tile_stop - start  # positions
            newest_first = slots[: _round_up(last, multiple)].flip(0)
            bias = _causal_bias(first, last, len(newest_first), metadata, dtype)
            calls.append(ChunkCall(slice(tile, tile_stop), newest_first, bias))
    return tuple(calls)


def plan_decodes(metadata: AttentionMetadata, dtype: torch.dtype) -> tuple[DecodeCall, ...]:
    """The calls for a step's sequences of one query token, each with a bias of `dtype`.

    Above 2**SHORTEST_BUCKET tokens the lengths of a call differ by at most a factor of 2.
    """
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for seq, length in enumerate(lengths):
        if length > 0 and starts[seq + 1] - starts[seq] == 1:
            buckets[max(SHORTEST_BUCKET, (length - 1).bit_length())].append(seq)
    calls = []
    for seqs in buckets.values():
        seen_by = [lengths[seq] for seq in seqs]
        sees = torch.arange(max(seen_by)) < torch.tensor(seen_by)[:, None, None, None]
        slots = _slots(metadata, seqs, seen_by).flatten()
        rows = _rows([starts[seq] for seq in seqs], metadata.cu_seqlens_q.device)
        calls.append(DecodeCall(rows, slots, _bias(sees, metadata, dtype)))
    return tuple(calls)


def _slots(
    metadata: AttentionMetadata, seqs: list[int], lengths: list[int], multiple: int = 1
) -> Tensor:
    """Where the tokens of some sequences lie in the cache, [sequences, longest] int64.

    The longest is rounded up to `multiple`; a sequence ends in its own last slot, again and again.
    """
    device, block_size = metadata.block_tables.device, metadata.block_size
    length = torch.tensor(lengths, device=device)[:, None]
    position = torch.arange(_round_up(max(lengths), multiple), device=device)
    position = torch.minimum(position, length - 1)
    tables = metadata.block_tables[torch.tensor(seqs, device=device)].long()
    return tables.gather(1, position // block_size) * block_size + position % block_size


def _causal_bias(
    first: int, last: int, num_keys: int, metadata: AttentionMetadata, dtype: torch.dtype
) -> Tensor:
    """The bias of the query positions first:last over `num_keys` keys that lie newest first.

    Row i hides the newest num_keys - 1 - first - i keys, one less than the row above: each row is
    the same line of -inf and 0, read one entry further on. So a CPU, whose kernel reads masks by
    their strides (and fastest in float32), gets a view of that line, which never leaves its L1.
    """
    device = metadata.block_tables.device
    if device.type == "cpu":
        dtype = torch.promote_types(dtype, torch.float32)
    line = torch.zeros(last - first + num_keys - 1, dtype=dtype, device=device)
    line[: num_keys - 1 - first] = -torch.inf
    bias = line.unfold(0, num_keys, 1)
    return bias if device.type == "cpu" else bias.contiguous()


def _bias(sees: Tensor, metadata: AttentionMetadata, dtype: torch.dtype) -> Tensor:
    hidden = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
    return hidden.to(metadata.block_tables.device)


def _rows(rows: list[int], device: torch.device) -> Tensor | slice:
    """A slice where the rows are neighbours: a view then, instead of a copy."""
    first, last = rows[0], rows[-1]
    if rows == list(range(first, last + 1)):
        return slice(first, last + 1)
    return torch.tensor(rows, device=device)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
