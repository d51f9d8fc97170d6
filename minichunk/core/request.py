"""What a user asks for, and the little that changes while it is served.

A request has a known length (`num_tokens`: prompt plus outputs so far) and `num_computed_tokens`,
the part of it whose keys and values are in the cache. Serving a request is nothing but letting the
second chase the first; prefill, decode and recomputation after a preemption are the same motion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any

from minichunk.core.kv_cache import BlockTable


def whole_number(name: str, value: Any) -> int:
    """The value as a plain int (NumPy's are welcome), or a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r} must be a whole number")
    return int(value)


def plain_number(name: str, value: Any) -> float:
    """The value as a plain int or float (NumPy's are welcome), or a ValueError that names it."""
    if not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} must be a number")
    return int(value) if isinstance(value, Integral) else float(value)


class RequestStatus(str, Enum):
    """Where a request is. A preempted request is simply waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"

    __str__ = str.__str__


# Members by a name of their own: before Python 3.12, looking one up in its class is slow, and the
# properties below are asked for every request in every step.
WAITING, RUNNING, FINISHED = RequestStatus


class FinishReason(str, Enum):
    """Why a request ended: by itself (`stop`), at a limit (`length`), or from outside."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"

    __str__ = str.__str__


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Temperature 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # A bare string is a sequence of characters: stop="END" must not mean "stop at E, N or D".
        stop = (self.stop,) if isinstance(self.stop, str) else self._listed("stop")
        object.__setattr__(self, "stop", stop)
        stop_ids = [whole_number("stop_token_ids", i) for i in self._listed("stop_token_ids")]
        object.__setattr__(self, "stop_token_ids", tuple(stop_ids))
        # A number of another kind would fail in the middle of a step, which all share.
        for name in ("max_tokens", "top_k", "seed"):
            if name != "seed" or self.seed is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, plain_number(name, getattr(self, name)))
        if any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop={self.stop!r}: each stop string must be a non-empty string")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must be between 0 and 1")

    def _listed(self, name: str) -> tuple[Any, ...]:
        values = getattr(self, name)
        try:
            return tuple(values.tolist() if hasattr(values, "tolist") else values)
        except TypeError:
            raise ValueError(f"{name}={values!r} must be a sequence") from None


@dataclass(frozen=True)
class PromptShape:
    """A prompt of which only the length matters, as published traces give it.

    `prefix_ids` name its leading pieces of `tokens_per_prefix_id` tokens each: two prompts that
    start with the same ids share those tokens, so the prefix cache works without any text.
    """

    length: int
    prefix_ids: tuple[int, ...] = ()
    tokens_per_prefix_id: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", whole_number("length", self.length))
        if self.length < 0 or self.tokens_per_prefix_id < 1:
            raise ValueError(
                f"a prompt of length={self.length} with tokens_per_prefix_id="
                f"{self.tokens_per_prefix_id}: they must be at least 0 and 1"
            )

    def __len__(self) -> int:
        return self.length


Prompt = tuple[int, ...] | PromptShape
Rank = tuple[tuple[float, ...], int]  # an order's key, and the order of arrival for ties
UNPLACED: Rank = ((), -1)


@dataclass(frozen=True)
class RequestSpec:
    """One line of a workload: who asks what, when (seconds), and how long the answer will be."""

    arrival: float
    prompt: Sequence[int] | PromptShape
    output_tokens: int
    tenant: str = "default"
    priority: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A request being served. The engine owns it; policies and orders only read it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    arrival_time: float = 0.0
    priority: int = 0
    tenant: str = "default"
    queue_timeout: float | None = None
    timeout: float | None = None
    index: int = 0  # order of arrival in the engine; breaks ties
    group: str = ""  # its group and its place there, asked of the order once, on arrival
    rank: Rank = UNPLACED
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    note: str = ""  # which limit ended the request, in words
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    was_admitted: bool = False
    table: BlockTable = field(default_factory=BlockTable)
    num_promised_blocks: int = 0  # what admission counted on: the whole prompt, not its first chunk
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, filled lazily
    num_published_blocks: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt plus outputs so far: the length that `num_computed_tokens` chases."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Running with only its newest output token left to compute."""
        num_outputs = len(self.output_token_ids)
        return (
            num_outputs > 0
            and self.num_computed_tokens == self.num_prompt_tokens + num_outputs - 1
            and self.status is RUNNING
        )

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions [start, stop); empty where only the prompt's shape is known."""
        if isinstance(self.prompt, PromptShape):
            return ()
        prompt_length = self.num_prompt_tokens
        if start >= prompt_length:
            outputs, first = self.output_token_ids, start - prompt_length
            return (
                (outputs[first],)
                if stop == start + 1
                else tuple(outputs[first : stop - prompt_length])
            )
        if stop <= prompt_length:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.output_token_ids[: stop - prompt_length])

    def block_content(self, start: int, stop: int) -> object:
        """What identifies the tokens in [start, stop) for prefix caching; bytes: only its own."""
        prompt = self.prompt
        if not isinstance(prompt, PromptShape):
            return self.token_ids(start, stop)
        piece = prompt.tokens_per_prefix_id
        if stop <= min(len(prompt.prefix_ids) * piece, prompt.length):
            first, last = start // piece, (stop - 1) // piece
            return (piece, start % piece, stop - start, prompt.prefix_ids[first : last + 1])
        return f"{self.request_id} {start}".encode()  # nobody else's, but its own once preempted
