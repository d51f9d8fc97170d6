"""The KV cache as tensors: one pair of paged key and value tensors for each layer.

The scheduler's block pool only counts blocks; here is the memory that the numbers stand for. It is
stored as plain slots, so that one executor can serve engines with different block sizes: a block is
only a way of looking at `block_size` neighbouring slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minichunk.model.config import ModelConfig
from minichunk.model.errors import ModelError
from minichunk.model.host_memory import advise_huge_pages


class KVTensors:
    """Keys and values of all layers for `num_slots` tokens. Memory is not initialised."""

    def __init__(
        self, config: ModelConfig, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        self.num_slots = num_slots
        try:
            self.storage = torch.empty(shape, device=device, dtype=dtype)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            size = config.kv_bytes_per_token(dtype.itemsize) * num_slots
            raise ModelError(
                f"a KV cache of {num_slots} tokens needs {size / 2**30:.1f} GiB, which {device} "
                "does not have; lower num_blocks, memory_fraction or max_model_len"
            ) from error
        if device.type == "cpu":
            advise_huge_pages(self.storage.data_ptr(), self.storage.nbytes)
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def layers(self, block_size: int) -> list[tuple[Tensor, Tensor]]:
        """(keys, values) of each layer, [num_blocks, block_size, num_kv_heads, head_dim] each."""
        if block_size not in self._views:
            whole = self.num_slots // block_size * block_size
            self._views[block_size] = [
                (
                    keys[:whole].unflatten(0, (-1, block_size)),
                    values[:whole].unflatten(0, (-1, block_size)),
                )
                for keys, values in self.storage
            ]
        return self._views[block_size]
