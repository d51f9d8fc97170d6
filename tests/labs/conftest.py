"""Gives tests the solutions that are folded into the notebooks, so that these cannot drift."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
SOLUTION = re.compile(
    r"<!-- solution: (?P<name>[\w-]+) -->.*?```python\n(?P<code>.*?)```", re.DOTALL
)


@pytest.fixture(scope="session")
def solution() -> Callable[[str, str], Any]:
    """`solution("08_mixing", "capped-policy")`: the last function or class that it defines."""

    def load(notebook: str, exercise: str) -> Any:
        text = (SOURCES / f"{notebook}.py").read_text(encoding="utf-8")
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        for match in SOLUTION.finditer(text):
            if match["name"] == exercise:
                names: dict[str, Any] = {}
                exec("import math\nimport torch\nimport minichunk as mc\n", names)
                before = set(names)
                exec(match["code"], names)
                return names[[name for name in names if name not in before][-1]]
        raise LookupError(f"{notebook} has no solution of {exercise!r}")

    return load
