"""The C++ kernels against their float64 references: what a compiler with our flags made of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minichunk.kernels._cpp import cpp_problem
from minichunk.kernels.attention import AttentionMetadata, paged_attention
from minichunk.kernels.attention_cpp import SPLIT
from minichunk.kernels.rms_norm import rms_norm
from minichunk.kernels.rope import rope_and_cache
from minichunk.kernels.swiglu import swiglu
from tests.required import needs

from .ragged import RaggedBatch, attention_by_definition, ragged_batch, relative_error

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    needs("compiler", cpp_problem()),
]

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# (head_dim, KV heads, query heads that share one, dtype): each is compiled, so there are few.
SHAPES = [
    (64, 3, 3, torch.float32),
    (64, 3, 3, torch.bfloat16),
    (128, 8, 4, torch.bfloat16),
    (32, 2, 1, torch.float32),
    (80, 1, 3, torch.bfloat16),
    (96, 2, 4, torch.float32),
    (256, 1, 8, torch.bfloat16),
    (48, 1, 16, torch.float32),
    (40, 5, 1, torch.bfloat16),
]
LONG = 3000
random_seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(BOUND, key=str))


def quickly(max_examples: int) -> settings:
    return settings(max_examples=max_examples, deadline=None, database=None)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


# Attention ----------------------------------------------------------------------------------------


def lengths_near(block_size: int) -> st.SearchStrategy[int]:
    """Of contexts: where blocks and splits begin and end, and anything between."""
    edges = [block_size, 2 * block_size, SPLIT, 2 * SPLIT]
    near = [1, *(edge + offset for edge in edges for offset in (-1, 0, 1))]
    return st.one_of(st.sampled_from([n for n in near if n > 0]), st.integers(1, 700))


@st.composite
def batches(draw, shape: tuple[int, int, int, torch.dtype], longest: int = 0) -> RaggedBatch:
    """Decodes and, unless `longest` asks for a decode of so many tokens, chunks of prompts."""
    block_size = draw(st.sampled_from([1, 5, 16, 64]))
    decode = lengths_near(block_size).map(lambda length: (1, length - 1))
    chunk = st.tuples(st.integers(2, 40), st.one_of(st.just(0), lengths_near(block_size)))
    sequence = decode if longest else st.one_of(decode, decode, chunk)
    lengths = draw(st.lists(sequence, min_size=1, max_size=5))
    if longest:
        lengths.insert(draw(st.integers(0, len(lengths))), (1, longest - 1))
    head_dim, num_kv_heads, group_size, dtype = shape
    return ragged_batch(
        lengths,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=draw(random_seeds),
    )


def attend(batch: RaggedBatch, backend: str = "cpp") -> Tensor:
    return paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.metadata(), batch.scale, backend=backend
    )


def small_batch(lengths: list[tuple[int, int]], seed: int, **changes: int) -> RaggedBatch:
    shape = {"num_kv_heads": 3, "group_size": 3, "head_dim": 64, "block_size": 16, **changes}
    return ragged_batch(lengths, dtype=torch.float32, seed=seed, **shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_decodes_in_one_step(shape):
    @quickly(8)
    @given(batches(shape))
    def check(batch: RaggedBatch) -> None:
        out = attend(batch)
        assert out.dtype == batch.q.dtype
        assert relative_error(out, attention_by_definition(batch)) < BOUND[batch.q.dtype]

    check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_alone_one_of_them_long(shape):
    @quickly(2)
    @given(batches(shape, longest=LONG))
    def check(batch: RaggedBatch) -> None:
        assert relative_error(attend(batch), attention_by_definition(batch)) < BOUND[batch.q.dtype]

    check()


def test_each_token_counts_whatever_the_length(seed):
    """Every length around the edges, not only the drawn ones; a token left out would show."""
    lengths = [n for edge in (16, SPLIT, 2 * SPLIT) for n in (edge - 1, edge, edge + 1)]
    batch = small_batch([(1, length - 1) for length in (1, 2, *lengths)], seed)
    out, expected = attend(batch), attention_by_definition(batch)
    for row, length in enumerate(batch.seq_lens):
        assert relative_error(out[row], expected[row]) < 1e-5, length


@pytest.mark.parametrize("score", [1e4, -1e4])
def test_huge_scores_do_not_overflow(score, seed):
    """Many equal keys, each with a score far outside the range of exp in float32."""
    batch = small_batch([(1, 0), (4, 60), (1, 2 * SPLIT + 3)], seed)
    batch.q.fill_(1.0)
    batch.k_cache.fill_(score / 64 / batch.scale)
    batch.keys = [torch.full_like(k, score / 64 / batch.scale) for k in batch.keys]
    assert relative_error(attend(batch), attention_by_definition(batch)) < 1e-5


@pytest.mark.parametrize("position", [7, SPLIT + 7])
def test_one_key_may_outweigh_all_others(position, seed):
    """The others' weights are exactly 0, in its own split and in the other."""
    batch = small_batch([(1, SPLIT + 40)], seed)
    block, offset = batch.block_tables[0][position // 16], position % 16
    batch.q.fill_(1.0)
    batch.k_cache.fill_(-1e3)
    batch.k_cache[block, offset] = 1e3
    batch.v_cache *= 1e34
    batch.v_cache[block, offset] = value = batch.values[0][position]
    assert torch.equal(attend(batch)[0], value.repeat_interleave(3, dim=0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["q", "keys", "values"])
@pytest.mark.parametrize("context", [20, SPLIT + 20])
def test_what_is_not_finite_spoils_its_own_heads_only(bad, place, context, seed):
    batch = small_batch([(1, 30), (1, context), (3, 5)], seed)
    if place == "q":
        batch.q[1, 4, 9] = bad
    else:
        cache = batch.k_cache if place == "keys" else batch.v_cache
        block, head = batch.block_tables[1][1], 1
        cache[block, 2, head, 9] = bad
        getattr(batch, place)[1][16 + 2, head, 9] = bad
        batch.q[1, 3:5, 9] = torch.tensor([1.0, -1.0])  # an infinite score of either sign
    out, expected = attend(batch), attention_by_definition(batch)
    assert not expected.isfinite().all()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert relative_error(out[finite], expected[finite]) < 1e-5


def test_padding_rows_give_zero(seed):
    batch = small_batch([(1, 20)], seed)
    metadata = AttentionMetadata.build(
        [0, 1, 2, 3], [0, 21, 0], [[], batch.block_tables[0], []], 16
    )
    q = batch.q.expand(3, -1, -1).contiguous()
    out = paged_attention(q, batch.k_cache, batch.v_cache, metadata, batch.scale, backend="cpp")
    assert relative_error(out[1:2], attention_by_definition(batch)) < 1e-5
    assert torch.equal(out[::2], torch.zeros_like(out[::2]))


def test_queries_may_be_a_slice_of_a_fused_projection(seed):
    batch = small_batch([(5, 9), (1, 3), (1, SPLIT)], seed)
    fused = normal(seed + 1, 7, 15 * 64)
    fused[:, : 9 * 64] = batch.q.flatten(1)
    batch.q = fused[:, : 9 * 64].view(7, 9, 64)
    assert relative_error(attend(batch), attention_by_definition(batch)) < 1e-5


def test_layouts_that_the_attention_kernel_cannot_read_are_refused(seed):
    batch = small_batch([(1, 3)], seed)
    k_cache = batch.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    q = batch.q.transpose(1, 2).contiguous().transpose(1, 2)
    for changed, words in (
        ((q, batch.k_cache), "token of q must be"),
        ((batch.q, k_cache), "both caches must"),
    ):
        with pytest.raises(ValueError, match=words):
            paged_attention(*changed, batch.v_cache, batch.metadata(), 1.0, backend="cpp")


# The small operations -----------------------------------------------------------------------------


@quickly(30)
@given(
    seed=random_seeds,
    shape=st.sampled_from(SHAPES),
    num_tokens=st.sampled_from([1, 2, 5, 90]),
    block_size=st.sampled_from([1, 5, 16]),
    has_norm=st.booleans(),
    eps=st.sampled_from([1e-6, 1.0]),
    v_is_apart=st.booleans(),
)
def test_rope_and_cache(seed, shape, num_tokens, block_size, has_norm, eps, v_is_apart):
    head_dim, num_kv_heads, group_size, dtype = shape
    sizes = [num_kv_heads * group_size * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    fused = normal(seed, num_tokens, sum(sizes), dtype=dtype)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in fused.split(sizes, dim=1))
    v = v.clone() if v_is_apart else v
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 1000
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-100 // block_size)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.3] = -1
    norms = [normal(seed + i, head_dim, dtype=dtype) if has_norm else None for i in (1, 2)]
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    expected_caches = wide(*caches)

    out = rope_and_cache(q, k, v, cos, sin, *caches, slots, *norms, eps, backend="cpp")
    expected = rope_and_cache(*wide(q, k, v, cos, sin), *expected_caches, slots, *wide(*norms), eps)

    assert relative_error(out, expected) < BOUND[dtype]
    written = slots[slots >= 0]
    for cache, wanted in zip(caches, expected_caches, strict=True):
        cache, wanted = cache.flatten(0, 1), wanted.flatten(0, 1)
        assert relative_error(cache[written], wanted[written]) < BOUND[dtype]
        assert torch.equal(cache.isnan(), wanted.isnan())  # and no other slot was touched


def test_slots_may_be_integers_of_either_size(seed):
    x, table = normal(seed, 3, 2, 32), normal(seed, 3, 16)
    caches = [torch.zeros(2, 4, 2, 32) for _ in range(4)]
    slots = torch.tensor([6, -1, 1])
    rope_and_cache(x, x, x, table, table, *caches[:2], slots, backend="cpp")
    rope_and_cache(x, x, x, table, table, *caches[2:], slots.int(), backend="cpp")
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    assert caches[1].flatten(0, 1)[slots[[0, 2]]].equal(x[[0, 2]])


def test_layouts_that_the_small_kernels_cannot_read_are_refused(seed):
    x, table = normal(seed, 3, 2, 32), normal(seed, 3, 16)
    cache, slots = torch.zeros(2, 4, 2, 32), torch.arange(3)
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)
    turned = cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="each token of k must be contiguous"):
        rope_and_cache(x, apart, x, table, table, cache, cache, slots, backend="cpp")
    with pytest.raises(ValueError, match="blocks of both caches must be contiguous"):
        rope_and_cache(x, x, x, table, table, turned, cache, slots, backend="cpp")
    with pytest.raises(ValueError, match="cos and sin must be contiguous float32"):
        rope_and_cache(x, x, x, table.double(), table, cache, cache, slots, backend="cpp")
    columns = normal(seed, 8, 4).T
    with pytest.raises(ValueError, match="rows of x and residual must be contiguous"):
        rms_norm(columns, torch.ones(8), 1e-5, backend="cpp")
    with pytest.raises(ValueError, match="rows of gate_up must be contiguous"):
        swiglu(columns, backend="cpp")


@quickly(30)
@given(
    seed=random_seeds,
    dtype=dtypes,
    num_tokens=st.sampled_from([1, 2, 5, 70]),
    hidden_size=st.sampled_from([1, 8, 17, 576, 1000, 1024]),
    has_residual=st.booleans(),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e15]),
)
def test_rms_norm(seed, dtype, num_tokens, hidden_size, has_residual, size):
    x = (normal(seed, num_tokens, 2 * hidden_size, dtype=dtype) * size)[:, :hidden_size]
    residual = None
    if has_residual:  # strided rows, both
        residual = normal(seed + 1, num_tokens, hidden_size + 3, dtype=dtype)[:, :hidden_size]
    before = wide(x, residual)
    weight = normal(seed + 2, hidden_size, dtype=dtype)
    out, total = rms_norm(x, weight, 1e-5, residual, backend="cpp")
    _, expected_total = rms_norm(*wide(x, weight), 1e-5, *wide(residual))
    expected, _ = rms_norm(*wide(total, weight), 1e-5)  # of the sum as it was rounded
    assert out.dtype == total.dtype == dtype
    assert relative_error(out, expected) < BOUND[dtype]
    assert relative_error(total, expected_total) < BOUND[dtype]
    for tensor, copy in zip((x, residual), before, strict=True):
        assert tensor is None or torch.equal(tensor.double(), copy)  # no input is changed


@quickly(30)
@given(
    seed=random_seeds,
    dtype=dtypes,
    num_tokens=st.sampled_from([1, 2, 5, 70]),
    size=st.sampled_from([1, 8, 17, 1536, 2047]),
    scale=st.sampled_from([1e-20, 1.0, 4.0, 100.0]),
)
def test_swiglu(seed, dtype, num_tokens, size, scale):
    gate_up = normal(seed, num_tokens, 2 * size + 5, dtype=dtype)[:, : 2 * size]  # strided rows
    gate_up = gate_up.clone() if size == 8 else gate_up
    gate_up[:, :size] *= scale
    out = swiglu(gate_up, backend="cpp")
    assert out.dtype == dtype
    assert relative_error(out, swiglu(gate_up.double())) < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_swiglu_of_extreme_gates(dtype):
    """-x e^x falls to 0 and does not come back, x stays x, and what torch calls NaN is NaN."""
    sizes = [0.0, 1e-40, 1e-8, 1.0, 20.0, 85.0, 87.0, 88.0, 88.5, 89.0, 100.0, 1e4, 1e30, 3e38]
    gates = torch.tensor([*sizes, *(-x for x in sizes), torch.inf, -torch.inf, torch.nan])
    gate_up = torch.cat((gates, torch.full_like(gates, 3.0)))[None].to(dtype)
    out, expected = swiglu(gate_up, backend="cpp"), swiglu(gate_up)
    smallest = torch.finfo(torch.float32).tiny  # below it torch goes on in denormal numbers
    close = dict(rtol=1e-6, atol=1e3 * smallest) if dtype == torch.float32 else dict(rtol=0.01)
    assert torch.allclose(out, expected, equal_nan=True, **close)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_rms_norm_of_rows_that_torch_gives_up(dtype):
    rows = torch.ones(6, 40)
    rows[1], rows[2, 3], rows[3, 3], rows[4, :2], rows[5] = 1e30, torch.nan, torch.inf, 2e38, 0.0
    x, weight = rows.to(dtype), torch.full((40,), 2.0, dtype=dtype)
    for residual in (None, x):
        out, expected = (rms_norm(x, weight, 1e-5, residual, backend=b) for b in ("cpp", "torch"))
        for actual, wanted in zip(out, expected, strict=True):
            assert torch.allclose(actual, wanted, rtol=0.01, equal_nan=True)
    assert out[0][2].isnan().all()


def test_bfloat16_is_rounded_as_torch_rounds():
    """All bit patterns of bfloat16 halved and added to 1: ties, denormals, infinities, NaN."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns.view(64, -1)
    for other in (torch.ones_like(x), x / 256, x.flip(0)):
        _, total = rms_norm(x, torch.ones_like(x[0]), 1e-5, other, backend="cpp")
        assert torch.equal(total.isnan(), (x + other).isnan())
        known = ~total.isnan()
        assert torch.equal(total[known], (x + other)[known])


# All of them --------------------------------------------------------------------------------------


def everything(seed: int, num_tokens: int = 80) -> list[Tensor]:
    """The outputs of all kernels on sizes that are shared among threads."""
    batch = small_batch([(1, 900), (1, 30), (4, 8), (1, 5)], seed)
    x, table = normal(seed, num_tokens, 9, 64), normal(seed, num_tokens, 32)
    caches = [torch.zeros(10, 16, 9, 64) for _ in range(2)]
    q = rope_and_cache(x, x, x, table, table, *caches, torch.arange(num_tokens), backend="cpp")
    flat = x.flatten(1)
    return [
        attend(batch),
        q,
        *caches,
        *rms_norm(flat, flat[0], 1e-5, flat, backend="cpp"),
        swiglu(torch.cat((flat, flat), dim=1), backend="cpp"),
    ]


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing(seed, threads_as_before):
    runs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        runs.append(everything(seed))
    for several in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], several, strict=True))


def test_kernels_can_be_called_from_any_thread(seed):
    expected, found = everything(seed), []
    threads = [threading.Thread(target=lambda: found.append(everything(seed))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for run in found:
        assert all(torch.equal(a, b) for a, b in zip(expected, run, strict=True))


def test_no_tokens_give_empty_outputs():
    q, cache = torch.empty(0, 6, 32), torch.zeros(1, 16, 2, 32)
    k, table = torch.empty(0, 2, 32), torch.empty(0, 16)
    metadata = AttentionMetadata.build([0], [], [], 16)
    no_slots = torch.empty(0, dtype=torch.int64)
    assert paged_attention(q, cache, cache, metadata, 1.0, backend="cpp").shape == (0, 6, 32)
    out = rope_and_cache(q, k, k, table, table, cache, cache.clone(), no_slots, backend="cpp")
    assert out.shape == (0, 6, 32)
    assert [x.shape for x in rms_norm(table, table.new_ones(16), 1e-5, backend="cpp")] == [
        (0, 16), (0, 16),
    ]  # fmt: skip
    assert swiglu(table, backend="cpp").shape == (0, 8)
    assert not cache.any()
