"""What a policy sees of a step: the budget left, who decodes, whose prompts are unfinished.

Read-only by convention; the queue behind `prefilling` is asked for its next head only after the
last one was admitted, so a policy cannot overtake, whatever it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minichunk.core.plan import StepPlan
from minichunk.core.request import Request

if TYPE_CHECKING:
    from minichunk.core.draft import StepDraft
    from minichunk.core.scheduler import Scheduler


class StepView:
    """The policy's window on one step.

    `decoding` and `unfinished` are snapshots in the order's order; `state` is a dict that lives as
    long as the engine (a policy's memory); `context_per_token` is the context length whose KV
    reads cost as much as one token of linear layers (infinite where no cost model says).
    """

    def __init__(self, scheduler: Scheduler, draft: StepDraft, now: float) -> None:
        self._scheduler = scheduler
        self._draft = draft
        self.now = now
        self.step = scheduler.num_steps
        self.max_num_batched_tokens = scheduler.config.max_num_batched_tokens
        self.chunk_size = scheduler.config.chunk_size
        self.context_per_token = scheduler.context_per_token
        self.last_plan: StepPlan | None = scheduler.last_plan
        self.state: dict[str, Any] = scheduler.policy_state
        self.running = scheduler.running_in_order()
        self.decoding: list[Request] = []
        self.unfinished: list[Request] = []
        for request in self.running:
            (self.decoding if request.is_decoding else self.unfinished).append(request)

    @property
    def budget(self) -> int:
        """Tokens of the step that are still to be given away."""
        return self._draft.budget_left

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens given away so far in this step."""
        return sum(self._draft.granted.values())

    @property
    def free_blocks(self) -> int:
        return self._scheduler.pool.num_free

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def prefilling(self) -> Iterator[Request]:
        """Unfinished prompts, then the queue, one head after the other.

        It ends when a head is not admitted (no slot, no blocks, no budget, or simply not offered).
        """
        yield from self.unfinished
        while (head := self._draft.next_head()) is not None:
            yield head
            if self._draft.next_head() is head:
                return
