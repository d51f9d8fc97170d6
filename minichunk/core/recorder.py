"""Writes a trace while the engine runs: consecutive rows of the same kind become one.

A decode of a thousand steps is one span, and a request that is refused for the same reason for a
thousand steps is one skip, so a trace grows with what changes and not with time.
"""

from __future__ import annotations

from minichunk.core.plan import SkippedRequest, StepCost, StepPlan
from minichunk.core.request import FinishReason, PromptShape, Request
from minichunk.core.trace import (
    BlockEvent,
    CounterRow,
    LifecycleEvent,
    RequestRecord,
    Skip,
    Span,
    StepRecord,
    Trace,
)


class Recorder:
    """Appends to `trace`; the engine is its only caller."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now = 0.0
        self._open_decodes: dict[str, Span] = {}
        self._open_skips: dict[SkippedRequest, Skip] = {}

    @property
    def step(self) -> int:
        """The index of the step that is being decided, or comes next."""
        return len(self.trace.steps)

    def arrive(self, request: Request) -> RequestRecord:
        record = RequestRecord(
            request.request_id,
            request.arrival_time,
            request.num_prompt_tokens,
            request.params.max_tokens,
            request.tenant,
            request.priority,
            output_token_ids=None if isinstance(request.prompt, PromptShape) else [],
        )
        self.trace.requests[request.request_id] = record
        self.trace.events.append(
            LifecycleEvent(request.request_id, self.step, request.arrival_time, "arrive")
        )
        return record

    def lifecycle(self, request_id: str, kind: str, tokens: int = 0) -> None:
        self.trace.events.append(LifecycleEvent(request_id, self.step, self.now, kind, tokens))

    def block(self, kind: str, request_id: str, blocks: tuple[int, ...]) -> None:
        self.trace.block_events.append(BlockEvent(self.step, kind, request_id, blocks))

    def counters(self, changed: dict[str, float]) -> None:
        for group, value in changed.items():
            self.trace.counters.append(CounterRow(self.step, group, value))

    def finish(self, request: Request, reason: FinishReason, time: float, kind: str) -> None:
        record = self.trace.requests[request.request_id]
        record.finish_reason = str(reason)
        record.finish_time = time
        record.note = request.note
        self.lifecycle(request.request_id, kind)

    def executed(
        self,
        plan: StepPlan,
        start: float,
        end: float,
        cost: StepCost | None,
        scheduling_time: float,
        blocks: tuple[int, int, int],
    ) -> None:
        """One step: its row, the spans that it extends or begins, and who was left out."""
        step = self.step
        spans = self.trace.spans
        # A row stays open only from one step to the next, while it says the same.
        open_before, open_decodes = self._open_decodes, {}
        prefill_tokens = num_decodes = 0
        for request_id, first, num_tokens, _, _, _, is_decode, _ in plan.chunks:
            if is_decode:
                num_decodes += 1
                span = open_before.get(request_id)
                if span is not None:
                    span.last_step = step
                    span.tokens += 1
                    open_decodes[request_id] = span
                    continue
                span = open_decodes[request_id] = Span(request_id, step, step, "decode", first, 1)
            else:
                prefill_tokens += num_tokens
                span = Span(request_id, step, step, "prefill", first, num_tokens)
            spans.append(span)
        self._open_decodes = open_decodes
        self._skips(step, plan.skipped)
        flops, moved, floor = cost or (None, None, None)
        self.trace.steps.append(
            StepRecord(
                start,
                end,
                prefill_tokens,
                num_decodes,
                plan.budget,
                *blocks,
                flops,
                moved,
                floor,
                scheduling_time,
                num_decodes,
            )
        )

    def _skips(self, step: int, skipped: tuple[SkippedRequest, ...]) -> None:
        still_open: dict[SkippedRequest, Skip] = {}
        for row in skipped:
            skip = self._open_skips.get(row)
            if skip is None:
                skip = Skip(row.request_id, step, step, str(row.reason), row.count)
                self.trace.skips.append(skip)
            skip.last_step = step
            still_open[row] = skip
        self._open_skips = still_open
