"""The check of `gather-keys` passes its solution and tells plausible wrong kernels apart."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import triton
import triton.language as tl

from minichunk.labs import check
from tests.labs.conftest import SOLUTION, SOURCES
from tests.labs.wrong_answers import assert_all_wrong


def solution_as_module(folder: Path):
    """Triton reads a kernel's source, so the folded solution has to lie in a file."""
    text = re.sub(r"^# ?", "", (SOURCES / "03_kernels.py").read_text(), flags=re.MULTILINE)
    code = next(m["code"] for m in SOLUTION.finditer(text) if m["name"] == "gather-keys")
    path = folder / "gather_solution.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n{code}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gather_keys


def test_the_solution_passes(tmp_path: Path) -> None:
    result = check.gather_keys(solution_as_module(tmp_path))
    assert result.passed, result


@triton.jit
def contiguous(
    out_ptr, cache_ptr, table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    key = tl.program_id(0) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, DIM)
    mask = (key < num_keys)[:, None]
    k = tl.load(cache_ptr + key[:, None] * DIM + dim[None, :], mask=mask)
    tl.store(out_ptr + key[:, None] * DIM + dim[None, :], k, mask=mask)


@triton.jit
def one_block_per_tile(
    out_ptr, cache_ptr, table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TILE_KEYS
    key = start + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, DIM)
    mask = (key < num_keys)[:, None]
    slot = tl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
    k = tl.load(cache_ptr + slot[:, None] * DIM + dim[None, :], mask=mask)
    tl.store(out_ptr + key[:, None] * DIM + dim[None, :], k, mask=mask)


@triton.jit
def no_offset_in_the_block(
    out_ptr, cache_ptr, table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    key = tl.program_id(0) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, DIM)
    exists = key < num_keys
    slot = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0) * BLOCK_SIZE
    k = tl.load(cache_ptr + slot[:, None] * DIM + dim[None, :], mask=exists[:, None])
    tl.store(out_ptr + key[:, None] * DIM + dim[None, :], k, mask=exists[:, None])


@triton.jit
def stores_without_a_mask(
    out_ptr, cache_ptr, table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    key = tl.program_id(0) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, DIM)
    exists = key < num_keys
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0)
    slot = block * BLOCK_SIZE + key % BLOCK_SIZE
    k = tl.load(cache_ptr + slot[:, None] * DIM + dim[None, :], mask=exists[:, None], other=0.0)
    tl.store(out_ptr + key[:, None] * DIM + dim[None, :], k)


@triton.jit
def only_the_first_tile(
    out_ptr, cache_ptr, table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    key = tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, DIM)
    exists = key < num_keys
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0)
    slot = block * BLOCK_SIZE + key % BLOCK_SIZE
    k = tl.load(cache_ptr + slot[:, None] * DIM + dim[None, :], mask=exists[:, None], other=0.0)
    tl.store(out_ptr + key[:, None] * DIM + dim[None, :], k, mask=exists[:, None])


def test_wrong_kernels_are_told_apart() -> None:
    kernels = [contiguous, one_block_per_tile, no_offset_in_the_block]
    kernels += [stores_without_a_mask, only_the_first_tile]
    assert_all_wrong(check.gather_keys, {kernel.fn.__name__: kernel for kernel in kernels})


@triton.jit
def unwritten(
    out_ptr, cache_ptr, table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    raise NotImplementedError


def test_an_unwritten_kernel_is_said_to_be_unwritten() -> None:
    assert check.gather_keys(unwritten).status == "not written"
