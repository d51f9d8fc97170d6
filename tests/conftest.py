"""Fixtures for all rooms: fresh random inputs whose seed is printed when a test fails."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`


@pytest.fixture
def seed() -> int:
    """A new seed for every run; set MINICHUNK_TEST_SEED to repeat one."""
    value = int(os.environ.get("MINICHUNK_TEST_SEED", 0)) or random.SystemRandom().randrange(2**31)
    print(f"MINICHUNK_TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)
