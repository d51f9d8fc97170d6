"""How many blocks the KV cache gets when nobody says: what the device's memory allows.

On a GPU, everything that weights and activations leave of `memory_fraction` (activations are
measured by one full step, as in vLLM); on a CPU, which has other things to do, a bounded share.
"""

from __future__ import annotations

import os

import torch

from minichunk.core.plan import ScheduledChunk, StepPlan
from minichunk.core.request import SamplingParams
from minichunk.model.config import ModelConfig
from minichunk.model.errors import ModelError
from minichunk.model.executor import ModelExecutor

CPU_SHARE = 0.25  # of the memory that is free now
CPU_MOST = 4 * 2**30  # bytes


def default_num_blocks(
    executor: ModelExecutor,
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    memory_fraction: float,
) -> int:
    """The size of the block pool. Raises ModelError if not a single request would fit.

    More blocks than `max_num_seqs` requests of `max_model_len` tokens could never be used.
    """
    if not 0.0 < memory_fraction <= 1.0:
        raise ModelError(f"memory_fraction={memory_fraction} must be above 0 and at most 1")
    block_bytes = block_size * executor.config.kv_bytes_per_token(executor.dtype.itemsize)
    useful = max_num_seqs * -(-max_model_len // block_size)
    if executor.device.type == "cuda":
        activations = measure_activations(executor, max_num_batched_tokens)
        free, total = torch.cuda.mem_get_info(executor.device)
        room = gpu_room(total, free, activations, memory_fraction)
    else:
        room = min(int(CPU_SHARE * free_cpu_bytes()), CPU_MOST)
    blocks = min(room // block_bytes, useful)
    if blocks < 1:
        raise ModelError(
            f"no memory is left for the KV cache on {executor.device}: a block of {block_size} "
            f"tokens takes {block_bytes / 2**20:.1f} MiB, and {max(room, 0) / 2**20:.1f} MiB "
            "remain; raise memory_fraction, lower max_num_batched_tokens, or choose a smaller model"
        )
    return int(blocks)


def gpu_room(total: int, free: int, activations: int, memory_fraction: float) -> int:
    """Bytes for the KV cache: `memory_fraction` of the card, less what is and will be in use."""
    in_use = total - free
    return int(total * memory_fraction) - in_use - activations


def measure_activations(executor: ModelExecutor, num_tokens: int) -> int:
    """Bytes that the largest step takes beside weights and cache: run one and look."""
    device = executor.device
    executor.reserve(-(-num_tokens // 16), 16)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    executor.execute(full_step(executor.config, num_tokens))
    peak = torch.cuda.max_memory_allocated(device) - before
    executor.release()
    torch.cuda.empty_cache()
    return peak


def full_step(config: ModelConfig, num_tokens: int, block_size: int = 16) -> StepPlan:
    """A step of `num_tokens` prompt tokens, in as few prompts as the model allows; all sample."""
    chunks: list[ScheduledChunk] = []
    first_block = 0
    while num_tokens > 0:
        longest = min(config.max_model_len, num_tokens) // block_size * block_size
        length = min(num_tokens, max(longest, block_size))
        num_blocks = -(-length // block_size)
        chunks.append(
            ScheduledChunk(
                request_id=f"warm-up-{len(chunks)}",
                start=0,
                num_tokens=length,
                token_ids=(0,) * length,
                block_table=tuple(range(first_block, first_block + num_blocks)),
                sampling=SamplingParams(seed=0),
                is_decode=False,
                num_prompt_tokens=length,
            )
        )
        first_block += num_blocks
        num_tokens -= length
    total = sum(chunk.num_tokens for chunk in chunks)
    return StepPlan(step=0, chunks=tuple(chunks), budget=total, block_size=block_size)


def free_cpu_bytes() -> int:
    """Memory that the operating system could give us now; 8 GiB where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30
