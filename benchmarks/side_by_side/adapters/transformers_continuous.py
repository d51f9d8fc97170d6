"""Transformers' continuous batching: its paged cache, its FIFO scheduler, prompts in chunks.

Its manager usually turns its loop in a thread of its own. Here the same loop body is called by us,
one step at a time, so that requests arrive between steps as with the other engines. What a step
computes is read off the scheduler's answer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.adapters.transformers_generate import load_model, versions
from benchmarks.side_by_side.driving import Due, drive
from benchmarks.side_by_side.recording import Recording
from benchmarks.side_by_side.workloads import Case
from minichunk.core.clock import WallClock
from minichunk.core.trace import Trace

PAGE_SIZE = 256  # its default


class ContinuousAdapter:
    def __init__(self, options: Options) -> None:
        self.options = options
        model = load_model(options)
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=2 * options.kv_tokens // PAGE_SIZE + 2 * options.max_num_seqs,
                max_batch_tokens=options.max_budget,
                max_requests_per_batch=options.max_num_seqs,
                allow_block_sharing=False,  # no prefix caching
                use_async_batching=False,
            ),
        )
        with torch.inference_mode():
            self.manager.warmup()

    def versions(self) -> dict[str, str]:
        return versions()

    @torch.inference_mode()
    def run(self, case: Case) -> Trace:
        processor = self.manager.batch_processor
        processor.reset()
        processor.max_batch_tokens = case.budget
        self.manager.current_batch = 0
        clock = WallClock()
        recording = Recording(case.budget, self.options.meta(policy="FIFO, decodes first"))
        drive(case, _Stepped(self.manager, recording, clock), clock)
        return recording.trace


class _Stepped:
    def __init__(self, manager: Any, recording: Recording, clock: WallClock) -> None:
        self.manager, self.recording, self.clock = manager, recording, clock
        self.num_output_tokens = recording.num_output_tokens
        self.scheduled: list[Any] = []
        scheduler = manager.batch_processor.scheduler
        schedule = type(scheduler).schedule_batch

        def watched(*arguments: Any) -> Any:
            answer = schedule(scheduler, *arguments)
            self.scheduled = answer[0] or []
            return answer

        scheduler.schedule_batch = watched

    def add(self, due: Due) -> None:
        self.recording.arrive(*due)
        self.manager.add_request(
            list(due.spec.prompt), due.request_id, max_new_tokens=due.spec.output_tokens
        )

    def has_unfinished(self) -> bool:
        return self.recording.num_unfinished > 0

    def step(self) -> None:
        start = self.clock.now()
        processor = self.manager.batch_processor
        if not self.manager._generation_loop_body(processor, bootstrapping=False):
            raise RuntimeError("continuous batching stopped before all requests had finished")
        end = self.clock.now()
        scheduled, self.scheduled = self.scheduled, []
        if scheduled:
            chunks = [(future.state.request_id, future.query_length) for future in scheduled]
            tokens = {
                future.state.request_id: future.state.generated_tokens[-1]
                for future in scheduled
                if future.has_new_token
            }
            self.recording.step(start, end, chunks, tokens)
