"""The scheduler's benchmark: its tables, and how it talks to the process that has vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import scheduler

STAND_IN = """#!{python}
import json, sys
print(json.dumps({{"version": "0.0"}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    seconds = [order["batch"] * 8e-6] * order["steps"]
    print(json.dumps({{"schedule": seconds, "update": seconds}}), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """Takes the place of the other environment's Python, and answers 8 + 8 µs to every order."""
    path = tmp_path / "python"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_each_shape_is_measured_on_both_sides(
    stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SHAPES", [(3, 2), (5, 40)])
    vllm = scheduler.Vllm(stand_in)
    rows = scheduler.beside_vllm(vllm, steps=15)
    vllm.close()
    assert [row[:2] for row in rows[::3]] == [
        ("3 decoding, 2 waiting", "schedule"),
        ("5 decoding, 40 waiting", "schedule"),
    ]
    for row in rows:
        theirs = "8.00" if row[1] == "schedule" else "16.00"
        assert row[4] == theirs
        assert float(row[6]) == pytest.approx(float(theirs) / float(row[2]), rel=0.1)


def test_a_process_without_vllm_ends_the_benchmark(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SystemExit, match="ended with status 3"):
        scheduler.Vllm(str(broken))


def test_the_page_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "SHAPES", [(3, 2)])
    monkeypatch.delenv("MINICHUNK_VLLM_PYTHON", raising=False)
    page = tmp_path / "scheduler.md"
    scheduler.main(["--steps", "3", "--out", str(page)])
    assert page.read_text() == capsys.readouterr().out
    assert "fcfs, 100,000 waiting" in page.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["scheduler.md"]
