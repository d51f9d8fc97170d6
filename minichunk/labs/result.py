"""What a check says about an exercise: passed, not written yet, or wrong here, with the example.

A check never raises at a student. It tries the answer on small cases, stops at the first one that
fails and shows that case: in words, and on a timeline or picture where that says more.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class ExerciseNotPassed(AssertionError):
    """Raised only in strict mode (`MINICHUNK_LABS_STRICT=1`), where solutions are tested."""


@dataclass(frozen=True)
class CheckResult:
    """`status` is "passed", "not written" or "wrong"; `picture` is anything displayable."""

    exercise: str
    status: str
    message: str
    picture: Any = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        mark = {"passed": "✓", "not written": "○", "wrong": "✗"}[self.status]
        return f"{mark} {self.exercise}: {self.message}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        colour = {"passed": "#009e73", "not written": "#888888", "wrong": "#d55e00"}[self.status]
        text = html.escape(str(self)).replace("\n", "<br>")
        return f'<div style="border-left:4px solid {colour};padding:.3em .8em">{text}</div>'

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        display(HTML(self._repr_html_()))
        if self.picture is not None:
            display(self.picture)


class Wrong(Exception):
    """Raised inside a check: the message is the counter-example, in the student's terms."""

    def __init__(self, message: str, picture: Any = None) -> None:
        super().__init__(message)
        self.picture = picture


def is_unwritten(error: Exception) -> bool:
    """Did a stub raise it? The engine's own error may stand before it, with the stub's as cause."""
    return any(isinstance(found, NotImplementedError) for found in (error, error.__cause__))


def exercise(name: str) -> Callable[[Callable[P, str]], Callable[P, CheckResult]]:
    """Make a check of a function that returns its praise, or raises `Wrong` at a failure."""

    def decorate(check: Callable[P, str]) -> Callable[P, CheckResult]:
        @wraps(check)
        def run(*args: P.args, **kwargs: P.kwargs) -> CheckResult:
            try:
                result = CheckResult(name, "passed", check(*args, **kwargs))
            except Wrong as wrong:
                result = CheckResult(name, "wrong", str(wrong), wrong.picture)
            except Exception as error:
                if is_unwritten(error):
                    result = CheckResult(name, "not written", "write the cell above, then run this")
                else:
                    message = f"your code raised {type(error).__name__}: {error}"
                    result = CheckResult(name, "wrong", message)
            if os.environ.get("MINICHUNK_LABS_STRICT") == "1" and not result.passed:
                raise ExerciseNotPassed(str(result))
            return result

        return run

    return decorate


def is_fast() -> bool:
    """`MINICHUNK_FAST=1` shrinks the notebooks' sizes, for tests."""
    return os.environ.get("MINICHUNK_FAST") == "1"
