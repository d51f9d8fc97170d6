"""Where chunks are attended to in C++, and that torch's attention serves them everywhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minichunk.kernels import _cpp, attention_cpp
from minichunk.kernels._cpp import CompileError, cpp_problem
from minichunk.kernels.attention import paged_attention
from minichunk.kernels.attention_cpp import _has_tiles, has_tiles
from tests.required import needs

from .ragged import attention_by_definition, ragged_batch, relative_error

pytestmark = needs("compiler", cpp_problem())

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"HEAD_DIM": 32, "KV_HEADS": 2, "GROUP": 3}
HAS_AMX = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="this CPU has no matrix unit (AMX)")


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[None]:
    for cached in (_has_tiles, _cpp.library):
        cached.cache_clear()
    yield
    for cached in (_has_tiles, _cpp.library):
        cached.cache_clear()


def set_amx(monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: exists, raising=False)


def serves_chunks(dtype: torch.dtype = torch.bfloat16, **changes: int) -> str:
    """ "tiles" or "torch": who computed the chunk of a step, which was right."""
    shape = {"num_kv_heads": 2, "group_size": 3, "head_dim": 32, "block_size": 16, **changes}
    batch = ragged_batch([(5, 30), (1, 8)], dtype=dtype, seed=0, **shape)
    served = []

    def spied(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            served.append(name)
            return function(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, attribute in (("tiles", "_attend_chunk"), ("torch", "plan_chunks")):
            original = getattr(attention_cpp, attribute)
            patch.setattr(attention_cpp, attribute, spied(name, original))
        out = paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale, backend="cpp"
        )
    assert relative_error(out, attention_by_definition(batch)) < 1e-2
    [name] = served
    return name


@needs_amx
def test_a_matrix_unit_serves_chunks_of_bfloat16():
    assert has_tiles(torch.bfloat16, **SHAPES)
    assert serves_chunks() == "tiles"


def test_float32_is_served_by_torch():
    assert not has_tiles(torch.float32, **SHAPES)
    assert serves_chunks(torch.float32) == "torch"


def test_without_a_matrix_unit_torch_serves(monkeypatch):
    set_amx(monkeypatch, False)
    assert serves_chunks() == "torch"


def test_a_torch_that_cannot_tell_serves_itself(monkeypatch):
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert serves_chunks() == "torch"


def test_where_the_kernel_cannot_be_built_torch_serves(monkeypatch):
    set_amx(monkeypatch, True)

    def refuse(name: str, *_: object, **__: object) -> None:
        raise CompileError(f"the C++ kernel {name} cannot be built: no reason")

    monkeypatch.setattr(attention_cpp, "library", refuse)
    assert serves_chunks() == "torch"


def test_a_torch_without_the_small_products_serves_itself(tmp_path, monkeypatch):
    """The kernel compiles and links, but what it calls is not there when it is loaded."""
    set_amx(monkeypatch, True)
    sources = shutil.copytree(_cpp.SOURCES, tmp_path / "sources")
    source = sources / "chunk_attention.cpp"
    source.write_text(source.read_text().replace("brgemm(", "a_product_of_another_torch("))
    monkeypatch.setattr(_cpp, "SOURCES", sources)
    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CompileError, match="a_product_of_another_torch"):
        _cpp.library("chunk_attention", torch.bfloat16, **SHAPES, KEYS=attention_cpp.KEYS)
    assert serves_chunks() == "torch"


@pytest.mark.parametrize(
    "changes", [{"head_dim": 33}, {"group_size": 40, "head_dim": 256}], ids=["odd", "large"]
)
def test_shapes_that_tiles_cannot_have_are_served_by_torch(changes, monkeypatch):
    """Products take pairs of numbers; and a tile of so many heads would not fit a stack."""
    set_amx(monkeypatch, True)
    assert serves_chunks(**changes) == "torch"


@needs_amx
def test_without_onednn_torch_serves_for_as_long(monkeypatch):
    assert serves_chunks() == "tiles"
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert serves_chunks() == "torch"
    assert serves_chunks() == "tiles"


@needs_amx
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_where_onednn_may_not_use_the_processor_torch_serves(instructions):
    """There its products throw, which would end the process."""
    code = "from tests.kernels.test_chunk_choice import *; assert serves_chunks() == 'torch'"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
