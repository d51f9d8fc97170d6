"""Compiling the kernels for GPUs that are not there, and reading the machine code that comes out.

Not part of a step: this is how kernels are checked on a machine without a GPU (`python -m
benchmarks.kernels --static`, and the tests). It shows what can be known about a kernel before it
ever runs: whether it fits the shared memory, whether registers spill to slow local memory, whether
the matrix products became tensor-core instructions, and whether loads are 16 bytes wide.

The real launchers are called, with tensors on the "meta" device and a stand-in for Triton's driver,
so that what is compiled is what would be launched, down to the alignment that Triton infers from
the arguments. That needs a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from minichunk.kernels._triton import INTERPRETED, TRITON_MISSING, triton
from minichunk.kernels.attention import paged_attention_triton
from minichunk.kernels.attention_metadata import AttentionMetadata
from minichunk.kernels.rms_norm import rms_norm_triton
from minichunk.kernels.rope import rope_and_cache_triton
from minichunk.kernels.sampling import sample_triton
from minichunk.kernels.swiglu import swiglu_triton
from minichunk.kernels.tiles import SHARED_MEMORY, AttentionTile, attention_tile

TARGETS = tuple(SHARED_MEMORY)
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_TOKENS, NUM_KV_HEADS = 64, 8
WIDE_LOAD = re.compile(
    r"cp\.async\.cg\.shared\.global\b.*\b0x10\b|ld\.global[\w.:]*\.(?:v4\.b32|v2\.b64)"
    r"|(?:global|buffer)_load_dwordx4"
)
IN_FLIGHT = re.compile(r"ttg\.async_wait .*\{num = (\d+)")
TENSOR_CORE = {
    "mma.sync": re.compile(r"\bmma\.sync"),
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05.mma": re.compile(r"\btcgen05\.mma"),
    "v_mfma": re.compile(r"\bv_mfma"),
}


@dataclass(frozen=True)
class Case:
    """One specialisation of one operation. Operations without head dimensions leave them at 0."""

    operation: str  # "attention chunk", "attention decode", "attention split", "rope", ...
    dtype: str
    head_dim: int = 0
    group_size: int = 4
    block_size: int = 16

    @property
    def is_attention(self) -> bool:
        return self.operation.startswith("attention")

    @property
    def is_decode(self) -> bool:
        return self.operation in ("attention decode", "attention split")

    def tile(self, target: str) -> AttentionTile:
        dtype = DTYPES[self.dtype]
        return attention_tile(target, dtype, self.head_dim, self.group_size, self.is_decode)


@dataclass(frozen=True)
class Report:
    """What the machine code of one kernel says. Sizes in bytes (on AMD, spills in registers)."""

    case: Case
    target: str
    kernel: str
    shared: int
    registers: int
    spilled: int
    tensor_core: tuple[str, ...]
    wide_loads: int
    in_flight: int  # asynchronous copies still under way while a loop computes (NVIDIA only)
    seconds: float

    def problems(self) -> list[str]:
        """What is wrong with it; empty if nothing is."""
        found = []
        if self.shared > SHARED_MEMORY[self.target]:
            found.append(f"shared memory {self.shared} > {SHARED_MEMORY[self.target]}")
        if self.spilled:
            found.append(f"registers spill ({self.spilled})")
        needed = self.needed_tensor_core()
        if needed and needed not in self.tensor_core:
            found.append(f"no {needed} (has {', '.join(self.tensor_core) or 'none'})")
        if not self.wide_loads and self.kernel != "best_of_tiles_kernel":
            found.append("no 16-byte loads")
        if self.kernel == "attention_kernel" and self.has_async_copies and not self.in_flight:
            found.append("keys are not prefetched")
        return found

    @property
    def has_async_copies(self) -> bool:
        """NVIDIA GPUs from sm_80 up copy from global to shared memory behind the program's back."""
        return self.target.startswith("sm_") and self.target != "sm_75"

    def needed_tensor_core(self) -> str | None:
        """The instruction that this kernel's matrix products should have become."""
        if self.kernel != "attention_kernel" or self.case.dtype == "float32":
            return None
        if self.target == "gfx942":
            return "v_mfma"
        many_rows = self.case.tile(self.target).rows >= 64
        newer = {"sm_90": "wgmma", "sm_100": "tcgen05.mma"}
        if many_rows and self.target in newer:
            return newer[self.target]
        return None if self.target == "sm_75" else "mma.sync"


def all_cases(target: str) -> list[Case]:
    """A case for each kernel, dtype and head dimension, and for other block and group sizes."""
    dtypes = [dtype for dtype in DTYPES if (target, dtype) != ("sm_75", "bfloat16")]
    cases = []
    for dtype in dtypes:
        for head_dim in HEAD_DIMS:
            case = Case("attention chunk", dtype, head_dim)
            cases += [case, replace(case, operation="attention decode")]
            cases += [replace(case, operation="rope"), replace(case, operation="rope with norm")]
        cases.append(Case("attention split", dtype, 128))
        cases += [Case(name, dtype) for name in ("rms_norm", "swiglu", "greedy", "gumbel")]
    half = dtypes[-2]  # other block sizes and groups, in the usual precision
    for operation in ("attention chunk", "attention decode"):
        cases += [Case(operation, half, 128, block_size=size) for size in (64, 128)]
        cases += [Case(operation, half, 64, group) for group in (1, 3, 8)]
    return cases


def compile_case(case: Case, target: str) -> list[Report]:
    """Compiles the kernels that `case` would launch on `target`; raises what Triton raises."""
    return [_read(case, target, *launch) for launch in _compile(case, target)]


def machine_code(case: Case, target: str) -> dict[str, str]:
    """What the kernels of `case` became, by name: PTX on NVIDIA, assembly on AMD GPUs."""
    kind = "amdgcn" if target.startswith("gfx") else "ptx"
    return {name: compiled.asm[kind] for name, compiled, _ in _compile(case, target)}


def _compile(case: Case, target: str) -> list[tuple[str, Any, float]]:
    """(name, compiled kernel, seconds) of each launch."""
    if TRITON_MISSING or INTERPRETED:
        raise RuntimeError(
            TRITON_MISSING or "compiling needs a process in which TRITON_INTERPRET is not set"
        )
    with _launches_compile_for(target) as launches:
        _launch(case, target)
    return launches


def _launch(case: Case, target: str) -> None:
    """Calls the launcher with tensors that have sizes, but no content."""

    def empty(*shape: int, dtype: torch.dtype = DTYPES[case.dtype]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_q_heads, head_dim = NUM_KV_HEADS * case.group_size, case.head_dim
    q = empty(NUM_TOKENS, num_q_heads, head_dim)
    cache = empty(1000, case.block_size, NUM_KV_HEADS, head_dim)
    if case.is_attention:
        metadata = AttentionMetadata(
            empty(NUM_TOKENS + 1, dtype=torch.int32),
            empty(NUM_TOKENS, dtype=torch.int32),
            empty(NUM_TOKENS, 100, dtype=torch.int32),
            case.block_size,
            max_query_len=1 if case.is_decode else NUM_TOKENS,
            max_seq_len=1000,
        )
        num_splits = 4 if case.operation == "attention split" else 1
        tile = case.tile(target)
        paged_attention_triton(q, cache, cache, metadata, 0.1, num_splits, tile)
    elif case.operation.startswith("rope"):
        k = empty(NUM_TOKENS, NUM_KV_HEADS, head_dim)
        angles = empty(NUM_TOKENS, head_dim // 2, dtype=torch.float32)
        slots = empty(NUM_TOKENS, dtype=torch.int64)
        norm = empty(head_dim) if case.operation == "rope with norm" else None
        rope_and_cache_triton(q, k, k, angles, angles, cache, cache, slots, norm, norm)
    elif case.operation == "rms_norm":
        x = empty(NUM_TOKENS, 4096)
        rms_norm_triton(x, empty(4096), 1e-5)
        rms_norm_triton(x, empty(4096), 1e-5, x)
    elif case.operation == "swiglu":
        swiglu_triton(empty(NUM_TOKENS, 2 * 14336))
    else:
        numbers = empty(NUM_TOKENS, dtype=torch.int64)
        random = (empty(NUM_TOKENS, dtype=torch.float32), numbers, numbers)
        logits = empty(NUM_TOKENS, 128256)
        sample_triton(logits, *(random if case.operation == "gumbel" else (None, None, None)))


class _AbsentGPU:
    """As much of Triton's driver as compiling needs. The target's name serves as device id."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.target.startswith("gfx"):
            return GPUTarget("hip", self.target, 64)
        return GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)


@contextmanager
def _launches_compile_for(target: str) -> Iterator[list[tuple[str, Any, float]]]:
    """Within it, a launch compiles for `target` instead; yields (name, compiled, seconds)."""
    from triton.runtime import JITFunction, driver

    compiled: list[tuple[str, Any, float]] = []
    run, previous = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        begin = time.perf_counter()
        result = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, result, time.perf_counter() - begin))

    JITFunction.run = compile_only
    driver.set_active(_AbsentGPU(target))
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver.set_active(previous)


def _read(case: Case, target: str, kernel: str, compiled: Any, seconds: float) -> Report:
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count: +(\d+)", text)[0])
        spilled = int(re.findall(r"\.vgpr_spill_count: +(\d+)", text)[0])
    else:
        text = compiled.asm["ptx"]
        registers, spilled = _resource_usage(compiled.asm["cubin"])
    return Report(
        case,
        target,
        kernel,
        compiled.metadata.shared,
        registers,
        spilled,
        tuple(name for name, pattern in TENSOR_CORE.items() if pattern.search(text)),
        len(WIDE_LOAD.findall(text)),
        max(map(int, IN_FLIGHT.findall(compiled.asm["ttgir"])), default=0),
        seconds,
    )


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack per thread, to which registers spill."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[0]
    return int(registers), int(stack)
