"""The trace: everything that happened, as plain rows. Whatever a person is shown comes from here.

The engine appends while it runs; metrics, timeline, figures and exports read. Nothing here refers
to live engine state, so a trace saved on a GPU machine draws the same picture on a laptop, and a
simulated one differs from a measured one only in `meta["clock"]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from minichunk.core.metrics import Metrics
    from minichunk.core.stalls import Stall
    from minichunk.core.why import Why

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


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        policy, clock = self.meta.get("policy", "?"), self.meta.get("clock", "?")
        counts = f"{len(self.requests)} requests, {len(self.steps)} steps"
        return f"<Trace of {counts}: {policy}, {clock} clock>"

    # Each of these lives in a room of its own; the trace only knows the way there.

    def metrics(self, **options: Any) -> Metrics:
        """TTFT, TPOT, ITL, throughput and the rest (`core.metrics`)."""
        from minichunk.core.metrics import compute_metrics

        return compute_metrics(self, **options)

    def stalls(self, **options: Any) -> list[Stall]:
        """Gaps that a reader notices, each with its causes (`core.stalls`)."""
        from minichunk.core.stalls import find_stalls

        return find_stalls(self, **options)

    def goodput(self, ttft: float, itl: float | None = None, tpot: float | None = None) -> float:
        """Requests per second that met these limits in seconds (`core.metrics`)."""
        from minichunk.core.metrics import goodput

        return goodput(self, ttft, itl, tpot)

    def why(self, request_id: str | int, step: int) -> Why:
        """What a request got in a step, or why it got nothing (`core.why`)."""
        from minichunk.core.why import why

        return why(self, str(request_id), step)

    def validate(self) -> None:
        """Raise `TraceError` where the rows contradict each other (`core.trace_check`)."""
        from minichunk.core.trace_check import validate

        validate(self)

    def save(self, path: str | Path) -> Path:
        """Write JSONL, whole or not at all (`core.trace_io`)."""
        from minichunk.core.trace_io import save

        return save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote; a `TraceError` says which line is not a trace's."""
        from minichunk.core.trace_io import load

        return load(path)

    def to_chrome(self, path: str | Path) -> Path:
        """Write a Chrome trace, which Perfetto opens (`core.chrome_trace`)."""
        from minichunk.core.chrome_trace import to_chrome

        return to_chrome(self, path)

    def timeline(self, **options: Any) -> Any:
        """The interactive timeline, for a notebook (`viz.timeline`)."""
        from minichunk.viz.timeline import timeline

        return timeline(self, **options)

    def to_html(self, path: str | Path) -> Path:
        """The interactive timeline as one self-contained page (`viz.html`)."""
        from minichunk.viz.html import to_html

        to_html(self, path)
        return Path(path)


class TraceError(ValueError):
    """A trace, or a file that should be one, contradicts itself."""
