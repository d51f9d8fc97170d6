"""Comparisons: nothing leaks from run to run, prompts are the same, tokens are checked."""

import subprocess
import sys

import pytest

import minichunk as mc
from minichunk.compare import Comparison, PromptFiller, Table, first_difference
from minichunk.core.clock import VirtualClock
from minichunk.core.plan import StepResult
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.workloads import closed_loop, poisson, stall_scene

RUNS = {
    "whole": {"policy": "continuous", "max_num_batched_tokens": 8192},
    "chunked": {"chunk_size": 256, "max_num_batched_tokens": 300},
    "whole again": {"policy": "continuous", "max_num_batched_tokens": 8192},
}


class Echo:
    """A stand-in for a model: the next token depends on the sequence so far and on nothing else."""

    def __init__(self, flaw=None):
        self.plans = []
        self.known = {}
        self.flaw = flaw

    def execute(self, plan):
        self.plans.append(plan)
        tokens = {}
        for chunk in plan.chunks:
            known = self.known.setdefault(chunk.request_id, {})
            for offset, token in enumerate(chunk.token_ids):
                known[chunk.start + offset] = token
            if chunk.sampling is not None:
                sequence = [known.get(position, 0) for position in range(chunk.stop)]
                tokens[chunk.request_id] = hash((tuple(sequence), 1)) % 97
                if self.flaw and self.flaw(plan, chunk):
                    tokens[chunk.request_id] = 98
        return StepResult(tokens, 0.01 + 1e-5 * plan.num_tokens)


class FakeLLM:
    """The part of `LLM` that `compare` uses: a new engine for each run."""

    def __init__(self, flaw=None):
        self.flaw = flaw
        self.executors = []

    def new_engine(self, **overrides):
        self.executors.append(Echo(self.flaw))
        config = mc.EngineConfig.make(num_blocks=2000, check_invariants=True, **overrides)
        return mc.Engine(self.executors[-1], config, clock=VirtualClock(), vocab_size=97)


SCENE = stall_scene(4, 900, decode_output_tokens=40)


def test_simulated_runs_are_compared_by_name():
    both = mc.compare(
        SCENE, RUNS, model="llama-3-8b", gpu="h100-sxm", num_blocks=500, check_invariants=True
    )
    assert list(both.traces) == list(RUNS)
    assert both.traces["whole"].spans == both.traces["whole again"].spans
    assert both.traces["whole"].metrics().itl.max > both.traces["chunked"].metrics().itl.max
    assert both.same_tokens == {}
    assert both.traces["chunked"].meta["name"] == "chunked"
    assert [row["run"] for row in both.table()] == list(RUNS)
    assert "chunked" in repr(both)


def test_runs_on_a_model_do_not_leak_into_each_other():
    llm = FakeLLM()
    both = mc.compare(SCENE, RUNS, llm=llm)
    assert both.traces["whole"].spans == both.traces["whole again"].spans
    first, again = llm.executors[1], llm.executors[5]
    assert first.plans == again.plans
    assert all(trace.metrics().cached_tokens == 0 for trace in both.traces.values())


def test_each_schedule_is_warmed_up_once_and_that_run_is_discarded():
    llm = FakeLLM()
    both = mc.compare(SCENE, {"a": {}, "b": {"chunk_size": 100}}, llm=llm)
    assert len(llm.executors) == 4
    for warm_up, real in ((0, 1), (2, 3)):
        assert 0 < len(llm.executors[warm_up].plans) < len(llm.executors[real].plans)
        sizes = {chunk.num_tokens for plan in llm.executors[warm_up].plans for chunk in plan.chunks}
        assert max(sizes) >= 100
    assert len(both.traces["a"].requests) == len(SCENE)


def test_tokens_are_the_same_under_every_schedule():
    both = mc.compare(SCENE, RUNS, llm=FakeLLM())
    assert both.same_tokens == {str(i): None for i in range(5)}
    outputs = [tuple(r.output_token_ids) for r in both.traces["whole"].requests.values()]
    assert len(set(outputs)) == 5


def test_a_differing_token_is_found_with_its_position():
    def flaw(plan, chunk):  # one wrong token, only where the budget is small
        return plan.budget == 300 and chunk.request_id == "2" and chunk.stop == 32 + 7

    both = mc.compare(SCENE, RUNS, llm=FakeLLM(flaw))
    assert both.same_tokens["2"] == 7
    assert [rid for rid, position in both.same_tokens.items() if position is not None] == ["2"]


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2),
     ([], [4], 0), ([], [], None)],
)  # fmt: skip
def test_the_first_difference_is_of_content_or_length(first, second, position):
    assert first_difference(first, second) == position


def test_shapes_are_filled_the_same_way_each_time_and_prefixes_stay_shared(seed):
    specs = [RequestSpec(0.0, PromptShape(100 + i, (5, i), 40), 4) for i in range(3)]
    fill, again = PromptFiller(1000, seed), PromptFiller(1000, seed)
    prompts = [fill(spec) for spec in specs]
    assert prompts == [again(spec) for spec in specs]
    assert [len(prompt) for prompt in prompts] == [100, 101, 102]
    assert len({prompt[:40] for prompt in prompts}) == 1
    assert len({prompt[40:80] for prompt in prompts}) == 3
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert fill(RequestSpec(0.0, [1, 2, 3], 4)) == (1, 2, 3)


def test_equal_shapes_get_different_prompts():
    fill = PromptFiller(1000)
    assert len({fill(spec) for spec in stall_scene(10, 50)}) == 11


def test_a_closed_loop_asks_the_same_questions_under_every_schedule():
    loop = closed_loop(3, 3, prompt=60, output=10)
    both = mc.compare(loop, {"a": {}, "b": {"chunk_size": 16}}, llm=FakeLLM())
    assert [len(trace.requests) for trace in both.traces.values()] == [9, 9]


def test_a_generator_serves_all_runs():
    generator = (spec for spec in poisson(20, 10, prompt=50, output=5))
    both = mc.compare(generator, RUNS, model="llama-3-8b", gpu="h100-sxm")
    assert {len(trace.requests) for trace in both.traces.values()} == {10}


@pytest.mark.parametrize(
    "arguments",
    [{}, {"model": "llama-3-8b"}, {"gpu": "t4"},
     {"llm": FakeLLM(), "model": "llama-3-8b", "gpu": "t4"}],
)  # fmt: skip
def test_either_a_model_or_a_simulation(arguments):
    with pytest.raises(ValueError, match="either llm=, or model= and gpu="):
        mc.compare(SCENE, RUNS, **arguments)


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="runs is empty"):
        mc.compare(SCENE, {}, model="llama-3-8b", gpu="h100-sxm")


def test_a_table_is_aligned_in_text_and_escaped_in_html():
    table = Table([{"run": "<b>bold</b>", "n": 3}, {"run": "b", "n": 12345}])
    lines = str(table).splitlines()
    assert [
        line.index(end) + len(end) for line, end in zip(lines, ("n", "3", "12345"), strict=True)
    ]
    assert len({len(line) for line in lines}) == 1
    html = table._repr_html_()
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    assert "<b>" not in html
    assert str(Table([])) == "no rows"
    shown = mc.compare(SCENE, RUNS, model="llama-3-8b", gpu="h100-sxm")._repr_html_()
    assert shown.startswith("<table>")
    assert "whole again" in shown


def test_the_timeline_page_holds_every_run(tmp_path):
    both = mc.compare(SCENE, RUNS, model="llama-3-8b", gpu="h100-sxm")
    page = both.to_html(tmp_path / "timeline.html").read_text()
    assert all(name in page for name in RUNS)


def test_comparing_simulations_needs_neither_torch_nor_numpy_and_keeps_its_name():
    code = (
        "import sys, minichunk.compare, minichunk as mc\n"
        "both = mc.compare(mc.workloads.stall_scene(2, 200), {'a': {}}, model='llama-3-8b',"
        " gpu='h100-sxm')\n"
        "assert isinstance(both, mc.Comparison)\n"
        "assert not {'torch', 'numpy', 'triton'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_empty_comparison_has_no_rows():
    assert str(Comparison({}).table()) == "no rows"


def test_a_real_model_gives_the_same_plans_and_tokens_run_after_run(tmp_path, seed):
    from minichunk.workloads import merge, poisson
    from tests.small_model import save_small_model

    llm = mc.LLM(
        save_small_model(tmp_path, seed), dtype="float32", device="cpu", num_blocks=300, quiet=True
    )
    # All at once: on the wall clock, arrivals alone would make plans differ.
    requests = merge(poisson(1, 4, prompt=40, output=12), poisson(1, 1, prompt=300, output=6))
    scene = [RequestSpec(0.0, spec.prompt, spec.output_tokens) for spec in requests]
    chunked = {"chunk_size": 33, "max_num_batched_tokens": 64}
    runs = {"a": {"policy": "continuous"}, "b": chunked, "a again": {"policy": "continuous"}}
    both = mc.compare(scene, runs, llm=llm)
    assert both.traces["a"].spans == both.traces["a again"].spans
    assert both.traces["a"].spans != both.traces["b"].spans
    assert both.same_tokens == {str(i): None for i in range(5)}
    assert all(len(r.output_token_ids) > 5 for r in both.traces["b"].requests.values())
    assert all(step.flops > 0 for step in both.traces["b"].steps)


@pytest.mark.parametrize("runs", [[dict(chunk_size=512)], {"chunked": 512}, "chunked"])
def test_runs_that_are_not_names_and_knobs_are_refused_by_value(runs):
    with pytest.raises(TypeError, match="must be a dict of names and engine knobs") as caught:
        mc.compare(stall_scene(2, 100), runs=runs, model="llama-2-7b", gpu="h100-sxm")
    assert f"runs={runs!r}" in str(caught.value)
