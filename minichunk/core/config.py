"""The knobs of an engine, in one frozen place, and the presets that set several at once.

Everything that decides a schedule is here: give two engines the same configuration, clock and
requests, and they write the same plans. The names are those of the field (vLLM's, mostly).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from minichunk.core.orders import Order
from minichunk.core.policies import Policy
from minichunk.core.request import whole_number

PRESETS: dict[str, dict[str, Any]] = {
    "chat": {"policy": "decode-first", "max_num_batched_tokens": 512},
    "rag": {"policy": "prefill-first", "max_num_batched_tokens": 2048},
    "batch": {"policy": "split-fuse", "max_num_batched_tokens": 8192},
    "multi-tenant": {"policy": "decode-first", "order": "fair", "max_num_batched_tokens": 1024},
}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine schedules. Sizes are in tokens, requests or blocks, as named.

    `chunk_size` is the most prefill tokens that one request gets in one step (None: only the
    budget limits it). `num_blocks` None lets the executor's memory decide.
    """

    policy: str | Policy | Callable[..., Any] = "decode-first"
    order: str | Order | type[Order] = "fcfs"
    max_num_batched_tokens: int = 2048
    chunk_size: int | None = None
    max_num_seqs: int = 256
    max_queued_requests: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_threshold: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    seed: int = 0
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "seed", whole_number("seed", self.seed))
        if (self.max_long_partial_prefills is None) != (self.long_prefill_threshold is None):
            raise ValueError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} and "
                f"long_prefill_threshold={self.long_prefill_threshold} work together: set both"
            )

    def as_meta(self) -> dict[str, Any]:
        """The knobs that explain a trace; policy and order are spelled out by the engine."""
        apart = ("policy", "order", "check_invariants")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}

    @classmethod
    def make(cls, preset: str | None = None, **knobs: Any) -> EngineConfig:
        """A configuration from a preset's knobs and one's own, which win."""
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(knobs) - known)
        if unknown:
            raise ValueError(
                f"unknown engine option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**{**(PRESETS[preset] if preset else {}), **knobs})


_AT_LEAST_ONE = (
    "max_num_batched_tokens",
    "chunk_size",
    "max_num_seqs",
    "max_queued_requests",
    "max_long_partial_prefills",
    "long_prefill_threshold",
    "block_size",
    "num_blocks",
    "max_model_len",
)
