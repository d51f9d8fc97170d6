"""Operations and bytes, counted against a brute-force count of the same transformer."""

import pytest

from minichunk.sim.counter import StepCounter, load_of
from minichunk.sim.shapes import MODELS, get_shape
from tests.sim.plans import make_plan


def random_plan(rng):
    chunks = [(rng.randrange(0, 300), rng.randrange(1, 80)) for _ in range(rng.randrange(4))]
    decodes = [rng.randrange(1, 400) for _ in range(rng.randrange(1, 6))]
    return make_plan(chunks, decodes)


def brute_force_flops(shape, plan):
    """Two per multiply-add: each token through each matrix, each query with each visible key."""
    total = 0
    for chunk in plan.chunks:
        for position in range(chunk.start, chunk.stop):
            for _, inputs, outputs in shape.matrices:
                total += shape.num_layers * 2 * inputs * outputs
            visible = position + 1
            total += shape.num_layers * shape.num_heads * 2 * (2 * visible * shape.head_dim)
        if chunk.sampling is not None:
            total += 2 * shape.hidden_size * shape.vocab_size
    return total


def test_flops_equal_a_count_token_by_token(rng):
    for slug in rng.sample(list(MODELS), 5):
        shape, plan = get_shape(slug), random_plan(rng)
        counter = StepCounter(slug)
        parts = counter.count(load_of(plan.chunks))
        counted = sum(part.flops for part in parts if part.name != "elementwise")
        assert counted == pytest.approx(brute_force_flops(shape, plan), rel=1e-12)
        assert counter(plan).flops == pytest.approx(sum(part.flops for part in parts))


def test_cutting_a_prompt_adds_no_operations_but_rereads_its_keys(rng):
    counter, prompt = StepCounter("llama-3-8b"), rng.randrange(200, 2000)
    chunk = rng.randrange(1, prompt)
    whole = counter.count(load_of(make_plan([(0, prompt)]).chunks))
    pieces = [
        counter.count(load_of(make_plan([(at, min(chunk, prompt - at))], prompt=prompt).chunks))
        for at in range(0, prompt, chunk)
    ]
    for place, part in enumerate(whole):
        assert sum(piece[place].flops for piece in pieces) == pytest.approx(part.flops)
    attention = [part.name for part in whole].index("prefill_attention")
    assert sum(piece[attention].bytes for piece in pieces) > whole[attention].bytes


def test_logits_are_counted_for_sampling_rows_only():
    counter = StepCounter("llama-2-7b")
    unfinished = make_plan([(0, 500)], prompt=1000)
    finished = make_plan([(500, 500)], prompt=1000)
    names = [part.name for part in counter.count(load_of(finished.chunks))]
    head = names.index("lm_head")
    assert counter.count(load_of(unfinished.chunks))[head].flops == 0
    assert counter.count(load_of(finished.chunks))[head].flops == 2 * 4096 * 32000


def test_a_decode_step_reads_all_weights_and_the_whole_context():
    shape, contexts = get_shape("llama-3-8b"), [1000, 2000, 3000]
    moved = StepCounter("llama-3-8b")(make_plan(decodes=contexts)).bytes
    head = 2 * shape.vocab_size * shape.hidden_size
    least = 2 * shape.linear_params + head + sum(contexts) * shape.kv_bytes_per_token
    assert least < moved < 1.02 * least


def test_decodes_that_ride_on_a_chunk_read_the_weights_once():
    counter, shape = StepCounter("llama-2-7b"), get_shape("llama-2-7b")
    chunk, decodes = make_plan([(0, 512)]), make_plan(decodes=[700] * 10)
    mixed = make_plan([(0, 512)], [700] * 10)
    saved = counter(chunk).bytes + counter(decodes).bytes - counter(mixed).bytes
    assert saved == pytest.approx(2 * (shape.linear_params + 4096 * 32000))
    assert counter(mixed).flops == pytest.approx(counter(chunk).flops + counter(decodes).flops)


def test_a_model_in_float32_moves_twice_the_bytes(rng):
    plan = random_plan(rng)
    half, full = StepCounter("llama-3-8b")(plan), StepCounter("llama-3-8b", element_size=4)(plan)
    assert full.bytes == pytest.approx(2 * half.bytes)
    assert full.flops == half.flops
