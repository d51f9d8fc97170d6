"""From plan to tensors: a step's chunks laid end to end, with the arrays that describe them.

The ragged batch of the field: no padding, `cu_seqlens_q` says which rows belong to which request,
and `slot_mapping` where each token's key and value are written. All index arithmetic is done once
per step in numpy over whole arrays; per request there is only the copying of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from minichunk.core.plan import ScheduledChunk, StepPlan
from minichunk.kernels.attention_metadata import AttentionMetadata

MANY_ROWS = 1024  # rows of block tables that may be kept for requests that are not in the step


@dataclass(frozen=True)
class Batch:
    """One step on the device.

    input_ids, positions, slot_mapping [num_tokens] int64; positions are absolute
    sample_rows [num_samples] int64   rows whose logits are wanted: each sampling chunk's last
    sampled                           those chunks, in the same order
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_rows: Tensor
    attention: AttentionMetadata
    sampled: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class BlockTableRows:
    """Block tables of the running requests as one array, rewritten only where they changed.

    A table is a tuple that is replaced when it grows, so `is` tells whether a row is still good:
    a decode step writes about one row in `block_size`.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._tables: list[tuple[int, ...]] = []
        self._array = np.full((0, 0), -1, dtype=np.int32)

    def gather(self, chunks: tuple[ScheduledChunk, ...]) -> np.ndarray:
        """[len(chunks), longest table] int32, unused entries -1."""
        if len(self._rows) > 2 * len(chunks) + MANY_ROWS:  # mostly requests that are gone
            self._rows, self._tables = {}, []
        rows = [self._row(chunk) for chunk in chunks]
        width = max((len(chunk.block_table) for chunk in chunks), default=0)
        return np.ascontiguousarray(self._array[rows, :width])

    def _row(self, chunk: ScheduledChunk) -> int:
        table = chunk.block_table
        row = self._rows.get(chunk.request_id)
        if row is None:
            row = self._rows[chunk.request_id] = len(self._tables)
            self._tables.append(())
        if self._tables[row] is not table:
            self._tables[row] = table
            self._make_room(row + 1, len(table))
            self._array[row, : len(table)] = table
            self._array[row, len(table) :] = -1
        return row

    def _make_room(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self._array.shape
        if rows <= old_rows and columns <= old_columns:
            return
        new_rows = max(2 * old_rows, rows) if rows > old_rows else old_rows
        new_columns = max(2 * old_columns, columns) if columns > old_columns else old_columns
        larger = np.full((new_rows, new_columns), -1, dtype=np.int32)
        larger[:old_rows, :old_columns] = self._array
        self._array = larger


class Upload:
    """Arrays to the device: through one page-locked buffer each, and without waiting for the GPU.

    The buffer may be written again in the next step: the executor ends each step by waiting for its
    tokens, and the copy came before them on the same stream. On a CPU nothing is copied at all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: dict[str, Tensor] = {}

    def __call__(self, name: str, array: np.ndarray) -> Tensor:
        source = torch.from_numpy(array)
        if self._device.type == "cpu":
            return source
        flat = source.reshape(-1)
        buffer = self._pinned.get(name)
        if buffer is None or len(buffer) < len(flat):
            buffer = torch.empty(max(1, 2 * len(flat)), dtype=flat.dtype, pin_memory=True)
            self._pinned[name] = buffer
        staged = buffer[: len(flat)]
        staged.copy_(flat)
        return staged.to(self._device, non_blocking=True).view(source.shape)


class BatchBuilder:
    """Builds the batch of each step; keeps the block tables and buffers from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._tables = BlockTableRows()
        self.upload = Upload(device)

    def build(self, plan: StepPlan) -> Batch:
        """The tensors of a plan. Raises ValueError for a plan that carries no token ids."""
        chunks, block_size = plan.chunks, plan.block_size
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        cu_seqlens = np.concatenate(([0], lengths.cumsum()))
        num_tokens = int(cu_seqlens[-1])
        input_ids = np.array(
            list(chain.from_iterable(chunk.token_ids for chunk in chunks)), dtype=np.int64
        )
        if len(input_ids) != num_tokens:
            raise ValueError(
                f"the plan schedules {num_tokens} tokens but carries {len(input_ids)} token ids; "
                "a real model needs prompts of token ids, not of lengths"
            )
        owner = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(num_tokens) + (starts - cu_seqlens[:-1])[owner]
        tables = self._tables.gather(chunks)
        slots = tables[owner, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        samples = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        seq_lens = starts + lengths
        upload = self.upload
        return Batch(
            input_ids=upload("input_ids", input_ids),
            positions=upload("positions", positions),
            slot_mapping=upload("slot_mapping", slots),
            sample_rows=upload("sample_rows", cu_seqlens[1:][samples] - 1),
            attention=AttentionMetadata(
                cu_seqlens_q=upload("cu_seqlens_q", cu_seqlens.astype(np.int32)),
                seq_lens=upload("seq_lens", seq_lens.astype(np.int32)),
                block_tables=upload("block_tables", tables),
                block_size=block_size,
                max_query_len=int(lengths.max()),
                max_seq_len=int(seq_lens.max()),
            ),
            sampled=tuple(chunks[index] for index in samples),
        )
