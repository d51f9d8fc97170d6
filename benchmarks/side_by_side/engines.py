"""The engines by their spelling: which adapter, which interpreter, which environment variables.

Thread counts are the same for all, each thread is bound to a core, and all get huge pages, without
which reading the weights costs what the machine's state of the day makes it cost, in a virtual
machine above all. vLLM gets what its documentation asks for on a CPU: Intel's OpenMP and tcmalloc
preloaded where they are installed, and the settings that its own launcher would make.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = "MINICHUNK_VLLM_PYTHON"


@dataclass(frozen=True)
class EngineKind:
    """`adapter` is module:class in `adapters`."""

    adapter: str
    compiled: bool = False
    needs_vllm: bool = False


ENGINES: Mapping[str, EngineKind] = {
    "minichunk": EngineKind("minichunk_engine:MinichunkAdapter"),
    "minichunk-compiled": EngineKind("minichunk_engine:MinichunkAdapter", compiled=True),
    "transformers": EngineKind("transformers_generate:GenerateAdapter"),
    "transformers-cb": EngineKind("transformers_continuous:ContinuousAdapter"),
    "vllm": EngineKind("vllm_engine:VLLMAdapter", needs_vllm=True),
    "vllm-compiled": EngineKind("vllm_engine:VLLMAdapter", compiled=True, needs_vllm=True),
}


def chosen_engines(names: Sequence[str]) -> list[str]:
    """The names, each once; ValueError for one that does not exist."""
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    return list(dict.fromkeys(names))


def interpreter(name: str, vllm_python: str | None) -> str:
    """The Python of this engine's environment; ValueError, with the cure, where there is none."""
    if not ENGINES[name].needs_vllm:
        return sys.executable
    found = vllm_python or os.environ.get(VLLM_PYTHON)
    if not found:
        raise ValueError(
            f"{name} needs an environment of its own: make one with `python -m "
            "benchmarks.side_by_side.make_vllm_environment DIR`, then give --vllm-python "
            f"DIR/bin/python or set {VLLM_PYTHON}"
        )
    if not os.access(found, os.X_OK) or not Path(found).is_file():
        raise ValueError(f"{name}: {found} is not a Python interpreter")
    return found


def usable_cores() -> list[int]:
    """The cores that this process may use; all of them where the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def environment(name: str, python: str, threads: int, cache: Path) -> dict[str, str]:
    """Environment variables of the worker. Compilers keep what they made in the folder `cache`."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    if ENGINES[name].needs_vllm:
        variables.update(_vllm_variables(python, threads, cache))
    else:
        variables.update(OMP_PROC_BIND="true", OMP_PLACES="cores")
    return variables


def _vllm_variables(python: str, threads: int, cache: Path) -> dict[str, str]:
    """In this process, not in one of its own, and reporting to nobody.

    Its launcher would keep a core for itself; here the threads get them all. Without Intel's OpenMP
    (torch's own instead), W1 came out the same within the noise.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    preload = [os.environ["LD_PRELOAD"]] if os.environ.get("LD_PRELOAD") else []
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        cores = ",".join(map(str, usable_cores()[:threads]))
        preload.append(str(openmp))
        variables.update(  # with OMP_PROC_BIND instead, W3 took 1.65 s and not 1.04 s
            KMP_AFFINITY=f"granularity=fine,explicit,proclist=[{cores}]",
            KMP_BLOCKTIME="5",  # milliseconds that a thread spins before it sleeps
            KMP_TPAUSE="0",
        )
    if tcmalloc := ctypes.util.find_library("tcmalloc_minimal"):
        preload.insert(0, tcmalloc)
    if preload:
        variables["LD_PRELOAD"] = ":".join(preload)
    return variables
