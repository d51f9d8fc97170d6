"""The C++ attention of chunks against float64, row by row: tiles, edges, and scores of any size."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minichunk.kernels import _cpp, attention_cpp
from minichunk.kernels._cpp import cpp_problem
from minichunk.kernels.attention import paged_attention
from minichunk.kernels.attention_cpp import KEYS, has_tiles
from tests.required import needs

from .ragged import RaggedBatch, attention_by_definition, ragged_batch, relative_error

HAS_AMX = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "torch_must_not_serve"),
    needs("compiler", cpp_problem()),
    pytest.mark.skipif(not HAS_AMX, reason="this CPU has no matrix unit (AMX)"),
]

ROOT = Path(__file__).resolve().parents[2]
BOUND = 1e-2
# (head_dim, KV heads, query heads that share one): each is compiled, so there are few.
SHAPES = [(64, 3, 3), (32, 2, 1), (48, 1, 16), (80, 1, 5), (96, 2, 4), (128, 2, 8), (256, 1, 16),
          (40, 3, 2)]  # fmt: skip
TOKENS = (2, 3, 15, 16, 17, 31, 32, 33, 47, 64, 65)  # tiles of queries hold 32 or 16
PREFIXES = (0, 1, 15, KEYS - 33, KEYS - 17, KEYS - 2, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS - 16)


@pytest.fixture
def torch_must_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not inside `backend="cpp"`; compared with as a backend of its own, it may."""

    def fail(*_: object) -> None:
        raise AssertionError("torch's attention served a chunk")

    monkeypatch.setattr(attention_cpp, "plan_chunks", fail)


def make_batch(lengths: list[tuple[int, int]], seed: int, **changes: int) -> RaggedBatch:
    """(tokens, tokens before) of each sequence."""
    shape = {"num_kv_heads": 3, "group_size": 3, "head_dim": 64, "block_size": 16, **changes}
    return ragged_batch(lengths, dtype=torch.bfloat16, seed=seed, **shape)


def attend(batch: RaggedBatch, backend: str = "cpp") -> Tensor:
    return paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale, backend=backend
    )


def set_keys(batch: RaggedBatch, sequence: int, keys: Tensor) -> None:
    """`keys` [length, KV heads, head_dim] become those of a sequence, also in the cache."""
    table, size = torch.tensor(batch.block_tables[sequence]), batch.block_size
    position = torch.arange(len(keys))
    batch.k_cache[table[position // size], position % size] = keys
    batch.keys[sequence] = keys


def dense(batch: RaggedBatch) -> Tensor:
    """`attention_by_definition` of finite numbers, all rows of a sequence at once."""
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    group_size = batch.q.shape[1] // batch.k_cache.shape[2]
    for sequence, length in enumerate(batch.seq_lens):
        rows = slice(batch.cu_seqlens_q[sequence], batch.cu_seqlens_q[sequence + 1])
        k, v = (
            x[sequence].double().repeat_interleave(group_size, 1)
            for x in (batch.keys, batch.values)
        )
        scores = torch.einsum("thd,shd->hts", batch.q[rows].double(), k) * batch.scale
        positions = torch.arange(length - (rows.stop - rows.start), length)
        hidden = torch.arange(length) > positions[:, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
        out[rows] = torch.einsum("hts,shd->thd", weights, v)
    return out


def check_rows(out: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    """Each head of each row by itself: one that is wrong would be lost among many."""
    errors = (out.double() - expected).norm(dim=2) / expected.norm(dim=2)
    assert (errors < bound).all(), (errors >= bound).nonzero().tolist()[:9]


def check(batch: RaggedBatch) -> None:
    """Against float64, and against what torch makes of the same bfloat16 numbers."""
    out, expected = attend(batch), dense(batch)
    assert out.dtype == torch.bfloat16
    check_rows(out, expected)
    of_torch = relative_error(attend(batch, "torch"), expected)
    assert relative_error(out, expected) < max(1.2 * of_torch, 1e-3)


# Which keys count ---------------------------------------------------------------------------------


@st.composite
def batches(draw, shape: tuple[int, int, int]) -> RaggedBatch:
    head_dim, num_kv_heads, group_size = shape
    prefix = st.one_of(st.sampled_from(PREFIXES), st.integers(0, 700))
    chunk = st.tuples(st.one_of(st.sampled_from(TOKENS), st.integers(2, 80)), prefix)
    decode = st.tuples(st.just(1), prefix)
    lengths = [draw(chunk), *draw(st.lists(st.one_of(chunk, chunk, decode), max_size=3))]
    return make_batch(
        draw(st.permutations(lengths)),
        seed=draw(st.integers(0, 2**32 - 1)),
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=draw(st.sampled_from([1, 5, 16, 64, 256])),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drawn_chunks_and_decodes_in_one_step(shape):
    settings_ = settings(max_examples=8, deadline=None, database=None)
    settings_(given(batches(shape))(check))()


@pytest.mark.parametrize("group_size", [1, 3, 16])
def test_every_edge_of_a_tile(group_size, seed):
    """Not only the drawn ones: all of them in one step, with decodes between them."""
    lengths = [pair for n in TOKENS for prefix in PREFIXES for pair in ((n, prefix), (1, n))]
    check(make_batch(lengths, seed, group_size=group_size, num_kv_heads=1, head_dim=32))


@pytest.mark.parametrize("lengths", [(246, 2750), (48, 5000), (700, 0)])
def test_long_chunks_and_long_prefixes(lengths, seed):
    check(make_batch([lengths], seed))


RISE = 64.0  # of the scores from one token to the next: the weight of the one is 0 beside the other


@pytest.mark.parametrize("group_size", [3, 16])
@pytest.mark.parametrize("lengths", [(100, 0), (65, KEYS - 32), (40, 3 * KEYS - 20)])
@pytest.mark.parametrize("newest_wins", [True, False])
def test_the_last_visible_key_may_outweigh_all_others_or_the_first(
    newest_wins, lengths, group_size, seed
):
    """Row for row the value of one token, exactly: not one key more or less may be seen."""
    batch = make_batch([lengths], seed, num_kv_heads=2, group_size=group_size)
    position = torch.arange(sum(lengths))
    keys = torch.zeros_like(batch.keys[0])
    keys[:, :, 5], keys[:, :, 6] = position[:, None] // 128, position[:, None] % 128  # both exact
    set_keys(batch, 0, keys)
    rise = RISE / batch.scale * (1 if newest_wins else -1)
    batch.q[:, :, 5], batch.q[:, :, 6] = 128 * rise, rise
    values = batch.values[0].repeat_interleave(group_size, dim=1)
    expected = values[lengths[1] :] if newest_wins else values[:1].expand(lengths[0], -1, -1)
    assert torch.equal(attend(batch), expected)


def test_what_lies_in_unused_slots_is_never_read(seed):
    """NaN in all the other tests; here numbers that would count."""
    batch = make_batch([(33, 250), (2, 0), (20, 7)], seed)
    out = attend(batch)
    for cache in (batch.k_cache, batch.v_cache):
        assert cache.isnan().any()
        cache.nan_to_num_(nan=3e38)
    assert torch.equal(attend(batch), out)


def test_queries_may_be_a_slice_of_a_fused_projection(seed):
    batch = make_batch([(45, 230), (1, 3), (2, KEYS)], seed)
    fused = torch.full((48, 15 * 64), torch.nan, dtype=torch.bfloat16)
    fused[:, 64 : 10 * 64] = batch.q.flatten(1)
    expected = attend(batch)
    batch.q = fused[:, 64 : 10 * 64].view(48, 9, 64)
    assert not batch.q.is_contiguous()
    assert torch.equal(attend(batch), expected)


# Scores of any size -------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [1e4, -1e4, 1e10, -1e30])
def test_huge_equal_scores_give_the_mean(score, seed):
    batch = make_batch([(70, KEYS), (40, 0)], seed)
    batch.q.fill_(1.0)
    for sequence, keys in enumerate(batch.keys):
        set_keys(batch, sequence, torch.full_like(keys, score / 64 / batch.scale))
    check_rows(attend(batch), dense(batch))


@pytest.mark.parametrize("size", [1e-3, 1.0, 10.0, 100.0])
def test_scores_that_spread_widely(size, seed):
    """Up to ten thousands of either sign; the largest is in any of the tiles."""
    batch = make_batch([(50, 3 * KEYS - 20)], seed)
    batch.q *= size
    batch.keys[0] *= size
    set_keys(batch, 0, batch.keys[0])
    check_rows(attend(batch), dense(batch))


@pytest.mark.parametrize("hidden", [3, KEYS + 40])
def test_keys_of_minus_infinity_do_not_count(hidden, seed):
    """More of them than a tile has: the first row that sees another key has an answer."""
    batch = make_batch([(100, KEYS - 20)], seed)
    batch.keys[0][:hidden, :, 9] = torch.inf
    set_keys(batch, 0, batch.keys[0])
    batch.q[:, :, 9] = -1.0
    assert all_are_finite_alike(batch) == (hidden < KEYS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["q", "keys"])
def test_what_is_not_finite_spoils_the_rows_that_see_it(bad, place, seed):
    batch = make_batch([(30, 5), (70, KEYS - 30), (1, 9)], seed)
    if place == "q":
        batch.q[60, 4, 9] = bad
    else:
        keys = batch.keys[1]
        keys[KEYS - 30 + 20, 1, 9] = bad  # a token of the chunk itself: 20 rows do not see it
        set_keys(batch, 1, keys)
    assert not all_are_finite_alike(batch)


def all_are_finite_alike(batch: RaggedBatch) -> bool:
    out, expected = attend(batch), attention_by_definition(batch)
    assert torch.equal(out.isfinite(), expected.isfinite())
    rows = expected.isfinite().all(dim=2)
    assert relative_error(out[rows], expected[rows]) < BOUND
    return bool(expected.isfinite().all())


def test_values_that_are_not_finite_spoil_their_own_sequence_and_head_only(seed):
    batch = make_batch([(30, 5), (70, 20), (1, 9)], seed)
    expected = attend(batch)
    block = batch.block_tables[1][3]
    batch.v_cache[block, 2, 1, 9] = torch.nan
    out = attend(batch)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[30:100, 3:6, 9] = True  # also rows that do not see it may be: 0 times NaN is NaN
    assert out[99, 3:6, 9].isnan().all()
    assert torch.equal(out[~spoilt], expected[~spoilt])


POWERS = """
#include "chunk_attention.cpp"
extern "C" void powers(const float* x, float* out, long count) {
    for (long i = 0; i < count; ++i) out[i] = power_of_2(x[i]);
}
"""


def test_powers_of_2(tmp_path):
    (tmp_path / "powers.cpp").write_text(POWERS)
    shapes = ["-DHEAD_DIM=64", "-DKV_HEADS=1", "-DGROUP=1", f"-DKEYS={KEYS}", f"-I{_cpp.SOURCES}"]
    command = ["g++", *_cpp.COMPILE, *shapes, "powers.cpp", "-shared", *_cpp.LINK, "-o", "p.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    edges = torch.tensor([0.0, -0.5, -1.0, -125.999, -126.6, -127.0, -1e4, -3e38, -torch.inf])
    x = torch.cat((edges, torch.linspace(-126.4, 0, 1_000_001)))
    out = torch.empty_like(x)
    library = ctypes.CDLL(str(tmp_path / "p.so"))
    library.powers(*map(ctypes.c_void_p, (x.data_ptr(), out.data_ptr())), ctypes.c_long(len(x)))
    expected = x.double().exp2()
    counted = x > -126.5
    assert ((out.double() - expected).abs() / expected)[counted].max() < 4e-6
    assert torch.equal(out[~counted], torch.zeros_like(out[~counted]))
    assert out[0] == 1


# Threads ------------------------------------------------------------------------------------------


def step(seed: int) -> list[Tensor]:
    """Attention, and then a product that torch computes on the same matrix units."""
    batch = make_batch([(70, 300), (1, 20), (33, 0), (2, 600)], seed)
    out = attend(batch)
    flat = out.flatten(1)
    return [out, flat @ flat.T, attend(batch)]


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing(seed, threads_as_before):
    runs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out, product, again = step(seed)
        assert torch.equal(out, again)
        wide = out.flatten(1).double()
        assert relative_error(product, wide @ wide.T) < BOUND
        runs.append(out)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_chunks_can_be_attended_to_in_any_thread_and_in_several_at_once(seed):
    expected, found = step(seed), []
    threads = [threading.Thread(target=lambda: found.append(step(seed))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for run in found:
        assert all(torch.equal(a, b) for a, b in zip(expected, run, strict=True))


LARGEST = """
import threading
import torch
from tests.kernels.test_chunk_attention import attend, check_rows, dense, make_batch

torch.set_num_threads(3)
batch = make_batch([(40, 300)], 0, num_kv_heads=2, group_size=16, head_dim=256)
found = []
threading.stack_size(1 << 20)
thread = threading.Thread(target=lambda: found.append(attend(batch)))
thread.start()
thread.join()
check_rows(found[0], dense(batch))
"""


def test_the_largest_tiles_fit_a_small_stack():
    assert has_tiles(torch.bfloat16, HEAD_DIM=256, KV_HEADS=2, GROUP=16)
    environment = {**os.environ, "OMP_STACKSIZE": "1M"}
    subprocess.run([sys.executable, "-c", LARGEST], cwd=ROOT, env=environment, check=True)
