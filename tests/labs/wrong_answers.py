"""Plausible wrong answers, and that a check turns each of them down with its counter-example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minichunk.labs.result import CheckResult


def assert_all_wrong(
    check: Callable[[Any], CheckResult], answers: Mapping[str, Callable[..., Any]]
) -> list[CheckResult]:
    """At least three answers, none of which may pass, crash or go without an explanation."""
    assert len(answers) >= 3
    results = []
    for name, answer in answers.items():
        result = check(answer)
        assert result.status == "wrong", f"{name}: {result}"
        assert "your code raised" not in result.message, f"{name}: {result}"
        assert any(character.isdigit() for character in result.message), f"{name}: {result}"
        results.append(result)
    return results
