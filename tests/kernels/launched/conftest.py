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


@pytest.fixture(autouse=True, scope="module")
def nothing_escapes(poisoned_memory: None) -> Iterator[None]:
    """An unwritten output is NaN, and a NaN born in the interpreter is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # numpy says "invalid value": a NaN is born
        yield
