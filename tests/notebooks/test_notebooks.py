"""The course runs: every notebook as shipped, and again with its solutions put in."""

from __future__ import annotations

import importlib.util
import json
import re
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
def test_notebook_runs_with_its_solutions_and_every_check_passes(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINICHUNK_FAST", "1")
    monkeypatch.setenv("MINICHUNK_LABS_STRICT", "1")
    build.execute(build.read_source(source, solved=True))


@each_notebook
def test_notebook_runs_as_shipped(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINICHUNK_FAST", "1")
    notebook = build.read_source(source)
    build.execute(notebook)
    noise = [
        output["text"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stderr" and "Warning" in output["text"]
    ]
    assert not noise, noise
