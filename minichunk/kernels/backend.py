"""Which implementation serves an operation: Triton's kernels, the C++ ones, or torch.

The executor asks once for `choose_backend("auto", ...)`; each public kernel function asks
`runs_on_triton` and `runs_on_cpp` with the backend that it was given. Shows that a kernel is bound
to the hardware it was made for: below sm_80 Triton emits no tensor-core instructions, and torch is
the faster choice; on a CPU it does not run at all.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from minichunk.kernels._cpp import CPP_DTYPES, cpp_problem
from minichunk.kernels._triton import INTERPRETED, launch_problem

BACKENDS = ("auto", "torch", "cpp", "triton")
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
    """Resolves "auto": "triton" on NVIDIA GPUs from sm_80 up and on ROCm, "cpp" on a CPU where its
    kernels can be compiled, else "torch".

    Raises ValueError for an unknown backend, for one that cannot run on this device (the message
    says why), and for bfloat16 on a GPU that has no bfloat16 arithmetic.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; choose 'auto', 'torch', 'cpp' or 'triton'"
        )
    target = target_name(device)
    if dtype == torch.bfloat16 and _is_older_than_ampere(target):
        raise ValueError(
            f"dtype=bfloat16 needs a GPU from sm_80 up, but {device} is {target}; use "
            f"dtype='float16' or 'float32'"
        )
    if backend == "auto" and device.type == "cpu":
        return "cpp" if dtype in CPP_DTYPES and not cpp_problem() else "torch"
    if backend == "auto":
        runnable = target != "cpu" and not _is_older_than_ampere(target)
        runnable = runnable and not launch_problem(on_cpu=False) and dtype in TRITON_DTYPES
        return "triton" if runnable else "torch"
    if backend == "triton":
        _check_triton(target, dtype)
    if backend == "cpp":
        _check_cpp(device.type, dtype)
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


@lru_cache
def _check_cpp(device_type: str, dtype: torch.dtype) -> None:
    if device_type != "cpu":
        raise ValueError(
            f"backend='cpp' computes on the CPU, but the tensors are on {device_type}; "
            "use 'triton' or 'torch'"
        )
    if dtype not in CPP_DTYPES:
        raise ValueError(
            f"the C++ kernels compute in bfloat16 or float32, not in {dtype}; use backend='torch'"
        )
    problem = cpp_problem()
    if problem:
        raise ValueError(f"{problem}; use backend='torch'")


def runs_on_triton(backend: str, x: Tensor) -> bool:
    """True for "triton" if its kernels can take x, False for "torch" and "cpp"; else ValueError."""
    if backend == "triton":
        _check_triton(target_name(x.device), x.dtype)
        return True
    if backend in ("torch", "cpp"):
        return False
    raise ValueError(
        f"backend={backend!r} is not an implementation; use 'torch', 'cpp' or 'triton' "
        f"(choose_backend resolves 'auto')"
    )


def runs_on_cpp(backend: str, x: Tensor) -> bool:
    """True for "cpp" if its kernels can take x; ValueError if they cannot."""
    if backend != "cpp":
        return False
    _check_cpp(x.device.type, x.dtype)
    return True


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 stands in for them in the interpreter."""
    if INTERPRETED or device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
