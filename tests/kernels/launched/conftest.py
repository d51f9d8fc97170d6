"""These tests launch the Triton kernels: on a GPU if there is one, and in Triton's interpreter.

The interpreter needs a process of its own: TRITON_INTERPRET=1 must be set before Triton is first
imported, and from then on nothing can be compiled. So on a machine without a GPU plain `pytest`
passes this folder by, and `tests/kernels/test_processes.py` runs it in such a process. By hand:
`TRITON_INTERPRET=1 pytest tests/kernels/launched`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="package")
def poisoned_memory() -> Iterator[None]:
    """With this setting torch.empty fills its memory with NaN (integers: the largest value), so
    an output that a kernel forgot to write cannot pass for a right one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # numpy says "invalid value": a NaN is born
        yield
    torch.use_deterministic_algorithms(False)
