"""The executor that computes nothing: it knows what a step would cost and says so.

The engine's virtual clock jumps by the returned duration. Scheduler, engine and trace are those of
the real thing, which is why a simulated run can be checked against a measured one row by row.
"""

from __future__ import annotations

from minichunk.core.plan import StepPlan, StepResult
from minichunk.sim.cost import CostModel


class SimulatedExecutor:
    """Runs a plan on a `CostModel`. Every sampled token has id 0: only lengths matter."""

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self.context_per_token = cost_model.context_per_token

    def execute(self, plan: StepPlan) -> StepResult:
        seconds, cost = self.cost_model.cost(plan)
        tokens = {chunk.request_id: 0 for chunk in plan.chunks if chunk.sampling is not None}
        return StepResult(tokens, seconds, cost)
