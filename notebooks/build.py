"""Build the course: py:percent sources in `src/` become executed notebooks beside this file.

    python notebooks/build.py               build and execute all
    python notebooks/build.py 05 06         only those whose names start so
    python notebooks/build.py --check       do the built notebooks match their sources?

Outputs stay small and free of machine traces: no widget state, no absolute paths, no progress bars.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
MAX_BYTES = 500_000
SOLUTION = re.compile(
    r"<!-- solution: (?P<name>[\w-]+) -->.*?```python\n(?P<code>.*?)```", re.DOTALL
)
STUB = re.compile(r"^# Exercise (?P<name>[\w-]+)")


def sources(prefixes: list[str]) -> list[Path]:
    """The sources whose names start with one of the prefixes; all where there are none."""
    found = sorted((HERE / "src").glob("[0-9][0-9]_*.py"))
    return [p for p in found if not prefixes or any(p.name.startswith(q) for q in prefixes)]


def read_source(path: Path, solved: bool = False) -> nbformat.NotebookNode:
    """A notebook from its source; with `solved`, each exercise's stub holds its solution."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:03d}"
    if solved:
        put_in_solutions(notebook)
    return notebook


def put_in_solutions(notebook: nbformat.NotebookNode) -> list[str]:
    """Replace each stub by the solution folded below it; returns the exercises' names."""
    solutions = {
        match["name"]: match["code"]
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for match in SOLUTION.finditer(cell.source)
    }
    stubs = [
        (match["name"], cell)
        for cell in notebook.cells
        if cell.cell_type == "code" and (match := STUB.match(cell.source))
    ]
    names = [name for name, _ in stubs]
    if sorted(names) != sorted(solutions):
        raise ValueError(f"stubs {sorted(names)} and solutions {sorted(solutions)} do not match")
    for name, cell in stubs:
        cell.source = solutions[name]
    return names


def execute(
    notebook: nbformat.NotebookNode, timeout: int = 600, env: dict[str, str] | None = None
) -> None:
    """Run all cells; an exception in a cell without the tag `raises-exception` ends it."""
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": HERE}}
    )
    client.execute(env=dict(os.environ) if env is None else env)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Keep what a reader of the page needs, and nothing of the machine it was made on."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            data = output.get("data", {})
            # A live widget cannot be drawn by a page that shows the notebook; its picture can.
            if "image/png" in data or "text/html" in data:
                data.pop("application/vnd.jupyter.widget-view+json", None)


def build(path: Path) -> str:
    started = time.perf_counter()
    notebook = read_source(path)
    execute(notebook)
    clean(notebook)
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{path.stem}: {len(text.encode())} bytes, at most {MAX_BYTES} allowed")
    target = HERE / f"{path.stem}.ipynb"
    temporary = target.with_suffix(".ipynb.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)
    return f"{target.name}  {len(text) // 1000} kB  {time.perf_counter() - started:.0f} s"


def matches(path: Path) -> bool:
    """Does the built notebook hold the same cells as its source?"""
    target = HERE / f"{path.stem}.ipynb"
    if not target.exists():
        return False
    built = nbformat.read(target, as_version=4)
    fresh = read_source(path)
    return [(c.cell_type, c.source) for c in built.cells] == [
        (c.cell_type, c.source) for c in fresh.cells
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and execute the course's notebooks.")
    parser.add_argument("names", nargs="*", help="prefixes of names, such as 05")
    parser.add_argument("--check", action="store_true", help="only compare with the sources")
    options = parser.parse_args()
    chosen = sources(options.names)
    if options.check:
        stale = [path.stem for path in chosen if not matches(path)]
        print(f"stale: {', '.join(stale)}" if stale else f"{len(chosen)} notebooks match")
        return 1 if stale else 0
    for path in chosen:
        print(build(path), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
