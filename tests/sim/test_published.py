"""Published step times and losses that need no simulated run (benchmarks/published.py has all)."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    yield spec.loader.exec_module(module) or module
    del sys.modules[spec.name]


def test_sarathi_step_times_and_prefill_losses_agree(published):
    rows = list(itertools.islice(published.sarathi(), 5))  # the next ones simulate whole runs
    assert {row.unit for row in rows} == {"ms", "%"}
    assert [row for row in rows if not row.agrees] == []


def test_sarathi_serve_step_times_and_chunking_overhead_agree(published):
    rows = list(published.yi_34b())
    assert len(rows) > 20
    assert [row for row in rows if not row.agrees] == []


def test_a_figure_outside_its_range_is_reported(published):
    assert not published.Row("what", "1 s", 2.0, 0.5, 1.5).agrees
