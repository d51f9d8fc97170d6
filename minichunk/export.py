"""A configuration in other engines' words: their flags, and what they have no flag for.

What was learnt here should carry over. A minichunk configuration is translated knob by knob; where
an engine cannot be told the same thing, that is said instead of guessed. Sources, read in their
versions of mid-2026 (flags change between releases):

- vLLM: docs.vllm.ai, "Engine Arguments" and vllm.config.scheduler, and its V1 scheduler.
- SGLang: docs.sglang.io, "Server Arguments", and its prefill adder (`schedule_policy.py`).
- TensorRT-LLM: nvidia.github.io/TensorRT-LLM, "trtllm-serve" and LLM API "SchedulerConfig".
- DeepSpeed: deepspeed/inference/v2/ragged/manager_configs.py, and DeepSpeed-MII's README.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from minichunk.core.config import EngineConfig
from minichunk.core.orders import resolve_order
from minichunk.core.policies import resolve_policy


@dataclass(frozen=True)
class Export:
    """What to type for another engine (`command`), the files it needs, and what got lost."""

    engine: str
    command: str
    files: dict[str, str] = field(default_factory=dict)
    not_expressed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.command]
        parts += [f"# {name}\n{text.rstrip()}" for name, text in self.files.items()]
        if self.not_expressed:
            parts.append("\n".join(["# Cannot be expressed:", *_bullets(self.not_expressed)]))
        return "\n\n".join(parts)


def export(config: EngineConfig, engine: str, model: str = "MODEL") -> Export:
    """Translate `config` for `engine` (a key of `ENGINES`); `model` is put in as it is.

    Raises ValueError for an unknown engine, policy or order.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    return ENGINES[engine](config, model)


def to_vllm(config: EngineConfig, model: str) -> Export:
    """vLLM (V1): running requests first, then the queue, which is `decode-first`."""
    policy, order = _names(config)
    lost = []
    flags: list[str | int] = ["--max-num-batched-tokens", config.max_num_batched_tokens]
    # vLLM refuses fewer tokens than sequences; here the smaller of the two is the limit anyway.
    flags += ["--max-num-seqs", min(config.max_num_seqs, config.max_num_batched_tokens)]
    flags += ["--block-size", config.block_size, "--seed", config.seed]
    if config.num_blocks is not None:
        flags += ["--num-gpu-blocks-override", config.num_blocks]
    if config.max_model_len is not None:
        flags += ["--max-model-len", config.max_model_len]
    flags += ["--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"]

    if policy == "continuous":
        flags += ["--no-enable-chunked-prefill"]
        lost.append(
            "policy continuous: prompts stay whole, but vLLM puts decodes into the same step; it "
            "wants --max-num-batched-tokens to be at least --max-model-len then"
        )
    else:
        flags += ["--enable-chunked-prefill"]
        if config.chunk_size is not None:
            # V1 gives no request more than this many tokens in one step.
            flags += ["--long-prefill-token-threshold", config.chunk_size]
        if policy != "decode-first":
            lost.append(f"policy {policy}: vLLM is decode-first (or write a --scheduler-cls)")

    if order == "priority":
        flags += ["--scheduling-policy", "priority"]
        lost.append("order priority: vLLM's has no ageing, so a low priority can starve")
    else:
        flags += ["--scheduling-policy", "fcfs"]
        if order != "fcfs":
            lost.append(f"order {order}: vLLM has fcfs and priority")
    if config.max_long_partial_prefills is not None:
        lost.append(
            "max_long_partial_prefills, long_prefill_threshold: vLLM has flags of that meaning, "
            "but V1 refuses to start with them"
        )
    lost += _no_queue_bound(config, "vLLM")
    return Export("vllm", _command(["vllm", "serve", model, *flags]), not_expressed=tuple(lost))


def to_sglang(config: EngineConfig, model: str) -> Export:
    """SGLang: prompts before decodes, unless chunks are mixed with decodes."""
    policy, order = _names(config)
    lost = []
    budget = config.max_num_batched_tokens
    flags: list[str | int] = []
    if policy in ("continuous", "static"):
        flags += ["--chunked-prefill-size", -1, "--max-prefill-tokens", budget]
        lost.append(
            "max_num_batched_tokens: SGLang lets a step of prompts grow to the model's context "
            "length where that is more"
        )
    else:
        flags += ["--chunked-prefill-size", budget]
        if policy != "prefill-first":
            # In a mixed step the running requests' tokens are taken off the chunk's size.
            flags += ["--enable-mixed-chunk"]
        if config.chunk_size is not None and config.chunk_size < budget:
            lost.append(
                f"chunk_size={config.chunk_size}: one number bounds a step's prompt and decode "
                "tokens together, there is none for a single request"
            )
    if policy == "prefill-first":
        lost.append(
            "policy prefill-first: a step of prompt chunks carries no decodes in SGLang, where "
            "here they fill what is left of the budget"
        )
    elif policy not in ("continuous", "decode-first"):
        nearest = "continuous" if policy == "static" else "decode-first"
        lost.append(f"policy {policy}: the flags give {nearest}")
    flags += ["--max-running-requests", min(config.max_num_seqs, budget)]
    flags += ["--page-size", config.block_size, "--random-seed", config.seed]
    if config.max_queued_requests is not None:
        flags += ["--max-queued-requests", config.max_queued_requests]
    if config.num_blocks is not None:
        flags += ["--max-total-tokens", config.num_blocks * config.block_size]
    if config.max_model_len is not None:
        flags += ["--context-length", config.max_model_len]
    if not config.prefix_caching:
        flags += ["--disable-radix-cache"]

    flags += ["--schedule-policy", "fcfs"]
    if order == "priority":
        flags += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
        flags += ["--priority-scheduling-preemption-threshold", 1]
        lost.append("order priority: SGLang's has no ageing, so a low priority can starve")
    elif order != "fcfs":
        lost.append(f"order {order}: SGLang orders by arrival, shared prefix or priority")
    lost += _no_partial_limit(config, "SGLang")
    command = ["python", "-m", "sglang.launch_server", "--model-path", model, *flags]
    return Export("sglang", _command(command), not_expressed=tuple(lost))


def to_tensorrt_llm(config: EngineConfig, model: str) -> Export:
    """TensorRT-LLM: in-flight batching, decodes and prompt chunks in one step."""
    policy, order = _names(config)
    lost = []
    chunked = policy not in ("continuous", "static")
    # MAX_UTILIZATION admits by what is free now and may pause requests, as the mechanism here does.
    capacity = "STATIC_BATCH" if policy == "static" else "MAX_UTILIZATION"
    yaml = [
        f"enable_chunked_prefill: {str(chunked).lower()}",
        "scheduler_config:",
        f"  capacity_scheduler_policy: {capacity}",
        "kv_cache_config:",
        f"  enable_block_reuse: {str(config.prefix_caching).lower()}",
        f"  tokens_per_block: {config.block_size}",
    ]
    if config.num_blocks is not None:
        yaml.append(f"  max_tokens: {config.num_blocks * config.block_size}")
    flags: list[str | int] = ["--max_num_tokens", config.max_num_batched_tokens]
    flags += ["--max_batch_size", min(config.max_num_seqs, config.max_num_batched_tokens)]
    if config.max_model_len is not None:
        flags += ["--max_seq_len", config.max_model_len]

    if policy == "continuous":
        lost.append("policy continuous: prompts stay whole, but share their step with decodes")
    elif policy not in ("static", "decode-first"):
        lost.append(f"policy {policy}: TensorRT-LLM schedules decodes first")
    if chunked and config.chunk_size is not None:
        lost.append(f"chunk_size={config.chunk_size}: only max_num_tokens bounds a chunk")
    if order != "fcfs":
        lost.append(f"order {order}: the queue is fcfs (a request can carry a priority, API only)")
    lost += _no_queue_bound(config, "TensorRT-LLM") + _no_partial_limit(config, "TensorRT-LLM")
    command = ["trtllm-serve", model, *flags, "--config", "config.yaml"]
    files = {"config.yaml": "\n".join(yaml) + "\n"}
    return Export("tensorrt-llm", _command(command), files, tuple(lost))


def to_deepspeed(config: EngineConfig, model: str) -> Export:
    """DeepSpeed-MII (FastGen): Dynamic SplitFuse by token count, configured in Python."""
    policy, order = _names(config)
    lost = []
    arguments = [
        f"max_ragged_batch_size={config.max_num_batched_tokens}",
        f"max_ragged_sequence_count={min(config.max_num_seqs, config.max_num_batched_tokens)}",
    ]
    if config.max_model_len is not None:
        arguments.append(f"max_context={config.max_model_len}")
    if config.num_blocks is not None:
        arguments.append(f'memory_config={{"mode": "allocate", "size": {config.num_blocks}}}')
    script = [
        "import mii",
        "from deepspeed.inference import RaggedInferenceEngineConfig",
        "from deepspeed.inference.v2.ragged import DSStateManagerConfig",
        "",
        "state_manager = DSStateManagerConfig(",
        *(f"    {argument}," for argument in arguments),
        ")",
        f"mii.serve({model!r}, inference_engine_config="
        "RaggedInferenceEngineConfig(state_manager=state_manager))",
    ]
    if policy not in ("decode-first", "split-fuse"):
        lost.append(f"policy {policy}: MII serves decodes, then fills the step with prompt chunks")
    elif policy == "split-fuse":
        lost.append("split-fuse: MII counts tokens and not work (context_per_token=inf here)")
    if config.chunk_size is not None:
        lost.append(f"chunk_size={config.chunk_size}: only max_ragged_batch_size bounds a chunk")
    if order != "fcfs":
        lost.append(f"order {order}: MII's queue is fcfs")
    lost.append(f"block_size={config.block_size}: DeepSpeed's KV blocks have a size of their own")
    if config.prefix_caching:
        lost.append("prefix_caching: MII has none")
    lost += _no_queue_bound(config, "MII") + _no_partial_limit(config, "MII")
    return Export(
        "deepspeed", "python serve.py", {"serve.py": "\n".join(script) + "\n"}, tuple(lost)
    )


ENGINES: dict[str, Callable[[EngineConfig, str], Export]] = {
    "vllm": to_vllm,
    "sglang": to_sglang,
    "tensorrt-llm": to_tensorrt_llm,
    "deepspeed": to_deepspeed,
}


def _names(config: EngineConfig) -> tuple[str, str]:
    return resolve_policy(config.policy).name, resolve_order(config.order).name


def _no_queue_bound(config: EngineConfig, engine: str) -> list[str]:
    if config.max_queued_requests is None:
        return []
    return [f"max_queued_requests={config.max_queued_requests}: {engine} documents no such flag"]


def _no_partial_limit(config: EngineConfig, engine: str) -> list[str]:
    if config.max_long_partial_prefills is None:
        return []
    return [f"max_long_partial_prefills, long_prefill_threshold: {engine} documents no such flag"]


def _command(words: list[str | int]) -> str:
    """A shell command, one flag with its values a line."""
    lines: list[str] = []
    for word in map(str, words):
        starts_line = word.startswith("--") or not lines
        quoted = shlex.quote(word)
        lines = [*lines, quoted] if starts_line else [*lines[:-1], f"{lines[-1]} {quoted}"]
    return " \\\n    ".join(lines)


def _bullets(notes: tuple[str, ...]) -> list[str]:
    return [f"# - {note}" for note in notes]
