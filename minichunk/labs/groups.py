"""What each tenant or priority level felt, side by side: rows for the tables of the notebooks.

Averages over all requests hide who paid for a schedule. These rows split a trace by any attribute
of its requests.
"""

from __future__ import annotations

from typing import Any

from minichunk.core.metrics import RequestMetrics, percentile
from minichunk.core.trace import Trace


def split(trace: Trace, by: str = "tenant") -> dict[Any, list[RequestMetrics]]:
    """The figures of each request, by an attribute of its record: "tenant" or "priority"."""
    figures = trace.metrics().requests
    groups: dict[Any, list[RequestMetrics]] = {}
    for request_id, record in trace.requests.items():
        groups.setdefault(getattr(record, by), []).append(figures[request_id])
    return dict(sorted(groups.items()))


def rows(trace: Trace, by: str = "tenant", **first: Any) -> list[dict[str, Any]]:
    """One row per group, for `minichunk.compare.Table`; `first` are columns to put in front."""
    return [
        {
            **first,
            by: group,
            "requests": len(members),
            "TTFT p50": _seconds([r.ttft for r in members], 50),
            "TTFT max": _seconds([r.ttft for r in members], 100),
            "latency p50": _seconds([r.latency for r in members], 50),
            "longest gap": _seconds([r.max_itl for r in members], 100),
            "preempted": sum(r.num_preemptions for r in members),
        }
        for group, members in split(trace, by).items()
    ]


def _seconds(values: list[float | None], percent: float) -> str:
    found = percentile([value for value in values if value is not None], percent)
    return "–" if found is None else f"{found:.2f} s"
