"""Where the queries and keys of a step lie: the index work that all layers of a step share.

Built once per step from the plan, then passed to `attention.paged_attention` by every layer. It
shows the ragged batch: sequences of different lengths lie end to end, without padding, and
`cu_seqlens_q` says where each begins. A decode is nothing but a chunk of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the queries and keys of a step lie. Built once per step, used by all layers.

    cu_seqlens_q [num_seqs + 1] int32  sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i + 1]
    seq_lens     [num_seqs] int32      length including this step's tokens; 0 for a padding row of
                                       a CUDA graph, whose output is 0
    block_tables [num_seqs, max_blocks] int32, unused entries -1

    `max_query_len` and `max_seq_len` are upper bounds known on the host: launching a kernel never
    has to ask the GPU. A CUDA graph is captured with the bounds of its bucket, over tensors whose
    content is replaced before each replay.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int
    _plans: dict[tuple[Callable[..., object], torch.dtype], object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def build(
        cls,
        cu_seqlens_q: Tensor | Sequence[int],
        seq_lens: Tensor | Sequence[int],
        block_tables: Tensor | Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str | None = None,
    ) -> AttentionMetadata:
        """From tensors or lists on the host; `device` is where the tensors go (default: stay).

        Block tables given as lists may have different lengths. Raises ValueError where the three
        disagree about the number of sequences, or a table is too short for its sequence.
        """
        cu_seqlens_q = torch.as_tensor(cu_seqlens_q, dtype=torch.int32)
        seq_lens = torch.as_tensor(seq_lens, dtype=torch.int32)
        if not isinstance(block_tables, Tensor):
            width = max((len(table) for table in block_tables), default=0)
            rows = [[*table, *[-1] * (width - len(table))] for table in block_tables]
            block_tables = torch.tensor(rows, dtype=torch.int32).view(len(rows), width)
        block_tables = block_tables.to(torch.int32)
        num_seqs = len(seq_lens)
        if len(cu_seqlens_q) != num_seqs + 1 or len(block_tables) != num_seqs:
            raise ValueError(
                f"seq_lens describes {num_seqs} sequences, so cu_seqlens_q needs {num_seqs + 1} "
                f"entries and block_tables {num_seqs} rows, but they have {len(cu_seqlens_q)} and "
                f"{len(block_tables)}"
            )
        max_query_len = int(cu_seqlens_q.diff().max()) if num_seqs else 0
        max_seq_len = int(seq_lens.max()) if num_seqs else 0
        if max_seq_len > block_tables.shape[1] * block_size:
            raise ValueError(
                f"a sequence of {max_seq_len} tokens does not fit a block table of "
                f"{block_tables.shape[1]} blocks of {block_size}"
            )
        return cls(
            cu_seqlens_q.to(device, non_blocking=True),
            seq_lens.to(device, non_blocking=True),
            block_tables.to(device, non_blocking=True).contiguous(),
            block_size,
            max_query_len,
            max_seq_len,
        )

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    def planned(self, plan: Callable[[AttentionMetadata, torch.dtype], T], dtype: torch.dtype) -> T:
        """`plan(self, dtype)`, made once per step: all layers use the same index work."""
        key = (plan, dtype)
        if key not in self._plans:
            self._plans[key] = plan(self, dtype)
        return cast("T", self._plans[key])
