"""Triton for machines that may not have it: `triton`, `tl`, `jit`, and what kernels share.

Every kernel file imports `jit` and `tl` from here. Where Triton is absent (macOS, Windows) the
files still import, and only a launch raises. With TRITON_INTERPRET=1 in the environment before the
first import, Triton runs the kernels in numpy on the CPU: so they are tested without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    TRITON_MISSING = ""
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError as error:
    triton = None
    TRITON_MISSING = f"Triton cannot be imported here ({error}); use backend='torch'"
    INTERPRETED = False

    class _AbsentLanguage:
        """Stands for `triton.language` while kernel files are imported; constants pass through."""

        def constexpr(self, value: Any) -> Any:
            return value

    tl = _AbsentLanguage()


class _AbsentKernel:
    """A kernel that says, when launched, why it cannot run."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise RuntimeError(TRITON_MISSING)


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit(**options)`, or a decorator whose kernels raise on launch without Triton."""
    if triton is None:
        return lambda function: _AbsentKernel()
    return triton.jit(**options)


def launch_problem(on_cpu: bool) -> str:
    """Why a kernel cannot be launched on tensors that lie on a CPU (or do not); "" if it can."""
    if TRITON_MISSING:
        return TRITON_MISSING
    variable_set = os.environ.get("TRITON_INTERPRET") == "1"
    standard_library_interpreted = not isinstance(tl.sum, triton.runtime.JITFunction)
    if variable_set and not (INTERPRETED and standard_library_interpreted):
        return (
            "TRITON_INTERPRET=1 was set after Triton had been imported, so its kernels are already "
            "meant for a GPU; set it before Python starts, or before the first import"
        )
    if on_cpu and not INTERPRETED:
        return (
            "Triton kernels need tensors on a GPU; on a CPU use backend='torch', or set "
            "TRITON_INTERPRET=1 before the first import to run them in Triton's (slow) interpreter"
        )
    return ""


INTERPRET = tl.constexpr(INTERPRETED)  # for use inside kernels


@jit()
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a @ b on tensor cores; for float32 operands in full float32, never in TF32.

    Triton's interpreter keeps bfloat16 as raw bits, which its matrix product would multiply as
    integers. So there, and only there, the operands are widened first; their values are the same.
    """
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: the length of a Triton tile."""
    return 1 << max(n - 1, 0).bit_length()
