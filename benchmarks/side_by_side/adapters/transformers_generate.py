"""Transformers' `generate`: a static batch of whoever waits, padded on the left.

Nobody joins a batch that has begun, and it lasts as long as its longest answer. Token times are
taken by a stopping criterion, which is called after every step.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.driving import Arrivals, Due
from benchmarks.side_by_side.recording import Recording
from benchmarks.side_by_side.workloads import Case
from minichunk.core.clock import WallClock
from minichunk.core.trace import Trace


def load_model(options: Options) -> Any:
    """The model as Transformers loads it: its default attention, the wished precision."""
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # answers have a fixed length
    return model


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}


class GenerateAdapter:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.model = load_model(options)

    def versions(self) -> dict[str, str]:
        return versions()

    def run(self, case: Case) -> Trace:
        arrivals, clock = Arrivals(case), WallClock()
        meta = self.options.meta(policy="static batches", max_num_batched_tokens=None)
        recording = Recording(case.budget, meta)
        waiting: list[Due] = []

        def let_in() -> None:
            for due in arrivals.due(clock.now(), recording.num_output_tokens):
                recording.arrive(*due)
                waiting.append(due)

        while arrivals.pending or waiting:
            let_in()
            if waiting:
                batch = waiting.copy()
                waiting.clear()
                self._serve(batch, clock, _Watch(batch, recording, clock, let_in))
            elif arrivals.next_time is not None:
                clock.wait_until(arrivals.next_time)
        return recording.trace

    def _serve(self, batch: list[Due], clock: WallClock, watch: _Watch) -> None:
        longest = max(len(due.spec.prompt) for due in batch)
        padding = [longest - len(due.spec.prompt) for due in batch]
        rows = [[0] * pad + list(due.spec.prompt) for pad, due in zip(padding, batch, strict=True)]
        mask = torch.ones(len(batch), longest, dtype=torch.long)
        for row, pad in zip(mask, padding, strict=True):
            row[:pad] = 0
        wanted = GenerationConfig(
            max_new_tokens=max(due.spec.output_tokens for due in batch),
            do_sample=False,
            pad_token_id=0,
        )
        self.model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=mask,
            generation_config=wanted,
            stopping_criteria=[watch],
        )


class _Watch(StoppingCriteria):
    """Records each step of a batch; stops nothing. Padding counts as nobody's tokens."""

    def __init__(self, batch: list[Due], recording: Recording, clock: WallClock, after: Any):
        self.batch, self.recording, self.clock, self.after = batch, recording, clock, after
        self.start = clock.now()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        end, newest = self.clock.now(), input_ids[:, -1].tolist()
        chunks, tokens = [], {}
        for due, token in zip(self.batch, newest, strict=True):
            done = self.recording.num_output_tokens(due.request_id)
            if done < due.spec.output_tokens:
                chunks.append((due.request_id, 1 if done else len(due.spec.prompt)))
                tokens[due.request_id] = token
        budget = sum(count for _, count in chunks)
        self.recording.step(self.start, end, chunks, tokens, budget)
        self.after()
        self.start = end
        return torch.zeros(len(self.batch), dtype=torch.bool)
