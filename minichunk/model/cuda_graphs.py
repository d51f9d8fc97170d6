"""CUDA graphs for steps that only decode: the whole decoder launched as one recorded unit.

A small model's decode step is hundreds of kernels of a few microseconds, and launching them from
Python takes longer than running them. A graph records them once for a batch size; since batch sizes
vary, a step is padded to the next bucket with rows that write no slot and see no keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minichunk.kernels.attention_metadata import AttentionMetadata
from minichunk.model.batch import Batch
from minichunk.model.decoder import Decoder

SMALL_BUCKETS = (1, 2, 4)
BUCKET_STEP = 8
LARGEST_BUCKET = 512  # beyond it a step is long enough to hide its launches


def bucket_for(num_requests: int) -> int | None:
    """The smallest batch size recorded that holds this many requests; None: too many for one."""
    for bucket in SMALL_BUCKETS:
        if num_requests <= bucket:
            return bucket
    bucket = -(-num_requests // BUCKET_STEP) * BUCKET_STEP
    return bucket if bucket <= LARGEST_BUCKET else None


def padded_inputs(longest: int, batch: Batch, bucket: int) -> Batch:
    """A batch of `bucket` decodes on the device of `batch`, to be filled by `fill`.

    Its block tables have room for sequences of `longest` tokens, and its bounds on query and
    sequence length hold for all of them: kernels are chosen by these when recorded.
    """
    device, block_size = batch.input_ids.device, batch.attention.block_size
    max_blocks = max(-(-longest // block_size), batch.attention.block_tables.shape[1])

    def full(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return Batch(
        input_ids=full((bucket,), 0, torch.int64),
        positions=full((bucket,), 0, torch.int64),
        slot_mapping=full((bucket,), -1, torch.int64),
        sample_rows=torch.arange(bucket, device=device),
        attention=AttentionMetadata(
            cu_seqlens_q=torch.arange(bucket + 1, dtype=torch.int32, device=device),
            seq_lens=full((bucket,), 0, torch.int32),
            block_tables=full((bucket, max_blocks), -1, torch.int32),
            block_size=block_size,
            max_query_len=1,
            max_seq_len=max_blocks * block_size,
        ),
        sampled=(),
    )


def fill(inputs: Batch, batch: Batch) -> None:
    """Copy a step into the padded inputs; the rows beyond it become padding again."""
    rows = batch.num_tokens
    inputs.input_ids[:rows].copy_(batch.input_ids)
    inputs.positions[:rows].copy_(batch.positions)
    inputs.slot_mapping[:rows].copy_(batch.slot_mapping)
    inputs.slot_mapping[rows:].fill_(-1)
    inputs.attention.seq_lens[:rows].copy_(batch.attention.seq_lens)
    inputs.attention.seq_lens[rows:].zero_()
    tables = batch.attention.block_tables
    inputs.attention.block_tables[:rows, : tables.shape[1]].copy_(tables)


@dataclass(frozen=True)
class RecordedGraph:
    """A graph with the tensors it reads and the one it writes, [bucket, vocab_size]."""

    graph: torch.cuda.CUDAGraph
    inputs: Batch
    logits: Tensor


class DecodeGraphs:
    """Records a graph per bucket on first use and replays it afterwards.

    All graphs share one memory pool: only one of them runs at a time.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._graphs: dict[tuple[int, int, int], RecordedGraph] = {}
        self._pool: Any = None

    def clear(self) -> None:
        """Forget all recordings, as must be done before the KV tensors move."""
        self._graphs.clear()
        self._pool = None

    def logits(self, batch: Batch, kv_layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The logits [num_requests, vocab_size] of a decode-only step."""
        rows = batch.num_tokens
        bucket = bucket_for(rows)
        if bucket is None:
            return self._decoder.logits(batch, kv_layers)
        # No sequence is longer than the model allows, nor than the whole cache.
        num_slots = kv_layers[0][0].shape[:2].numel()
        longest = min(self._decoder.config.max_model_len, num_slots)
        key = (bucket, batch.attention.block_size, longest)
        recorded = self._graphs.get(key)
        if recorded is None:
            inputs = padded_inputs(longest, batch, bucket)
            recorded = self._graphs[key] = self._record(inputs, kv_layers)
        fill(recorded.inputs, batch)
        recorded.graph.replay()
        return recorded.logits[:rows]

    def _record(self, inputs: Batch, kv_layers: list[tuple[Tensor, Tensor]]) -> RecordedGraph:
        # One eager run first: kernels are compiled and workspaces allocated outside the recording.
        # Every row is padding then, so nothing is written into the cache.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decoder.logits(inputs, kv_layers)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._decoder.logits(inputs, kv_layers)
        self._pool = self._pool or graph.pool()
        return RecordedGraph(graph, inputs, logits)
