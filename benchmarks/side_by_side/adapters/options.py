"""What an adapter is told when it is loaded: the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """`model` is a folder; sizes are large enough for every case, so that nobody preempts."""

    engine: str  # its spelling, for the trace's name
    model: str
    dtype: str
    threads: int
    compiled: bool
    max_budget: int  # the largest max_num_batched_tokens of any case
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int  # tokens that the KV cache must hold

    def meta(self, **more: Any) -> dict[str, Any]:
        """What a trace says of its run, whichever engine it comes from."""
        return {"name": self.engine, "dtype": self.dtype, "threads": self.threads, **more}
