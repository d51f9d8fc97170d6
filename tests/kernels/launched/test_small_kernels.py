"""RoPE, RMS norm, SwiGLU and sampling, against their float64 references."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minichunk.kernels._triton import jit, tl
from minichunk.kernels.rms_norm import rms_norm
from minichunk.kernels.rope import rope_and_cache
from minichunk.kernels.sampling import TILE, _gumbel_noise, greedy, gumbel_noise, gumbel_sample
from minichunk.kernels.swiglu import swiglu

from ..ragged import DEVICE, relative_error

BOUND = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
dtypes = st.sampled_from(sorted(BOUND, key=str))
random_seeds = st.integers(0, 2**32 - 1)
quickly = settings(max_examples=15, deadline=None, database=None)


@jit()
def noise_kernel(out_ptr, seed_ptr, position_ptr, first_counter, SIZE: tl.constexpr):
    noise = _gumbel_noise(tl.load(seed_ptr), tl.load(position_ptr), first_counter, SIZE)
    tl.store(out_ptr + tl.arange(0, SIZE), noise)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


@quickly
@given(
    seed=random_seeds,
    dtype=dtypes,
    num_tokens=st.integers(1, 5),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group_size=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128]),
    has_norm=st.booleans(),
)
def test_rope_and_cache(seed, dtype, num_tokens, num_kv_heads, group_size, head_dim, has_norm):
    sizes = [num_kv_heads * group_size * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    fused = normal(seed, num_tokens, sum(sizes), dtype=dtype)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in fused.split(sizes, dim=1))
    generator = torch.Generator().manual_seed(seed)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 1000
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    slots = torch.randperm(16, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.3] = -1
    slots = slots.to(DEVICE)
    norms = [normal(seed + i, head_dim, dtype=dtype) if has_norm else None for i in (1, 2)]
    cache = torch.full((4, 4, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    caches = [cache, cache.clone()]
    expected_caches = wide(*caches)

    out = rope_and_cache(q, k, v, cos, sin, *caches, slots, *norms, backend="triton")
    expected = rope_and_cache(*wide(q, k, v, cos, sin), *expected_caches, slots, *wide(*norms))

    assert relative_error(out, expected) < BOUND[dtype]
    written = slots[slots >= 0]
    for cache, wanted in zip(caches, expected_caches, strict=True):
        cache, wanted = cache.flatten(0, 1), wanted.flatten(0, 1)
        assert relative_error(cache[written], wanted[written]) < BOUND[dtype]
        assert torch.equal(cache.isnan(), wanted.isnan())  # and no other slot was touched


@quickly
@given(
    seed=random_seeds,
    dtype=dtypes,
    num_tokens=st.integers(1, 4),
    hidden_size=st.sampled_from([8, 576, 1000, 1024]),
    has_residual=st.booleans(),
)
def test_rms_norm(seed, dtype, num_tokens, hidden_size, has_residual):
    x = normal(seed, num_tokens, 2 * hidden_size, dtype=dtype)[:, :hidden_size]  # strided rows
    residual = normal(seed + 1, num_tokens, hidden_size, dtype=dtype) if has_residual else None
    weight = normal(seed + 2, hidden_size, dtype=dtype)
    out, total = rms_norm(x, weight, 1e-5, residual, backend="triton")
    expected, expected_total = rms_norm(*wide(x, weight), 1e-5, *wide(residual))
    assert relative_error(out, expected) < BOUND[dtype]
    assert relative_error(total, expected_total) < BOUND[dtype]


@quickly
@given(
    seed=random_seeds,
    dtype=dtypes,
    num_tokens=st.integers(1, 4),
    size=st.sampled_from([8, 2047, 2048, 3000]),
)
def test_swiglu(seed, dtype, num_tokens, size):
    gate_up = normal(seed, num_tokens, 2 * size, dtype=dtype) * 4
    out = swiglu(gate_up, backend="triton")
    assert relative_error(out, swiglu(gate_up.double())) < BOUND[dtype]


@quickly
@given(
    seed=random_seeds,
    dtype=dtypes,
    vocab_size=st.sampled_from([1, 5, TILE - 1, TILE, TILE + 1, 3 * TILE + 7]),
)
def test_greedy_takes_the_lowest_of_equal_maxima(seed, dtype, vocab_size):
    logits = normal(seed, 3, vocab_size).round().to(dtype)  # rounded: there are ties
    assert torch.equal(greedy(logits, backend="triton"), greedy(logits.double()))


@quickly
@given(
    seed=random_seeds,
    dtype=dtypes,
    vocab_size=st.sampled_from([5, TILE, 2 * TILE + 7]),
    request_seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
)
def test_a_seeded_draw_is_the_same_on_both_backends(
    seed, dtype, vocab_size, request_seed, position
):
    logits = normal(seed, 4, vocab_size, dtype=dtype) * 3
    logits[:, 1::5] = -torch.inf
    temperatures = torch.tensor([0.0, 0.3, 1.0, 7.0])
    numbers = torch.tensor([request_seed] * 4), torch.tensor([position] * 4)
    arguments = [x.to(DEVICE) for x in (temperatures, *numbers)]
    drawn = gumbel_sample(logits, *arguments, backend="triton")
    assert torch.equal(drawn, gumbel_sample(logits, *arguments))


@quickly
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    tile=st.integers(0, 60),
)
def test_the_noise_itself_is_the_same_on_both_backends(seed, position, tile):
    size = 256
    out = torch.empty(size, device=DEVICE)
    seeds = torch.tensor([seed], device=DEVICE)
    positions = torch.tensor([position], device=DEVICE)
    noise_kernel[(1,)](out, seeds, positions, tile * (size // 4), SIZE=size)
    expected = gumbel_noise(seeds, positions, (tile + 1) * size)[0, -size:]
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
