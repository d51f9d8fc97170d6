"""minichunk as it is: its `LLM`, its default scheduler, its own trace."""

from __future__ import annotations

import torch

import minichunk as mc
from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.driving import Due, drive
from benchmarks.side_by_side.workloads import Case
from minichunk.core.engine import Engine

BLOCK_SIZE = 16


class MinichunkAdapter:
    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self.options = options
        self.llm = mc.LLM(
            options.model,
            device="cpu",
            dtype=options.dtype,
            compile=options.compiled,
            quiet=True,
            prefix_caching=False,
            block_size=BLOCK_SIZE,
            num_blocks=-(-options.kv_tokens // BLOCK_SIZE) + options.max_num_seqs,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_budget,
            max_model_len=options.max_model_len,
        )

    def versions(self) -> dict[str, str]:
        return {"minichunk": mc.__version__, "torch": torch.__version__}

    def run(self, case: Case) -> mc.Trace:
        engine = self.llm.new_engine(max_num_batched_tokens=case.budget)
        drive(case, _Stepped(engine), engine.clock)
        engine.trace.meta.update(self.options.meta())
        return engine.trace


class _Stepped:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step = engine.step
        self.has_unfinished = engine.has_unfinished_requests

    def add(self, due: Due) -> None:
        params = mc.SamplingParams(
            max_tokens=due.spec.output_tokens, temperature=0.0, ignore_eos=True
        )
        self.engine.add_request(
            due.spec.prompt, params, request_id=due.request_id, arrival_time=due.arrival
        )

    def num_output_tokens(self, request_id: str) -> int:
        record = self.engine.trace.requests.get(request_id)
        return len(record.token_times) if record else 0
