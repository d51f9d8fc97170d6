"""Fitting: recovers what made the data, predicts the unseen, reads profiles and traces."""

import csv
import os
import statistics

import pytest

import minichunk as mc
from minichunk.core.clock import VirtualClock
from minichunk.sim import calibrate, profiles
from minichunk.sim.calibrate import Measurement, fit, nelder_mead, predict
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad, load_of
from minichunk.sim.efficiency import AMPERE, HOPPER, Efficiency
from minichunk.sim.executor import SimulatedExecutor
from minichunk.sim.hardware import GPU, get_gpu
from minichunk.sim.shapes import get_shape
from tests.sim.measured_rows import ATTENTION_MS, attention_rows, linear_rows


def test_nelder_mead_finds_the_bottom_of_a_valley(rng):
    target = [rng.uniform(-3, 3) for _ in range(3)]

    def loss(point):
        x, y, z = (a - b for a, b in zip(point, target, strict=True))
        return x * x + 10 * (y - x) ** 2 + z * z

    assert nelder_mead(loss, [0.0, 0.0, 0.0]) == pytest.approx(target, abs=0.01)


def test_a_fit_recovers_the_efficiencies_behind_clean_data(rng):
    truth = Efficiency(
        compute=rng.uniform(0.5, 0.9), bandwidth=rng.uniform(0.6, 0.95), sharpness=2.0,
        launch=5e-6, elementwise=rng.uniform(0.3, 0.7), attention_compute=rng.uniform(0.2, 0.6),
        attention_setup=rng.uniform(300, 2000), attention_bandwidth=rng.uniform(0.4, 0.9),
        attention_latency=1e-5,
    )  # fmt: skip
    measured = linear_rows("a100-80g-pcie") + attention_rows()
    clean = [row._replace(seconds=predict(row, truth)) for row in measured]
    found = fit(clean, AMPERE)
    assert max(found.errors(found.held_out)) < 0.05
    for name in ("compute", "bandwidth", "attention_compute", "attention_bandwidth"):
        assert getattr(found.efficiency, name) == pytest.approx(getattr(truth, name), rel=0.05)


def test_held_out_rows_are_predicted_about_as_well_as_fitted_ones(seed):
    found = fit(linear_rows("a100-80g-pcie") + attention_rows(), AMPERE, seed=seed)
    assert len(found.held_out) == pytest.approx(len(found.fitted) / 3, abs=2)
    for part in ("linear", "prefill_attention", "decode_attention"):
        fitted, unseen = (
            statistics.median(found.errors(row for row in rows if row.part == part))
            for rows in (found.fitted, found.held_out)
        )
        assert fitted < 0.15
        assert unseen < 0.20
    table = found.table()
    assert "held out" in table
    assert "decode_attention" in table


def test_what_was_fitted_on_one_model_predicts_another():
    rows = [row for row in linear_rows("a100-80g-pcie") if row.part == "linear"]
    seen = [row for row in rows if row.shape.ffn_size == 11008]
    other = [row for row in rows if row.shape.ffn_size != 11008]
    assert statistics.median(fit(seen, AMPERE, held_out=0).errors(other)) < 0.08


def test_chunk_sizes_that_were_left_out_are_predicted():
    for chunk in {chunk for phase, _, chunk in ATTENTION_MS if phase == "prefill"}:
        rows = [row for row in attention_rows() if row.part == "prefill_attention"]
        seen = [row for row in rows if row.load.prefill_tokens != chunk]
        unseen = [row for row in rows if row.load.prefill_tokens == chunk]
        assert statistics.median(fit(seen, AMPERE, held_out=0).errors(unseen)) < 0.25


def test_the_shipped_efficiencies_are_those_of_a_fit():
    found = fit(linear_rows("h100-sxm"), HOPPER, held_out=0).efficiency
    assert found.compute == pytest.approx(HOPPER.compute, rel=0.03)
    assert found.bandwidth == pytest.approx(HOPPER.bandwidth, rel=0.03)


def test_a_trace_gives_back_the_loads_of_its_steps(rng):
    plans = []

    class Watching(SimulatedExecutor):
        def execute(self, plan):
            plans.append(plan)
            return super().execute(plan)

    model = CostModel("llama-3-8b", "h100-sxm")
    config = mc.EngineConfig(chunk_size=rng.randrange(50, 400), num_blocks=5000)
    clock = VirtualClock()
    workload = mc.workloads.poisson(30, 40, prompt=300, output=20, seed=rng.randrange(10**6))
    trace = mc.Engine(Watching(model), config, clock=clock).run(workload)
    assert calibrate.loads_of(trace) == [load_of(plan.chunks) for plan in plans]


def test_a_machine_is_fitted_from_a_run_on_it_and_predicts_another_run():
    # A trace of an unknown device: its times come from a cost model that the fit does not see.
    machine = GPU("laptop", "a laptop", "cpu", 1.0, 40, 16, 2, 1)
    truth = Efficiency(
        compute=0.4, bandwidth=0.6, sharpness=2.0, launch=5e-6, elementwise=0.5,
        attention_compute=0.2, attention_setup=100, attention_bandwidth=0.5,
        attention_latency=2e-5,
    )  # fmt: skip
    real = {"model": "smollm2-135m", "gpu": machine, "efficiency": truth, "step_overhead": 0.004}
    trace = mc.simulate(
        mc.workloads.stall_scene(6, 1500, decode_output_tokens=60), chunk_size=256, **real
    )
    gpu, found = calibrate.fit_trace(trace, "smollm2-135m")
    assert len(found.fitted) + len(found.held_out) == len(trace.steps)
    assert statistics.median(found.errors(found.held_out)) < 0.03
    other = mc.workloads.stall_scene(3, 700, decode_output_tokens=60)
    measured = mc.simulate(other, chunk_size=100, **real).metrics()
    predicted = mc.simulate(
        other, model="smollm2-135m", gpu=gpu, chunk_size=100, **found.options
    ).metrics()
    assert predicted.duration == pytest.approx(measured.duration, rel=0.1)
    assert predicted.itl.max == pytest.approx(measured.itl.max, rel=0.2)


def test_profiles_are_read_from_csv(tmp_path):
    linear, attention = tmp_path / "linear.csv", tmp_path / "attention.csv"
    with open(linear, "w", newline="") as file:
        file.write(
            "device,tp,num_tokens,n_embd,ffn,n_head,n_kv_head,linear_ms_per_layer,"
            "all_nonattn_ms_per_layer\n"
        )
        writer = csv.writer(file)
        writer.writerow(["a100", 2, 512, 4096, 11008, 32, 32, 0.505, 0.569])
    with open(attention, "w", newline="") as file:
        file.write(
            "phase,batch_size,chunk_tokens,kv_prefix_tokens,median_ms_per_layer,"
            "q_heads,kv_heads,head_dim\n"
        )
        writer = csv.writer(file)
        writer.writerow(["decode", 8, 1, 1600, 0.043, 32, 4, 128])
        writer.writerow(["prefill", 1, 512, 1024, 0.148, 32, 4, 128])
    products, small = profiles.read_linear_layers(linear)
    assert (products.part, products.tensor_parallel) == ("linear", 2)
    assert products.load.num_tokens == 512
    assert products.seconds == pytest.approx(0.505e-3)
    assert small.seconds == pytest.approx(0.064e-3)
    decode, prefill = profiles.read_attention(attention, "a100-80g-pcie")
    assert decode.load.decode_context == 8 * 1601
    assert prefill.load.prefill_pairs == 512 * 1024 + 512 * 513 / 2


def test_rows_that_cannot_be_fitted_are_refused():
    row = Measurement("linear", get_shape("llama-2-7b"), get_gpu("t4"), StepLoad(8, 0), 0.0)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        fit([row], AMPERE)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        fit([], AMPERE)


@pytest.mark.skipif(
    "MINICHUNK_LINEAR_CSV" not in os.environ,
    reason="set MINICHUNK_LINEAR_CSV to a profile of linear layers to check the whole of it",
)
def test_a_whole_profile_agrees():
    from minichunk.sim.efficiency import EFFICIENCIES

    for row_gpu in ("ampere", "hopper"):
        rows = profiles.read_linear_layers(os.environ["MINICHUNK_LINEAR_CSV"])
        rows = [row for row in rows if row.gpu.family == row_gpu and row.part == "linear"]
        errors = [abs(predict(row, EFFICIENCIES[row_gpu]) / row.seconds - 1) for row in rows]
        assert statistics.median(errors) <= 0.08
