"""What "auto" means for device, precision and kernels, and the loading of an executor with them."""

from __future__ import annotations

import atexit
import gc
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from minichunk.kernels._cpp import CPP_DTYPES, CompileError, cpp_problem
from minichunk.kernels.backend import choose_backend
from minichunk.model.config import one_line
from minichunk.model.errors import ModelError
from minichunk.model.executor import ModelExecutor
from minichunk.model.host_memory import prepare_heap
from minichunk.model.resolve import ResolvedModel
from minichunk.model.weights import load_weights

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ACTIVATION_BYTES = 2**29  # room on a CPU heap beside the weights
AMPERE = (8, 0)  # the first NVIDIA generation that computes in bfloat16


def load_executor(
    model: ResolvedModel,
    *,
    device: str = "auto",
    backend: str = "auto",
    dtype: str | torch.dtype = "auto",
    compiled: bool = False,
    cuda_graphs: bool = True,
    begin: Callable[[str], None] = lambda stage: None,
) -> ModelExecutor:
    """Load a model's weights onto a device. Raises ModelError for what does not go together.

    `begin` is told what happens next: it may take seconds.
    """
    spare_the_collector()
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    kernels = backend_for(backend, where, precision)
    # Products from oneDNN's own layout; a graph of torch.compile cannot hold that.
    packed = where.type == "cpu" and (kernels == "cpp" or (kernels == "torch" and not compiled))
    if where.type == "cpu":
        prepare_heap(model.config.num_parameters * precision.itemsize + ACTIVATION_BYTES)
    try:
        weights = load_weights(
            model.tensors,
            model.config,
            where,
            precision,
            packed=packed,
            activates=kernels == "torch",  # elsewhere a kernel of ours does it
        )
    except torch.OutOfMemoryError as error:
        size = model.config.num_parameters * precision.itemsize / 2**30
        raise ModelError(
            f"the weights of {model.name} take {size:.1f} GiB in {precision}, which {where} does "
            "not have; choose a smaller model or a 16-bit dtype"
        ) from error
    executor = ModelExecutor(
        model.config, weights, backend=kernels, compiled=compiled, cuda_graphs=cuda_graphs
    )
    if kernels == "cpp":
        begin("preparing the C++ kernels")
        build_kernels(executor)
    return executor


def build_kernels(executor: ModelExecutor) -> None:
    """Run every C++ kernel once, which builds those that are new: else the first request waits."""
    try:
        for num_tokens in (1, 2):  # attention takes one token for a decode, and two for a chunk
            executor.prompt_logits([0] * num_tokens)
    except CompileError as error:
        raise ModelError(f"{error}; use backend='torch'") from error


def missed_kernels(backend: str, executor: ModelExecutor) -> str:
    """Why "auto" did without the C++ kernels where a compiler could make them serve, or ""."""
    could_serve = executor.device.type == "cpu" and executor.dtype in CPP_DTYPES
    if backend != "auto" or not could_serve or sys.platform != "linux":
        return ""
    return cpp_problem()


def spare_the_collector() -> None:
    """Take what has been imported so far out of Python's garbage collection.

    Modules live as long as the process, but a full collection would look through all their objects
    again and again: a pause of 200 ms between two steps.
    """
    if gc.get_freeze_count() == 0:  # once: later, a discarded model might be among the objects
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or extension modules would report leaks at the end


def choose_device(device: str) -> torch.device:
    """The GPU if there is one, unless a device is named."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device={device!r} is not known; try 'auto', 'cpu' or 'cuda'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device={device!r}, but torch sees no GPU here; use device='cpu'")
    return chosen


def describe_device(device: torch.device) -> str:
    """What a person would call it: the card's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found[1].strip() if found else name
    threads = torch.get_num_threads()
    return f"CPU ({name}, {threads} thread{'s' if threads > 1 else ''})"


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float16 on GPUs and float32 on CPUs."""
    if dtype == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
        return torch.bfloat16 if gpu_multiplies_bfloat16(device) else torch.float16
    chosen = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(dtype)
    if chosen is None or chosen not in DTYPES.values():
        raise ModelError(f"dtype={dtype!r} is not known; choose one of: auto, {', '.join(DTYPES)}")
    return chosen


def backend_for(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernels' own choice, with its refusals as ModelError."""
    try:
        return choose_backend(backend, device, dtype)
    except ValueError as error:
        raise ModelError(one_line(error)) from None


def gpu_multiplies_bfloat16(device: torch.device) -> bool:
    """False only for NVIDIA GPUs before Ampere."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= AMPERE


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products in hardware: AMX or AVX512-BF16.

    Elsewhere bfloat16 is emulated, several times slower than float32.
    """
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(check() for name in checks if (check := getattr(torch.cpu, name, None)))
