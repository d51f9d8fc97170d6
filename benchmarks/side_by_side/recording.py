"""From what a scheduler chose to a minichunk trace: the one way in which every adapter records.

An adapter tells when a step began and ended, how many tokens each request got, and which tokens
came out. Whether that was prefill or decode follows from the positions, so no engine can be
flattered by its adapter's own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minichunk.core.plan import ScheduledChunk, StepPlan
from minichunk.core.recorder import Recorder
from minichunk.core.request import (
    FinishReason,
    Request,
    RequestSpec,
    RequestStatus,
    SamplingParams,
)
from minichunk.core.trace import Trace


class Recording:
    """A trace in the making. Times in seconds since the run began, on the wall clock."""

    def __init__(self, budget: int, meta: Mapping[str, Any]) -> None:
        self.budget = budget
        self.trace = Trace({"clock": "wall", "max_num_batched_tokens": budget, **meta})
        self._recorder = Recorder(self.trace)
        self._requests: dict[str, Request] = {}

    def num_output_tokens(self, request_id: str) -> int:
        return len(self.trace.requests[request_id].token_times)

    @property
    def num_unfinished(self) -> int:
        return sum(not request.is_finished for request in self._requests.values())

    def arrive(self, request_id: str, spec: RequestSpec, arrival: float) -> None:
        params = SamplingParams(max_tokens=spec.output_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id, tuple(spec.prompt), params, arrival)  # type: ignore[arg-type]
        self._requests[request_id] = request
        self._recorder.arrive(request)

    def step(
        self,
        start: float,
        end: float,
        chunks: Iterable[tuple[str, int]],
        tokens: Mapping[str, int],
        budget: int | None = None,
    ) -> None:
        """One step: (request, tokens computed) of everybody in it, and the tokens that came out.

        `budget` is for an engine that has none: the tokens it took. Raises ValueError for rows that
        contradict what is known of a request, such as one that had to start anew.
        """
        self._recorder.now = start
        scheduled = tuple(self._chunk(request_id, count) for request_id, count in chunks)
        plan = StepPlan(
            self._recorder.step, scheduled, self.budget if budget is None else budget, block_size=0
        )
        self._recorder.now = end
        in_step = {chunk.request_id for chunk in scheduled}
        for request_id, token in tokens.items():
            if request_id not in in_step:
                raise ValueError(
                    f"request {request_id!r} has a token but no chunk in step {plan.step}"
                )
            self._token(self._requests[request_id], token, end)
        self._recorder.executed(plan, start, end, None, 0.0, (0, 0, 0))

    def _chunk(self, request_id: str, count: int) -> ScheduledChunk:
        request = self._requests[request_id]
        start, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if count < 1 or start + count > request.num_tokens:
            raise ValueError(
                f"request {request_id!r} computes {count} tokens from position {start}, but it has "
                f"{request.num_tokens}: the engine began it anew, or the adapter misses steps"
            )
        if not request.was_admitted:
            request.was_admitted = True
            self._recorder.lifecycle(request_id, "admit")
        request.num_computed_tokens += count
        is_decode = start >= prompt
        return ScheduledChunk(request_id, start, count, (), (), None, is_decode, prompt)

    def _token(self, request: Request, token: int, now: float) -> None:
        if request.num_computed_tokens != request.num_tokens:
            raise ValueError(
                f"request {request.request_id!r} has a token with {request.num_computed_tokens} of "
                f"its {request.num_tokens} tokens computed"
            )
        request.output_token_ids.append(int(token))
        record = self.trace.requests[request.request_id]
        record.token_times.append(now)
        assert record.output_token_ids is not None
        record.output_token_ids.append(int(token))
        if len(request.output_token_ids) == request.params.max_tokens:
            request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.LENGTH
            self._recorder.finish(request, FinishReason.LENGTH, now, "finish")
