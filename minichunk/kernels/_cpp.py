"""The C++ kernels for CPUs: compiled with the machine's own g++ when they are first used.

What Triton is on a GPU: the decoder's small operations each in one pass, and attention that reads
the paged cache where it lies. The compiler is told the model's shapes (`-D` constants, like
Triton's `constexpr`), takes a second per kernel, and its libraries are kept in the cache folder.
Where there is no g++, or not Linux, torch serves as before.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from minichunk.cache_folder import cache_folder

SOURCES = Path(__file__).parent / "cpp"
CPP_DTYPES = (torch.bfloat16, torch.float32)
COMPILE = [
    "-std=c++17", "-march=native", "-fPIC", "-fopenmp",
    "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-funroll-loops",
    "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
if platform.machine() == "x86_64":
    COMPILE.append("-mprefer-vector-width=512")  # g++ is shy of AVX-512's full width
# Not -fopenmp: the library takes the OpenMP threads that torch has loaded, and starts none. Torch's
# own library has the small matrix products.
TORCH = Path(torch.__file__).parent / "lib"
LINK = [f"-L{TORCH}", f"-Wl,-rpath,{TORCH}", "-ltorch_cpu"]

SEAL_SIZE = hashlib.sha256().digest_size
ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class CompileError(RuntimeError):
    """A kernel that this machine's compiler would not build."""


@lru_cache
def cpp_problem() -> str:
    """Why the C++ kernels cannot serve on this machine, or ""."""
    if sys.platform != "linux":
        return "the C++ kernels are built on Linux only"
    if shutil.which("g++") is None:
        return "the C++ kernels need g++, which is not installed here"
    try:
        library("swiglu", torch.float32)
    except CompileError as error:
        return str(error)
    return ""


def kernel(name: str, signature: str, dtype: torch.dtype, **shapes: int) -> Callable[..., None]:
    """The function `name` of `cpp/<name>.cpp`, compiled for one element type and these constants.

    `signature` has a letter per argument: p for an address, i for an int64, f for a float.
    """
    torch.get_num_threads()  # OpenMP counts per thread; when asked, torch sets the count here
    return _function(name, signature, dtype, **shapes)


@lru_cache
def _function(name: str, signature: str, dtype: torch.dtype, **shapes: int) -> Callable[..., None]:
    function = getattr(library(name, dtype, **shapes), name)
    function.argtypes, function.restype = [ARGUMENTS[letter] for letter in signature], None
    return function


def address(x: Tensor | None) -> int | None:
    """Where a tensor lies, for a kernel that takes a null pointer as well."""
    return None if x is None else x.data_ptr()


@lru_cache
def library(name: str, dtype: torch.dtype, **shapes: int) -> ctypes.CDLL:
    """`cpp/<name>.cpp`, from the cache folder or built now; CompileError if that is impossible."""
    defines = [f"-D{constant}={value}" for constant, value in shapes.items()]
    if dtype == torch.float32:
        defines.append("-DELEMENT_IS_FLOAT")
    source = SOURCES / f"{name}.cpp"
    parts = [*COMPILE, *LINK, torch.__version__, *defines, _processor(), source.read_text()]
    parts += [header.read_text() for header in sorted(SOURCES.glob("*.h"))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_folder() / "kernels" / f"{name}-{key}.so"
    try:
        return _loaded(target) or _build(source, defines, target)
    except subprocess.CalledProcessError as error:
        problem = _complaint(error)
    except OSError as error:
        problem = f"{error} (MINICHUNK_CACHE can name another folder)"
    raise CompileError(f"the C++ kernel {name} cannot be built: {problem}")


def _loaded(target: Path) -> ctypes.CDLL | None:
    """A library that was built before; None if there is none, or a damaged one.

    Of half a library the loader would not complain: its pages are missing, which kills the process.
    """
    try:
        content = target.read_bytes()
        return ctypes.CDLL(str(target)) if content == _sealed(content[:-SEAL_SIZE]) else None
    except OSError:
        return None


def _sealed(content: bytes) -> bytes:
    """A library with its own hash at the end, where the loader does not look."""
    return content + hashlib.sha256(content).digest()


def _build(source: Path, defines: list[str], target: Path) -> ctypes.CDLL:
    """Compile, link and load; the file appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
        compiler = ["g++", *COMPILE, *defines, "-c", str(source), "-o", str(compiled)]
        linker = ["g++", "-shared", str(compiled), *LINK, "-o", str(linked)]
        for command in (compiler, linker):
            subprocess.run(command, check=True, capture_output=True, errors="replace")
        linked.write_bytes(_sealed(linked.read_bytes()))
        os.replace(linked, target)
    return ctypes.CDLL(str(target))


def _complaint(error: subprocess.CalledProcessError) -> str:
    """One line: what the compiler said first about an error."""
    lines = error.stderr.strip().splitlines() or [f"g++ ended with code {error.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


@lru_cache
def _processor() -> str:
    """What `-march=native` depends on: a cache folder may be shared by different machines."""
    cpuinfo = Path("/proc/cpuinfo")
    features = {
        line
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith(("flags", "Features", "CPU part", "model"))
    }
    return platform.machine() + "".join(sorted(features))
