"""The kernels compiled for GPUs that are not here, and what their machine code says.

A covering subset, drawn anew in each run: every operation in every dtype and head dimension, and
every GPU with every operation and dtype. `python -m benchmarks.kernels --static` compiles them all.
"""

from __future__ import annotations

import os
import random
from unittest import mock

import pytest
import torch

from minichunk.kernels.ahead_of_time import (
    DTYPES,
    HEAD_DIMS,
    TARGETS,
    Case,
    Report,
    all_cases,
    compile_case,
)
from minichunk.kernels.split_kv import MAX_SPLITS, MIN_KEYS_PER_SPLIT, choose_num_splits
from minichunk.kernels.tiles import (
    CHUNK_TILES,
    DECODE_TILES,
    SHARED_MEMORY,
    AttentionTile,
    attention_tile,
    table_row,
)

ROTATION = random.SystemRandom().randrange(len(TARGETS))
PAIRS = [(kind, dtype) for kind in ("attention chunk", "attention decode") for dtype in DTYPES]
OTHERS = ("attention split", "rope", "rope with norm", "rms_norm", "swiglu", "greedy", "gumbel")
cannot_compile = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton does not compile when interpreting"
)


def check(case: Case, target: str) -> list[Report]:
    print(case, target)
    reports = compile_case(case, target)
    assert reports
    for report in reports:
        assert not report.problems(), (report.problems(), report)
    return reports


@cannot_compile
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("operation", "dtype"), PAIRS)
def test_attention_compiles_well(operation, dtype, head_dim):
    shift = PAIRS.index((operation, dtype)) + HEAD_DIMS.index(head_dim) + ROTATION
    target = TARGETS[shift % len(TARGETS)]
    if (target, dtype) == ("sm_75", "bfloat16"):
        target = "sm_80"  # sm_75 has no bfloat16, and the executor refuses it there
    check(Case(operation, dtype, head_dim), target)


@cannot_compile
@pytest.mark.parametrize("operation", OTHERS)
def test_the_other_kernels_compile_well(operation):
    target = TARGETS[(OTHERS.index(operation) + ROTATION) % len(TARGETS)]
    head_dim = 128 if operation.startswith(("attention", "rope")) else 0
    reports = check(Case(operation, "float16", head_dim), target)
    if operation == "attention split":
        assert [report.kernel for report in reports] == ["attention_kernel", "combine_kernel"]


@cannot_compile
def test_the_reading_notices_bad_code():
    """A check that nothing fails would be no check: a tile too large must be reported."""
    huge = AttentionTile(rows=128, keys=128, num_warps=4, num_stages=5)
    case = Case("attention chunk", "float16", 128)
    with mock.patch.object(Case, "tile", return_value=huge):
        (report,) = compile_case(case, "sm_89")
        found = " ".join(report.problems())
    assert "shared memory" in found
    assert "spill" in found
    shallow = AttentionTile(rows=16, keys=32, num_warps=4, num_stages=3)
    with mock.patch.object(Case, "tile", return_value=shallow):
        (report,) = compile_case(Case("attention decode", "float16", 64), "sm_80")
    assert report.problems() == ["keys are not prefetched"]
    assert report.tensor_core == ("mma.sync",)


def test_the_tables_have_a_tile_for_every_target_width_and_head_dimension():
    for table in (CHUNK_TILES, DECODE_TILES):
        assert set(table) == set(SHARED_MEMORY)
        for widths in table.values():
            assert {width: set(dims) for width, dims in widths.items()} == {
                2: {32, 64, 128, 256},
                4: {32, 64, 128, 256},
            }
    for target in TARGETS:
        assert {case.operation for case in all_cases(target)} == {
            *OTHERS,
            PAIRS[0][0],
            PAIRS[-1][0],
        }
    assert all(rows <= 32 for dims in CHUNK_TILES["sm_75"].values() for rows, *_ in dims.values())


def test_gpus_that_are_not_in_the_table_get_the_tiles_of_a_neighbour():
    rows = {"sm_70": "sm_75", "sm_86": "sm_89", "sm_103": "sm_100", "sm_120": "sm_89"}
    rows |= {"gfx90a": "gfx942", "cpu": "sm_80", "sm_90": "sm_90"}
    assert {target: table_row(target) for target in rows} == rows


def test_a_tile_holds_all_query_heads_of_a_kv_head():
    assert attention_tile("sm_90", torch.bfloat16, 128, 71, is_decode=True).rows == 128
    assert attention_tile("sm_90", torch.bfloat16, 80, 3, is_decode=True).rows == 16


def test_the_rule_for_splitting_contexts():
    assert choose_num_splits(num_programs=264, max_seq_len=32768, num_multiprocessors=132) == 1
    assert choose_num_splits(num_programs=8, max_seq_len=32768, num_multiprocessors=132) == 32
    assert (
        choose_num_splits(num_programs=1, max_seq_len=10**6, num_multiprocessors=132) == MAX_SPLITS
    )
    short = MIN_KEYS_PER_SPLIT * 2 - 1
    assert choose_num_splits(num_programs=1, max_seq_len=short, num_multiprocessors=132) == 1
    assert choose_num_splits(num_programs=0, max_seq_len=0, num_multiprocessors=132) == 1
