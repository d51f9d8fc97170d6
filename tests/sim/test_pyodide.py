"""The scheduling layer and the simulator in a browser's Python (Pyodide, here under Node).

Builds a wheel of this package, installs it without its dependencies and runs the course's scene:
what the standard library of Pyodide lacks, `core`, `sim` and `workloads` must not need.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minichunk as mc
from tests.required import unavailable

ROOT = Path(__file__).parents[2]
PYODIDE = "pyodide@314.0.7"
SCENE = """
import importlib, json, pkgutil, sys
import minichunk as mc

imported = []
for room in ("core", "sim", "workloads"):
    package = importlib.import_module(f"minichunk.{room}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        imported.append(importlib.import_module(module.name).__name__)

scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
runs = {"whole": dict(policy="continuous", max_num_batched_tokens=8192),
        "chunked": dict(chunk_size=1000, max_num_batched_tokens=1024)}
both = mc.compare(scene, runs, model="llama-2-7b", gpu="a100-80g-sxm")
for trace in both.traces.values():
    trace.validate()
json.dumps({
    "platform": sys.platform,
    "imported": imported,
    "heavy": sorted({"torch", "numpy", "triton"} & set(sys.modules)),
    "itl_max": {name: trace.metrics().itl.max for name, trace in both.traces.items()},
    "stalls": {name: len(trace.stalls()) for name, trace in both.traces.items()},
})
"""
SCRIPT = """
import { loadPyodide } from "pyodide";
import { readFileSync } from "node:fs";
const pyodide = await loadPyodide();
pyodide.unpackArchive(new Uint8Array(readFileSync(process.argv[2])), "wheel");
console.log("RESULT " + (await pyodide.runPythonAsync(readFileSync(process.argv[3], "utf8"))));
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this package, built from a copy so that nothing is left in the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "minichunk", source / "minichunk", ignore=ignore)
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("LICENSE*")):
        shutil.copy(path, source)
    if not (source / "README.md").exists():
        (source / "README.md").write_text("minichunk")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source],
        check=True,
    )
    (built,) = folder.glob("minichunk-*-py3-none-any.whl")
    return built


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory):
    """A folder in which Node finds Pyodide."""
    if not (shutil.which("node") and shutil.which("npm")):
        unavailable("node", "Node or npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent", PYODIDE],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode != 0:
        unavailable("node", f"npm could not install {PYODIDE}: {done.stderr.strip()[-300:]}")
    return folder


def test_the_scene_runs_under_pyodide_as_it_does_here(wheel, node_folder):
    (node_folder / "scene.py").write_text(SCENE)
    (node_folder / "run.mjs").write_text(SCRIPT)
    done = subprocess.run(
        ["node", "run.mjs", str(wheel), "scene.py"],
        cwd=node_folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    # Node quotes the minified line that threw: keep what a person can read.
    error = "\n".join(line for line in done.stderr.splitlines() if len(line) < 300)
    assert done.returncode == 0, error
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    there = json.loads(line.removeprefix("RESULT "))
    assert there["platform"] == "emscripten"
    assert {"minichunk.core.engine", "minichunk.sim.run", "minichunk.workloads.published"} <= set(
        there["imported"]
    )
    assert there["heavy"] == []
    here = mc.compare(
        mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000),
        {
            "whole": {"policy": "continuous", "max_num_batched_tokens": 8192},
            "chunked": {"chunk_size": 1000, "max_num_batched_tokens": 1024},
        },
        model="llama-2-7b",
        gpu="a100-80g-sxm",
    )
    for name, trace in here.traces.items():
        assert there["itl_max"][name] == pytest.approx(trace.metrics().itl.max)
        assert there["stalls"][name] == len(trace.stalls())
