"""Feeds a workload to an engine: each request is added when its time comes, no earlier.

Workloads may be endless or depend on what happens (a closed loop asks the next question when it
has the answer), so they are read one request ahead and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from minichunk.core.request import PromptShape, RequestSpec, SamplingParams

if TYPE_CHECKING:
    from minichunk.core.engine import Engine


class Feed:
    """Between a workload (an iterable of `RequestSpec`, by arrival) and an engine.

    `workload.on_finish(spec, now)`, where there is one, may return the next request (or several)
    that a finished one leads to. `to_prompt(spec)` turns a shape into token ids for a real model.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Any,
        to_prompt: Callable[[RequestSpec], Sequence[int] | PromptShape] | None = None,
    ) -> None:
        self.engine = engine
        self.to_prompt = to_prompt or (lambda spec: spec.prompt)
        self.on_finish = getattr(workload, "on_finish", None)
        self._specs: Iterator[RequestSpec] = iter(workload)
        self._exhausted = False
        self._latest = float("-inf")  # arrival of the last one that was added
        self._live: dict[str, RequestSpec] = {}

    def pull(self) -> None:
        """Add every request that is due and the one after, so the engine knows whom to await."""
        while not self._exhausted and self._latest <= self.engine.clock.now():
            spec = next(self._specs, None)
            if spec is None:
                self._exhausted = True
            else:
                self._latest = spec.arrival
                self._add(spec)

    def finished(self, request_id: str, now: float) -> None:
        spec = self._live.pop(request_id, None)
        if spec is None or self.on_finish is None:
            return
        follow_ups = self.on_finish(spec, now) or ()
        if isinstance(follow_ups, RequestSpec):
            follow_ups = (follow_ups,)
        for follow_up in follow_ups:
            self._add(follow_up)

    def _add(self, spec: RequestSpec) -> None:
        params = SamplingParams(max_tokens=spec.output_tokens, temperature=0.0, ignore_eos=True)
        request_id = self.engine.add_request(
            self.to_prompt(spec),
            params,
            priority=spec.priority,
            tenant=spec.tenant,
            arrival_time=spec.arrival,
        )
        self._live[request_id] = spec
