"""What the tests of compiled kernels share, whichever language these are written in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def poisoned_memory() -> Iterator[None]:
    """With this setting torch.empty fills its memory with NaN (integers: the largest value), so
    an output that a kernel forgot to write cannot pass for a right one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
