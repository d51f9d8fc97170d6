"""Which implementation serves an operation: Triton's kernels, or torch.

The executor asks once for `choose_backend("auto", ...)`; each public kernel function asks
`runs_on_triton` with the backend that it was given. Shows that a kernel is bound to the hardware it
was made for: below sm_80 Triton emits no tensor-core instructions, and torch is the faster choice.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from minichunk.kernels._triton import INTERPRETED, launch_problem

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@lru_cache
def target_name(device: torch.device) -> str:
    """`sm_80`, `gfx942`, ... for a GPU, "cpu" for anything else."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _is_older_than_ampere(target: str) -> bool:
    return target.startswith("sm_") and int(target[3:]) < 80


def choose_backend(backend: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Resolves "auto": "triton" on NVIDIA GPUs from sm_80 up and on ROCm, else "torch".

    Raises ValueError for an unknown backend, for one that cannot run on this device (the message
    says why), and for bfloat16 on a GPU that has no bfloat16 arithmetic.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; choose 'auto', 'torch' or 'triton'")
    target = target_name(device)
    if dtype == torch.bfloat16 and _is_older_than_ampere(target):
        raise ValueError(
            f"dtype=bfloat16 needs a GPU from sm_80 up, but {device} is {target}; use "
            f"dtype='float16' or 'float32'"
        )
    if backend == "auto":
        runnable = target != "cpu" and not _is_older_than_ampere(target)
        runnable = runnable and not launch_problem(on_cpu=False) and dtype in TRITON_DTYPES
        return "triton" if runnable else "torch"
    if backend == "triton":
        _check_triton(target, dtype)
    return backend


@lru_cache
def _check_triton(target: str, dtype: torch.dtype) -> None:
    problem = launch_problem(on_cpu=target == "cpu")
    if problem:
        raise ValueError(problem)
    if dtype not in TRITON_DTYPES:
        raise ValueError(
            f"Triton kernels compute in float16, bfloat16 or float32, but the tensor is {dtype}"
        )
    if dtype == torch.bfloat16 and _is_older_than_ampere(target):
        raise ValueError(f"dtype=bfloat16 needs a GPU from sm_80 up, but this one is {target}")


def runs_on_triton(backend: str, x: Tensor) -> bool:
    """True for "triton" if its kernels can take x, False for "torch"; ValueError otherwise."""
    if backend == "triton":
        _check_triton(target_name(x.device), x.dtype)
        return True
    if backend == "torch":
        return False
    raise ValueError(
        f"backend={backend!r} is not an implementation; use 'torch' or 'triton' "
        f"(choose_backend resolves 'auto')"
    )


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 stands in for them in the interpreter."""
    if INTERPRETED or device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
