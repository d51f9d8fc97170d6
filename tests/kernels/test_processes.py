"""What needs a process of its own: Triton's interpreter, a machine without Triton, late variables.

TRITON_INTERPRET is read when Triton is first imported, so these tests start fresh interpreters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # what the import system does for a package that is not there
import torch
from minichunk.kernels import attention, rms_norm, rope, sampling, split_kv, swiglu
from minichunk.kernels.backend import choose_backend

assert swiglu.swiglu(torch.ones(1, 4)).shape == (1, 2)
assert choose_backend("auto", "cpu", torch.float32) in ("cpp", "torch")
for launch in (
    lambda: swiglu.swiglu(torch.ones(1, 4), backend="triton"),
    lambda: swiglu.swiglu_kernel[(1,)](),
):
    try:
        launch()
    except (ValueError, RuntimeError) as error:
        assert "Triton cannot be imported here" in str(error), error
    else:
        raise AssertionError("a launch without Triton went through")
"""

VARIABLE_TOO_LATE = """
import os
import torch, triton
os.environ["TRITON_INTERPRET"] = "1"
from minichunk.kernels.swiglu import swiglu
try:
    swiglu(torch.ones(1, 4), backend="triton")
except ValueError as error:
    assert "was set after Triton had been imported" in str(error), error
else:
    raise AssertionError("a half-interpreted kernel was launched")
"""

CPU_WITHOUT_INTERPRETER = """
import torch
from minichunk.kernels.swiglu import swiglu
try:
    swiglu(torch.ones(1, 4), backend="triton")
except ValueError as error:
    assert "Triton kernels need tensors on a GPU" in str(error), error
else:
    raise AssertionError("a kernel was launched on CPU tensors")
"""


def run(arguments: list[str], **variables: str) -> None:
    """Runs Python with TRITON_INTERPRET unset unless given; shows what it printed if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout


def test_kernels_in_the_interpreter():
    pytest_arguments = ["-m", "pytest", str(HERE / "launched"), "-p", "no:cacheprovider"]
    run([*pytest_arguments, "-o", "addopts=-q"], TRITON_INTERPRET="1")


def test_the_benchmark_runs_dry():
    """Its outputs are checked against torch's, on tiny shapes; only times need a GPU."""
    run(["-m", "benchmarks.kernels", "--dry-run"], TRITON_INTERPRET="1")


def test_a_machine_without_triton_imports_everything_and_a_launch_says_why_not():
    run(["-c", WITHOUT_TRITON])


def test_the_variable_set_too_late_is_explained():
    run(["-c", VARIABLE_TOO_LATE])


def test_cpu_tensors_without_the_interpreter_are_refused():
    run(["-c", CPU_WITHOUT_INTERPRETER])
