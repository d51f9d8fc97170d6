"""Seconds: against measurements, against physics, and against the course's scene."""

import statistics
import time

import pytest

from minichunk.sim.calibrate import predict
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import load_of
from minichunk.sim.efficiency import AMPERE, HOPPER
from minichunk.sim.executor import SimulatedExecutor
from minichunk.sim.hardware import GPU, GPUS
from minichunk.sim.shapes import MODELS
from tests.sim.measured_rows import attention_rows, linear_rows
from tests.sim.plans import make_plan


def errors(rows, efficiency):
    return sorted(abs(predict(row, efficiency) / row.seconds - 1) for row in rows)


@pytest.mark.parametrize(
    ("gpu", "efficiency", "limit"),
    [("a100-80g-pcie", AMPERE, 0.06), ("h100-sxm", HOPPER, 0.08)],
)
def test_linear_layers_agree_with_measurements(gpu, efficiency, limit):
    found = errors([row for row in linear_rows(gpu) if row.part == "linear"], efficiency)
    assert len(found) >= 20
    assert statistics.median(found) <= limit
    assert found[int(0.9 * len(found))] <= 0.20


@pytest.mark.parametrize("part", ["prefill_attention", "decode_attention"])
def test_attention_agrees_with_measurements(part):
    found = errors([row for row in attention_rows() if row.part == part], AMPERE)
    assert len(found) >= 25
    assert statistics.median(found) <= 0.15


def test_small_kernels_agree_roughly():
    rows = [row for row in linear_rows("a100-80g-pcie") if row.part == "elementwise"]
    assert statistics.median(errors(rows, AMPERE)) <= 0.20


def random_model(rng):
    while True:
        slug, gpu, split = rng.choice(list(MODELS)), rng.choice(list(GPUS)), rng.choice([1, 2, 4])
        if MODELS[slug].num_heads % split == 0:
            return CostModel(slug, gpu, tensor_parallel=split)


def test_no_step_beats_the_roofline(rng):
    for _ in range(30):
        model = random_model(rng)
        chunks = [(rng.randrange(4000), rng.randrange(1, 3000)) for _ in range(rng.randrange(3))]
        plan = make_plan(chunks, [rng.randrange(1, 5000) for _ in range(rng.randrange(1, 40))])
        step = model.step(plan)
        assert 0 < step.compute_utilisation < 1
        assert 0 < step.bandwidth_utilisation < 1
        seconds, cost = model.cost(plan)
        assert seconds == pytest.approx(step.seconds)
        assert (cost.flops, cost.bytes) == pytest.approx((step.flops, step.bytes))


def test_more_work_never_takes_less_time(rng):
    for _ in range(30):
        model = random_model(rng)
        start, count = rng.randrange(4000), rng.randrange(1, 2000)
        contexts = [rng.randrange(1, 5000) for _ in range(5)]
        base = model.step(make_plan([(start, count)], contexts)).seconds
        for more in (
            make_plan([(start, count + 1)], contexts),
            make_plan([(start + 1, count)], contexts),
            make_plan([(start, count)], [*contexts, 1]),
        ):
            assert model.step(more).seconds > base


def test_the_decode_floor_is_the_step_with_its_decodes_alone(rng):
    model = random_model(rng)
    contexts = [rng.randrange(1, 3000) for _ in range(rng.randrange(1, 30))]
    alone = make_plan(decodes=contexts)
    seconds, cost = model.cost(alone)
    assert cost.decode_floor == seconds
    mixed_seconds, mixed = model.cost(make_plan([(0, 700)], contexts))
    assert mixed.decode_floor == pytest.approx(seconds)
    assert mixed_seconds > seconds
    assert model.cost(make_plan([(0, 700)]))[1].decode_floor is None


def test_decode_leaves_compute_idle_prefill_leaves_bandwidth_idle_and_mixing_fills_both():
    model = CostModel("llama-2-7b", "a100-80g-sxm")
    decode = model.step(make_plan(decodes=[500] * 10))
    prefill = model.step(make_plan([(0, 1000)], prompt=8000))
    mixed = model.step(make_plan([(0, 1000)], [500] * 10, prompt=8000))
    assert decode.compute_utilisation < 0.1 < 0.6 < decode.bandwidth_utilisation
    assert prefill.bandwidth_utilisation < 0.25 < 0.5 < prefill.compute_utilisation
    assert mixed.seconds < 0.9 * (decode.seconds + prefill.seconds)


def test_attention_efficiency_rises_with_rows_and_context():
    model = CostModel("llama-3-8b", "a100-80g-sxm")

    def prefill_rate(start, count):
        part = model.step(make_plan([(start, count)])).part("prefill_attention")
        return part.flops / part.seconds

    def decode_rate(batch, context):
        part = model.step(make_plan(decodes=[context] * batch)).part("decode_attention")
        return part.bytes / part.seconds

    assert prefill_rate(0, 64) < prefill_rate(0, 256) < prefill_rate(0, 1024)
    assert prefill_rate(0, 256) < prefill_rate(1000, 256) < prefill_rate(8000, 256)
    assert decode_rate(1, 500) < decode_rate(8, 500) < decode_rate(64, 500) < decode_rate(64, 4000)


def test_small_chunks_waste_time_and_usual_ones_do_not():
    model = CostModel("llama-2-7b", "a100-80g-sxm")

    def prompt_seconds(chunk, prompt=8192):
        plans = (make_plan([(at, chunk)], prompt=prompt) for at in range(0, prompt, chunk))
        return sum(model.step(plan).seconds for plan in plans)

    whole = prompt_seconds(8192)
    assert prompt_seconds(64) > 2 * whole
    for chunk in (512, 1024, 2048):
        assert prompt_seconds(chunk) < 1.15 * whole


def test_tiles_make_264_rows_as_dear_as_384():
    smooth, tiled = (CostModel("llama-2-7b", "a100-80g-pcie", tile=tile) for tile in (None, 128))
    assert tiled.linear_seconds(264) > 1.2 * tiled.linear_seconds(256)
    assert tiled.linear_seconds(264) == pytest.approx(tiled.linear_seconds(384), rel=0.03)
    assert smooth.linear_seconds(264) < 1.05 * smooth.linear_seconds(256)


def test_tensor_parallelism_divides_the_work_and_pays_for_all_reduces():
    plan = make_plan([(0, 2048)], [1000] * 8)
    one, two, four = (
        CostModel("llama-2-70b", "a100-80g-sxm", tensor_parallel=split).step(plan)
        for split in (1, 2, 4)
    )
    assert one.part("linear").seconds > 1.9 * two.part("linear").seconds
    assert two.seconds > four.seconds > one.seconds / 4
    assert two.part("all_reduce").seconds > 0
    assert one.flops == two.flops
    slow_link = CostModel("llama-2-70b", "l40s", tensor_parallel=4).step(plan)
    assert slow_link.part("all_reduce").seconds > 5 * four.part("all_reduce").seconds


def test_host_time_hides_behind_long_steps_and_bounds_short_ones():
    plain = CostModel("llama-3-8b", "h100-sxm")
    eager = CostModel("llama-3-8b", "h100-sxm", host_time=0.03)
    short, long = make_plan(decodes=[100]), make_plan([(0, 8192)])
    assert eager.step(short).seconds == pytest.approx(0.03 + plain.step_overhead)
    assert eager.step(long).seconds == pytest.approx(plain.step(long).seconds)


def test_context_per_token_equates_kv_reads_and_linear_work():
    model = CostModel("llama-2-7b", "a100-80g-sxm")
    context = model.context_per_token
    one_more_token = model.linear_seconds(4097) - model.linear_seconds(4096)
    reads = model.decode_attention_seconds(1, 100_000 + round(context))
    assert reads - model.decode_attention_seconds(1, 100_000) == pytest.approx(
        one_more_token, rel=0.05
    )
    assert SimulatedExecutor(model).context_per_token == context


def test_the_executor_samples_where_the_plan_says_so():
    executor = SimulatedExecutor(CostModel("llama-3-8b", "h100-sxm"))
    result = executor.execute(make_plan([(0, 100)], [50, 60], prompt=1000))
    assert set(result.token_ids) == {"d0", "d1"}
    assert result.cost is not None
    assert result.cost.decode_floor is not None
    assert result.duration > result.cost.decode_floor > 0


def test_a_step_costs_the_simulator_microseconds():
    executor = SimulatedExecutor(CostModel("llama-3-8b", "h100-sxm"))
    plan = make_plan([(0, 100)], [500] * 200)

    def microseconds():
        begin = time.perf_counter()
        for _ in range(100):
            executor.execute(plan)
        return (time.perf_counter() - begin) * 1e4

    # About 60 on an idle machine; a crowded one gets several tries and a wide margin.
    assert min(microseconds() for _ in range(10)) < 400


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"tensor_parallel=3 must divide the 32"):
        CostModel("llama-2-7b", "h100-sxm", tensor_parallel=3)
    with pytest.raises(ValueError, match="step_overhead=-1"):
        CostModel("llama-2-7b", "h100-sxm", step_overhead=-1)
    with pytest.raises(ValueError, match="tile=0"):
        CostModel("llama-2-7b", "h100-sxm", tile=0)
    with pytest.raises(ValueError, match=r"'cpu'.*pass efficiency="):
        CostModel("llama-2-7b", GPU("x", "X", "cpu", 1, 50, 16, 8, 1))


def test_the_load_of_a_plan_sums_its_chunks():
    load = load_of(make_plan([(10, 5), (0, 3)], [7, 9], prompt=15).chunks)
    assert load == (10, 3, 8, 5 * 13 + 3 * 2, 15 + 3, 2, 16)


def test_small_chunks_pay_for_reading_their_prefix_again() -> None:
    model = CostModel("llama-2-7b", "a100-80g-sxm")

    def attention(chunk: int, prompt: int = 8192) -> float:
        return sum(
            model.prefill_attention_seconds(chunk, chunk * (start + (chunk + 1) / 2), start + chunk)
            - model.prefill_attention_seconds(chunk, 0.0)  # launches and setup
            for start in range(0, prompt, chunk)
        )

    whole = attention(8192)
    assert attention(1024) == pytest.approx(whole)  # computing hides the reading
    assert attention(16) > 1.5 * whole
    assert attention(16) > attention(32) > whole
