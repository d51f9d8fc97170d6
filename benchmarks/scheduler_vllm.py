"""vLLM's scheduler, driven alone: the other side of `benchmarks/scheduler.py`.

That file runs this one in a child process, with the Python of an environment that has vLLM. It
reads one JSON order a line (`batch`, `waiting`, `steps`) and answers each with the seconds that
`Scheduler.schedule` and `Scheduler.update_from_output` took, in every step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
sys.modules["torchvision"] = None  # type: ignore[assignment]  # not needed, and slow to import

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

SHAPE = {  # any decoder will do: the scheduler asks for its longest sequence only
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 131072,
}
PARAMS = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)


def make_scheduler(folder: str, batch: int, budget: int, num_blocks: int) -> Scheduler:
    """As vLLM's own unit tests build one: chunked prefill, no prefix caching, one KV group."""
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=131072
    )
    cache = CacheConfig(block_size=16, enable_prefix_caching=False)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=budget,
            max_model_len=131072,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
    )
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        log_stats=False,
    )


def step(scheduler: Scheduler) -> tuple[float, float, int]:
    """Seconds of `schedule` and of `update_from_output`, and how many were scheduled."""
    start = time.process_time()
    plan = scheduler.schedule()
    scheduled = time.process_time()
    ids = list(plan.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[i].is_prefill_chunk else [0] for i in ids]
    output = ModelRunnerOutput(ids, {i: row for row, i in enumerate(ids)}, tokens)
    before = time.process_time()
    scheduler.update_from_output(plan, output)
    return scheduled - start, time.process_time() - before, len(ids)


def fill(scheduler: Scheduler, first: int, count: int) -> None:
    for index in range(first, first + count):
        scheduler.add_request(Request(str(index), [0] * 32, PARAMS, None))


def answer(order: dict[str, Any], known: dict[tuple[int, int], Scheduler], folder: str) -> Any:
    key = batch, waiting = order["batch"], order["waiting"]
    if key not in known:
        scheduler = known[key] = make_scheduler(folder, batch, order["budget"], order["blocks"])
        fill(scheduler, 0, batch)
        while any(request.is_prefill_chunk for request in scheduler.running) or scheduler.waiting:
            step(scheduler)
        fill(scheduler, batch, waiting)
        for _ in range(5):
            step(scheduler)
    rows = [step(known[key]) for _ in range(order["steps"])]
    if any(count != batch for _, _, count in rows):
        raise RuntimeError(f"{batch} were to decode in every step, but {rows[0][2]} did")
    return {"schedule": [row[0] for row in rows], "update": [row[1] for row in rows]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not come between
    os.dup2(2, 1)
    known: dict[tuple[int, int], Scheduler] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), known, folder)), file=answers, flush=True)


if __name__ == "__main__":
    main()
