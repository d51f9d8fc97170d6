"""What a test needs from the machine: where it is missing, the test is skipped and says so.

MINICHUNK_REQUIRE lists what must be there (browser, node, compiler, dask, vllm): where one of those
is missing, its tests fail.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def is_required(what: str) -> bool:
    return what in os.environ.get("MINICHUNK_REQUIRE", "").split(",")


def unavailable(what: str, reason: str) -> NoReturn:
    """Skip with the reason, or fail with it."""
    if is_required(what):
        pytest.fail(f"MINICHUNK_REQUIRE asks for {what}, but {reason}")
    pytest.skip(reason)


def needs(what: str, problem: str) -> pytest.MarkDecorator:
    """Marks what cannot pass with this problem ("": none); it is tried and fails if required."""
    return pytest.mark.skipif(bool(problem) and not is_required(what), reason=problem or "none")
