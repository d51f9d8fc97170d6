"""Where two schedulers part: the first step in which they decided differently, and why.

Two policies on one workload usually agree for a while. The step where they stop agreeing is the
place to look; everything after it follows from different states.
"""

from __future__ import annotations

from dataclasses import dataclass

from minichunk.core.trace import Trace

Grant = tuple[str, int, int]  # kind, first position, tokens


@dataclass(frozen=True)
class Difference:
    """Step, what each run granted there that the other did not, and the other's reasons."""

    step: int
    names: tuple[str, str]
    only_first: dict[str, Grant]
    only_second: dict[str, Grant]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"The schedulers first differ in step {self.step}:"]
        for name, only in zip(self.names, (self.only_first, self.only_second), strict=True):
            grants = ", ".join(
                f"request {request_id} ({kind}, {tokens} from position {position})"
                for request_id, (kind, position, tokens) in only.items()
            )
            lines.append(f"  only {name}: {grants or 'nothing'}")
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])


def diff_traces(first: Trace, second: Trace) -> Difference | None:
    """The first step that differs, or None where all steps agree. Requests are matched by id."""
    names = (_name(first), _name(second))
    if names[0] == names[1]:
        names = (f"{names[0]} (first)", f"{names[1]} (second)")
    ours, theirs = _grants(first), _grants(second)
    for step in range(max(len(first.steps), len(second.steps))):
        a, b = ours.get(step, {}), theirs.get(step, {})
        if a == b:
            continue
        only_first = {rid: grant for rid, grant in a.items() if b.get(rid) != grant}
        only_second = {rid: grant for rid, grant in b.items() if a.get(rid) != grant}
        reasons = [
            f"{name}: {_why(trace, request_id, step)}"
            for name, trace, got, missing in (
                (names[1], second, b, only_first),
                (names[0], first, a, only_second),
            )
            for request_id in missing
            if request_id not in got
        ]
        reasons += [
            f"request {rid}: {a[rid][2]} tokens ({names[0]}) against {b[rid][2]} ({names[1]})"
            for rid in only_first
            if rid in b
        ]
        return Difference(step, names, only_first, only_second, tuple(reasons))
    return None


def _name(trace: Trace) -> str:
    name = trace.meta.get("name")  # where `compare` gave it one
    return str(name or f"{trace.meta.get('policy', '?')} × {trace.meta.get('order', '?')}")


def _grants(trace: Trace) -> dict[int, dict[str, Grant]]:
    """What each step granted to whom."""
    result: dict[int, dict[str, Grant]] = {}
    for span in trace.spans:
        if span.kind == "prefill":
            grant = ("prefill", span.first_position, span.tokens)
            result.setdefault(span.first_step, {})[span.request_id] = grant
            continue
        for step in range(span.first_step, span.last_step + 1):
            position = span.first_position + step - span.first_step
            result.setdefault(step, {})[span.request_id] = ("decode", position, 1)
    return result


def _why(trace: Trace, request_id: str, step: int) -> str:
    if request_id not in trace.requests:
        return f"request {request_id} is not in this run"
    if step >= len(trace.steps):
        return f"the run ended after {len(trace.steps)} steps"
    return str(trace.why(request_id, step))
