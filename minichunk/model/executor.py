"""The real executor: runs a plan on a model and returns the sampled tokens.

Heavy things live here (weights, KV tensors, captured graphs) and no bookkeeping: an executor serves
many engines one after another, each with an empty block pool, so that schedulers can be compared on
the same weights in the same memory. It only ever reads the plan.
"""

from __future__ import annotations

import torch

from minichunk.core.plan import ScheduledChunk, StepPlan, StepResult
from minichunk.core.request import SamplingParams
from minichunk.model.batch import BatchBuilder
from minichunk.model.config import ModelConfig
from minichunk.model.cuda_graphs import DecodeGraphs
from minichunk.model.decoder import Decoder
from minichunk.model.errors import ModelError
from minichunk.model.kv_tensors import KVTensors
from minichunk.model.sampler import sample
from minichunk.model.weights import DecoderWeights


class ModelExecutor:
    """Implements `core.plan.Executor` with torch. Token times are the wall clock's.

    `reserve` must have made room for the pool before the first plan of an engine is executed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        backend: str = "torch",
        compiled: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        self.config = config
        self.last_user: object = None  # the engine whose keys and values are in the KV tensors
        self.backend = backend
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.decoder = Decoder(config, weights, backend=backend, compiled=compiled)
        self.kv = KVTensors(config, 0, self.device, self.dtype)
        self._batches = BatchBuilder(self.device)
        # The torch backend plans its attention calls on the host, which a graph cannot record.
        graphs_fit = cuda_graphs and backend == "triton" and self.device.type == "cuda"
        self._graphs = DecodeGraphs(self.decoder) if graphs_fit else None

    def reserve(self, num_blocks: int, block_size: int) -> None:
        """Make the KV tensors at least this large. Their old content is lost if they must grow."""
        if num_blocks * block_size > self.kv.num_slots:
            self.release()  # first, so that old and new need not fit side by side
            self.kv = KVTensors(self.config, num_blocks * block_size, self.device, self.dtype)

    def release(self) -> None:
        """Give the KV tensors' memory back, and the graphs that were recorded with them."""
        if self._graphs is not None:
            self._graphs.clear()
        self.kv = KVTensors(self.config, 0, self.device, self.dtype)

    def execute(self, plan: StepPlan) -> StepResult:
        """One step: batch, decoder, sampler; ends when the device has finished."""
        try:
            return StepResult(self._execute(plan))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"out of memory on {self.device} in a step of {plan.num_tokens} tokens and "
                f"{len(plan.chunks)} requests; lower max_num_batched_tokens or chunk_size (fewer "
                "activations), or memory_fraction or num_blocks (a smaller KV cache)"
            ) from error

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> dict[str, int]:
        batch = self._batches.build(plan)
        kv_layers = self.kv.layers(plan.block_size)
        if self._graphs is not None and plan.is_decode_only:
            logits = self._graphs.logits(batch, kv_layers)
        else:
            logits = self.decoder.logits(batch, kv_layers)
        if not batch.sampled:
            # Nothing to read back, but the step must not seem shorter than it was.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return {}
        token_ids = sample(logits, batch.sampled, backend=self.backend).tolist()
        names = [chunk.request_id for chunk in batch.sampled]
        return dict(zip(names, token_ids, strict=True))

    @torch.inference_mode()
    def prompt_logits(self, token_ids: list[int]) -> torch.Tensor:
        """The logits [vocab_size] after a token sequence, computed in one go in its own KV tensors.

        Used to explain a difference between two runs; the engine's cache is not touched.
        """
        block_size = 16
        num_blocks = -(-len(token_ids) // block_size)
        kv = KVTensors(self.config, num_blocks * block_size, self.device, self.dtype)
        chunk = ScheduledChunk(
            request_id="prompt_logits",
            start=0,
            num_tokens=len(token_ids),
            token_ids=tuple(token_ids),
            block_table=tuple(range(num_blocks)),
            sampling=SamplingParams(temperature=0.0, seed=0),
            is_decode=False,
            num_prompt_tokens=len(token_ids),
        )
        plan = StepPlan(step=0, chunks=(chunk,), budget=len(token_ids), block_size=block_size)
        batch = BatchBuilder(self.device).build(plan)
        return self.decoder.logits(batch, kv.layers(block_size))[0]
