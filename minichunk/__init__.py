"""minichunk: a small, complete LLM inference engine to learn scheduling from.

Public names are loaded when first used, so that importing the package costs nothing and needs
neither torch nor numpy: the scheduling layer runs on the standard library alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not lazy: whoever imports the module `minichunk.compare` later must not put it in the place of
# the function `mc.compare`. It is a light file.
from minichunk.compare import Comparison, compare

if TYPE_CHECKING:
    from minichunk import workloads as workloads
    from minichunk.core import orders as orders
    from minichunk.core import policies as policies
    from minichunk.core.config import PRESETS as PRESETS
    from minichunk.core.config import EngineConfig as EngineConfig
    from minichunk.core.diff import diff_traces as diff_traces
    from minichunk.core.engine import Engine as Engine
    from minichunk.core.engine import QueueFullError as QueueFullError
    from minichunk.core.engine import TokenEvent as TokenEvent
    from minichunk.core.orders import Order as Order
    from minichunk.core.orders import order as order
    from minichunk.core.plan import Offer as Offer
    from minichunk.core.policies import PolicyError as PolicyError
    from minichunk.core.policies import policy as policy
    from minichunk.core.request import PromptShape as PromptShape
    from minichunk.core.request import RequestSpec as RequestSpec
    from minichunk.core.request import SamplingParams as SamplingParams
    from minichunk.core.trace import Trace as Trace
    from minichunk.llm import LLM as LLM
    from minichunk.sim.run import SLO as SLO
    from minichunk.sim.run import capacity as capacity
    from minichunk.sim.run import choose_chunk_size as choose_chunk_size
    from minichunk.sim.run import simulate as simulate
    from minichunk.sim.run import sweep as sweep

__version__ = "0.1.0"

_HOME = {
    "LLM": "minichunk.llm",
    "SamplingParams": "minichunk.core.request",
    "PromptShape": "minichunk.core.request",
    "RequestSpec": "minichunk.core.request",
    "Engine": "minichunk.core.engine",
    "EngineConfig": "minichunk.core.config",
    "PRESETS": "minichunk.core.config",
    "TokenEvent": "minichunk.core.engine",
    "QueueFullError": "minichunk.core.engine",
    "Offer": "minichunk.core.plan",
    "policy": "minichunk.core.policies",
    "PolicyError": "minichunk.core.policies",
    "order": "minichunk.core.orders",
    "Order": "minichunk.core.orders",
    "Trace": "minichunk.core.trace",
    "diff_traces": "minichunk.core.diff",
    "SLO": "minichunk.sim.run",
    "simulate": "minichunk.sim.run",
    "sweep": "minichunk.sim.run",
    "capacity": "minichunk.sim.run",
    "choose_chunk_size": "minichunk.sim.run",
}
_MODULES = {
    "policies": "minichunk.core.policies",
    "orders": "minichunk.core.orders",
    "predictors": "minichunk.core.predictors",
    "workloads": "minichunk.workloads",
}

__all__ = ["Comparison", "compare", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'minichunk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
