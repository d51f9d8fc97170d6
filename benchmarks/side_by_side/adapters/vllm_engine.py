"""vLLM in its own process: `LLMEngine`, one `step()` at a time, chunked prefill, no prefix cache.

What a step computes is read off its scheduler's answer (`num_scheduled_tokens`). Its engine is made
once, with the largest budget; each run sets its own. Only this file and those it imports are loaded
in vLLM's environment, where minichunk's core is the only part of minichunk that is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.driving import Due, drive
from benchmarks.side_by_side.recording import Recording
from benchmarks.side_by_side.workloads import Case
from minichunk.core.clock import WallClock
from minichunk.core.trace import Trace

KV_CACHE_BYTES = 2**30  # 46,000 tokens of SmolLM2-135M; far more than any case needs


class VLLMAdapter:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.model,
                skip_tokenizer_init=True,
                dtype=options.dtype,
                seed=0,
                enforce_eager=not options.compiled,
                max_model_len=options.max_model_len,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_budget,
                enable_chunked_prefill=True,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                disable_log_stats=True,
            )
        )
        if torch.get_num_threads() != options.threads:
            raise RuntimeError(
                f"vLLM runs with {torch.get_num_threads()} threads instead of {options.threads}"
            )
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        cache = core.vllm_config.cache_config
        room = (cache.num_gpu_blocks or 0) * cache.block_size
        needed = options.kv_tokens + options.max_num_seqs * cache.block_size
        if room < needed:
            raise RuntimeError(f"vLLM's KV cache has room for {room} tokens, {needed} are needed")

    def versions(self) -> dict[str, str]:
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def run(self, case: Case) -> Trace:
        self.scheduler.max_num_scheduled_tokens = case.budget
        self.scheduler.scheduler_config.max_num_batched_tokens = case.budget
        clock = WallClock()
        recording = Recording(case.budget, self.options.meta(policy="vLLM's (decodes first)"))
        drive(case, _Stepped(self.engine, self.scheduler, recording, clock), clock)
        return recording.trace


class _Stepped:
    def __init__(
        self, engine: LLMEngine, scheduler: Any, recording: Recording, clock: WallClock
    ) -> None:
        self.engine, self.recording, self.clock = engine, recording, clock
        self.has_unfinished = engine.has_unfinished_requests
        self.num_output_tokens = recording.num_output_tokens
        self.names: dict[str, str] = {}  # vLLM's own names of requests to ours
        self.scheduled: dict[str, int] = {}
        schedule = type(scheduler).schedule

        def watched(*arguments: Any, **keywords: Any) -> Any:
            plan = schedule(scheduler, *arguments, **keywords)
            self.scheduled = plan.num_scheduled_tokens
            return plan

        scheduler.schedule = watched

    def add(self, due: Due) -> None:
        self.recording.arrive(*due)
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=due.spec.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = vllm.TokensPrompt(prompt_token_ids=list(due.spec.prompt))
        self.names[self.engine.add_request(due.request_id, prompt, params)] = due.request_id

    def step(self) -> None:
        start = self.clock.now()
        outputs = self.engine.step()
        end = self.clock.now()
        chunks = [(self.names[name], count) for name, count in self.scheduled.items()]
        tokens = {
            output.request_id: output.outputs[0].token_ids[-1]
            for output in outputs
            if output.outputs[0].token_ids
        }
        if chunks:
            self.recording.step(start, end, chunks, tokens)
        self.scheduled = {}
