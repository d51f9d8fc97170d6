"""The trace: everything that happened, as plain rows. Whatever a person is shown comes from here.

The engine appends while it runs; metrics, timeline, figures and exports read. Nothing here refers
to live engine state, so a trace saved on a GPU machine draws the same picture on a laptop, and a
simulated one differs from a measured one only in `meta["clock"]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

TRACE_VERSION = 1


class StepRecord(NamedTuple):
    """One step. Times in seconds on the engine's clock; blocks are counted after the step."""

    start: float
    end: float
    prefill_tokens: int
    decode_tokens: int
    budget: int
    free_blocks: int
    used_blocks: int
    reserved_blocks: int
    flops: float | None
    bytes: float | None
    decode_floor: float | None  # seconds that the decodes of this step would take alone
    scheduling_time: float  # seconds of wall time, on either clock
    num_decodes: int  # requests that decoded in this step

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Span:
    """Work of one request: one prefill chunk, or a run of consecutive decode steps.

    `first_position` is where its first token lies; a decode span of k steps has k tokens.
    """

    request_id: str
    first_step: int
    last_step: int
    kind: str  # "prefill" | "decode"
    first_position: int
    tokens: int


class LifecycleEvent(NamedTuple):
    """`arrive | admit | preempt | resume | cancel | timeout | finish`, with the step in which it
    happened (the number of steps begun before it) and the prompt tokens hit in the prefix cache
    (admit, resume) or lost to recomputation (preempt)."""

    request_id: str
    step: int
    time: float
    kind: str
    tokens: int = 0


@dataclass(slots=True)
class Skip:
    """A request that got nothing in steps first_step … last_step, and why (a `SkipReason` value).

    For reason `behind`, `count` requests queue behind `request_id`, the head of the queue.
    """

    request_id: str
    first_step: int
    last_step: int
    reason: str
    count: int = 0


class BlockEvent(NamedTuple):
    """`alloc | share | publish | free` of blocks, by a request, in a step.

    `free` lists the blocks that the request let go; one that another request still holds stays
    used. The order of rows is the order of events.
    """

    step: int
    kind: str
    request_id: str
    blocks: tuple[int, ...]


class CounterRow(NamedTuple):
    """The value of an order's counter for a group (for `fair`: a tenant's tokens served)."""

    step: int
    group: str
    value: float


@dataclass(slots=True)
class RequestRecord:
    """One request, from arrival to end. `token_times[i]` is when output token i was there."""

    request_id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    tenant: str = "default"
    priority: int = 0
    token_times: list[float] = field(default_factory=list)
    output_token_ids: list[int] | None = None
    finish_reason: str | None = None
    finish_time: float | None = None
    note: str = ""


@dataclass
class Trace:
    """All rows of one run. See the module docstring; `validate()` says what must hold."""

    meta: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: list[LifecycleEvent] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    counters: list[CounterRow] = field(default_factory=list)
    block_events: list[BlockEvent] = field(default_factory=list)
