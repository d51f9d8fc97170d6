"""Tests that run the decoder on the Triton kernels: on a GPU, or in Triton's interpreter.

The interpreter needs a process of its own (TRITON_INTERPRET=1 before Triton is first imported), so
without a GPU plain `pytest` passes this folder by and `tests/model/test_triton_process.py` runs it.
By hand: `TRITON_INTERPRET=1 pytest tests/model/launched`.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
