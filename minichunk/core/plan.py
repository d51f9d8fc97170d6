"""A step as plain data: what a policy offers, what the scheduler grants, what the executor returns.

The scheduler writes a `StepPlan` and the executor only reads it; there are no tensors in it. That
is why every scheduler here can be tested, fuzzed, replayed and drawn without a GPU, and why one
and the same scheduler drives a Triton backend, a laptop CPU and a simulated A100.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from minichunk.core.request import Request, SamplingParams


class SkipReason(str, Enum):
    """Why a request got nothing in a step."""

    BUDGET = "budget"  # the step's token budget was spent
    SLOTS = "slots"  # max_num_seqs requests are running already
    BLOCKS = "blocks"  # not enough free KV blocks for its whole prompt (or its next token)
    WHOLE = "whole"  # it wants its whole prompt in one step, and that does not fit the rest
    PREEMPTED = "preempted"  # its blocks were taken in this step
    HELD = "held"  # a long prompt, and max_long_partial_prefills are in progress
    POLICY = "policy"  # the policy did not offer it
    BEHIND = "behind"  # it queues behind the head, and nobody overtakes

    __str__ = str.__str__


class Offer(NamedTuple):
    """A policy's proposal: give `request` up to `num_tokens` more tokens in this step.

    `whole` asks for all or nothing; it ignores `chunk_size`, and a prompt larger than the whole
    budget is then granted as the only chunk of its step.
    """

    request: Request
    num_tokens: int
    whole: bool = False


class ScheduledChunk(NamedTuple):
    """The share of one request in one step: positions [start, start + num_tokens).

    Decode is a chunk of one token. `sampling` is set only where the chunk reaches the end of the
    request's known tokens, so that the executor samples the next one; its seed is never None.
    `token_ids` is empty where only a prompt's shape is known (simulation).
    """

    request_id: str
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    sampling: SamplingParams | None
    is_decode: bool
    num_prompt_tokens: int

    @property
    def stop(self) -> int:
        """The sequence length after this chunk (an entry of `seq_lens`)."""
        return self.start + self.num_tokens


class SkippedRequest(NamedTuple):
    """A request that got nothing in a step. With reason `behind`, `count` requests queue behind
    `request_id`, the head of the queue."""

    request_id: str
    reason: SkipReason
    count: int = 0  # type: ignore[assignment]  # the field, not tuple.count


@dataclass(frozen=True)
class StepPlan:
    """Everything an executor needs to know about one step, and why the others are not in it."""

    step: int
    chunks: tuple[ScheduledChunk, ...]
    budget: int
    block_size: int
    preempted: tuple[str, ...] = ()
    skipped: tuple[SkippedRequest, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_decode_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.is_decode)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens

    @property
    def is_decode_only(self) -> bool:
        return all(chunk.is_decode for chunk in self.chunks)


class StepCost(NamedTuple):
    """What a step asks of the hardware: floating-point operations, bytes moved, and, where a model
    of the hardware says so, the seconds of the same step with its decodes alone."""

    flops: float
    bytes: float
    decode_floor: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What an executor returns: one token for each chunk that samples.

    `duration` is None for a real executor (the wall clock knows) and the modelled seconds for a
    simulated one. `cost` is None where nobody counted.
    """

    token_ids: dict[str, int]
    duration: float | None = None
    cost: StepCost | None = None


class Executor(Protocol):
    """Runs a plan: `model.executor.ModelExecutor` and `sim.executor.SimulatedExecutor` do."""

    def execute(self, plan: StepPlan) -> StepResult: ...
