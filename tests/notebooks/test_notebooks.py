"""The course runs: every notebook as shipped, and again with its solutions put in."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
_spec = importlib.util.spec_from_file_location("notebooks_build", NOTEBOOKS / "build.py")
assert _spec is not None
assert _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

SOURCES = build.sources([])
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@each_notebook
def test_built_notebook_matches_its_source(source: Path) -> None:
    assert build.matches(source), f"run: python notebooks/build.py {source.stem[:2]}"


@each_notebook
def test_built_notebook_is_small_and_names_no_machine(source: Path) -> None:
    text = (NOTEBOOKS / f"{source.stem}.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < build.MAX_BYTES
    assert "widgets" not in json.loads(text)["metadata"]
    outputs = [
        json.dumps(cell["outputs"])
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "code"
    ]
    for output in outputs:
        found = re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users|usr|opt)/\w+", output)
        assert found is None, f"an absolute path in an output: {found and found[0]}"


@each_notebook
def test_notebook_has_the_parts_of_a_lesson(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    for part in ("**Time:**", "**Needs:**", "**Predict", "## Recap", "# Exercise "):
        assert part in text, f"{source.name} lacks {part!r}"


@each_notebook
def test_notebook_runs_as_shipped_and_with_its_solutions_every_check_passes(source: Path) -> None:
    """Side by side, with one thread each: the course is long and the machine has two cores."""
    quick = {**os.environ, "MINICHUNK_FAST": "1", "OMP_NUM_THREADS": "1"}
    strict = {**quick, "MINICHUNK_LABS_STRICT": "1"}
    shipped, solved = build.read_source(source), build.read_source(source, solved=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = [
            pool.submit(build.execute, shipped, env=quick),
            pool.submit(build.execute, solved, env=strict),
        ]
    for run in runs:
        run.result()
    noise = [
        output["text"]
        for cell in shipped.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stderr" and "Warning" in output["text"]
    ]
    assert not noise, noise
