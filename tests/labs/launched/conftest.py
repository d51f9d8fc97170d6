"""The student's kernels of notebook 03 are launched here: in Triton's interpreter, or on a GPU.

The interpreter needs a process of its own, so on a machine without a GPU plain `pytest` passes this
folder by, and `tests/labs/test_kernels.py` runs it in such a process.
By hand: `TRITON_INTERPRET=1 pytest tests/labs/launched`.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
