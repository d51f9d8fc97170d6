"""The torch references of the small operations, against independent statements of the same."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minichunk.kernels.rms_norm import rms_norm
from minichunk.kernels.rope import rope_and_cache
from minichunk.kernels.sampling import greedy, gumbel_noise, gumbel_sample, philox_bits
from minichunk.kernels.swiglu import swiglu


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def test_rms_norm_equals_torchs_own(generator):
    x = torch.randn(5, 48, dtype=torch.float64, generator=generator)
    residual = torch.randn(5, 48, dtype=torch.float64, generator=generator)
    weight = torch.randn(48, dtype=torch.float64, generator=generator)
    out, new_residual = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(new_residual, x + residual)
    expected = torch.nn.functional.rms_norm(x + residual, (48,), weight, 1e-5)
    assert torch.allclose(out, expected, rtol=1e-12)
    alone, unchanged = rms_norm(x, weight, 1e-5)
    assert torch.allclose(alone, torch.nn.functional.rms_norm(x, (48,), weight, 1e-5), rtol=1e-12)
    assert torch.equal(unchanged, x)


def test_rope_is_a_rotation_in_the_complex_plane(generator):
    x = torch.randn(6, 3, 16, dtype=torch.float64, generator=generator)
    angles = torch.rand(6, 8, dtype=torch.float64, generator=generator) * 100
    cache = torch.zeros(2, 4, 3, 16, dtype=torch.float64)
    slots = torch.randperm(8, generator=generator)[:6]
    q = rope_and_cache(x, x, x, angles.cos(), angles.sin(), cache, cache.clone(), slots)
    pairs = torch.complex(x[..., :8], x[..., 8:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert torch.allclose(q, expected)
    assert torch.allclose(cache.view(8, 3, 16)[slots], expected)


def test_scores_depend_on_the_distance_of_positions_only(generator):
    """The point of rotary embedding: q at position m and k at n meet in a function of m - n."""
    q, k = (torch.randn(1, 1, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    frequencies = 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)

    def score(q_position: int, k_position: int) -> float:
        cache = torch.zeros(2, 1, 1, 1, 32, dtype=torch.float64)
        slot = torch.tensor([0])
        for x, position, target in ((q, q_position, 0), (k, k_position, 1)):
            angles = position * frequencies[None]
            rope_and_cache(x, x, x, angles.cos(), angles.sin(), cache[target], cache[0] * 0, slot)
        return float((cache[0] * cache[1]).sum())

    assert score(20, 13) == pytest.approx(score(107, 100), rel=1e-10)
    assert score(20, 13) != pytest.approx(score(20, 14), rel=1e-3)


def test_slot_minus_one_writes_nothing():
    x = torch.ones(2, 1, 4)
    table = torch.ones(2, 2)
    k_cache, v_cache = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    rope_and_cache(x, x, x, table, table * 0, k_cache, v_cache, torch.tensor([-1, 2]))
    for cache in (k_cache, v_cache):
        assert cache.view(4, 4).sum(dim=1).tolist() == [0, 0, 4, 0]


def test_qk_norm_comes_before_the_rotation(generator):
    q = torch.randn(3, 2, 8, dtype=torch.float64, generator=generator)
    weight = torch.rand(8, dtype=torch.float64, generator=generator)
    angles = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    caches = [torch.zeros(1, 4, 2, 8, dtype=torch.float64) for _ in range(4)]
    slots, table = torch.arange(3), (angles.cos(), angles.sin())
    fused = rope_and_cache(q, q, q, *table, *caches[:2], slots, weight, weight, 1e-6)
    normed = torch.nn.functional.rms_norm(q, (8,), weight, 1e-6)
    apart = rope_and_cache(normed, normed, q, *table, *caches[2:], slots)
    assert torch.allclose(fused, apart)
    assert torch.allclose(caches[0], caches[2])


def test_swiglu_gates_the_second_half_by_the_first():
    gate_up = torch.tensor([[0.0, 1.0, 5.0, 3.0]], dtype=torch.float64)
    assert swiglu(gate_up)[0].tolist() == pytest.approx([0.0, 3.0 / (1 + math.exp(-1.0))])


def test_philox_gives_the_published_known_answers():
    """Random123's kat_vectors for philox4x32-10, restated in our (seed, position, token id)."""
    zeros = philox_bits(torch.tensor([0]), torch.tensor([0]), 4)
    assert [hex(word) for word in zeros[0].tolist()] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_noise_is_a_pure_function_of_seed_and_position(generator):
    seeds = torch.randint(-(2**63), 2**63 - 1, (7,), generator=generator)
    positions = torch.randint(0, 10**6, (7,), generator=generator)
    together = gumbel_noise(seeds, positions, 1003)
    order = torch.randperm(7, generator=generator)
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 1003), together[order])
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 900)[0], together[2, :900])
    assert not torch.equal(gumbel_noise(seeds + 1, positions, 1003), together)
    assert not torch.equal(gumbel_noise(seeds, positions + 1, 1003), together)


def test_noise_has_mean_and_variance_of_the_gumbel_distribution(generator):
    seeds = torch.randint(0, 2**62, (200,), generator=generator)
    noise = gumbel_noise(seeds, torch.arange(200), 5000).double()
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.006)  # Euler's constant; 5 sigma
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_tokens_come_as_often_as_softmax_says(generator):
    logits = torch.randn(6, generator=generator) * 2
    temperature, draws = 0.7, 40_000
    seed = int(torch.randint(0, 2**62, (), generator=generator))
    tokens = gumbel_sample(
        logits.expand(draws, -1),
        torch.full((draws,), temperature),
        torch.full((draws,), seed),
        torch.arange(draws),
    )
    expected = (logits / temperature).softmax(dim=0) * draws
    chi_square = float(((torch.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum())
    assert chi_square < 35  # 5 degrees of freedom: exceeded once in 700,000 runs


def test_temperature_zero_is_greedy_and_minus_infinity_never_comes(generator):
    logits = torch.randn(64, 50, generator=generator)
    seeds = torch.randint(0, 2**62, (64,), generator=generator)
    cold = gumbel_sample(logits, torch.zeros(64), seeds, torch.arange(64))
    assert torch.equal(cold, greedy(logits))
    logits[:, 1:] = -torch.inf
    hot = gumbel_sample(logits, torch.full((64,), 1e6), seeds, torch.arange(64))
    assert torch.equal(hot, torch.zeros(64, dtype=torch.int64))


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        ValueError, match="'cuda' is not an implementation; use 'torch', 'cpp' or 'triton'"
    ):
        swiglu(torch.zeros(1, 4), backend="cuda")
