"""The package is light to import, and each room imports only what it may."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "numpy", "triton", "transformers", "matplotlib")


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return result.stdout


def test_importing_minichunk_takes_less_than_200_ms_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import minichunk; "
        "seconds = time.perf_counter() - start; import json; "
        "print(json.dumps([seconds, sorted(sys.modules)]))"
    )
    runs = [json.loads(run_python(code)) for _ in range(3)]
    assert min(seconds for seconds, _ in runs) < 0.2
    assert not set(HEAVY) & set(runs[0][1])


def test_a_simulation_needs_the_standard_library_only() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys("
        f"{HEAVY!r})); "  # an import of any of these fails now
        "import minichunk as mc; scene = mc.workloads.stall_scene(num_decodes=2, prompt_tokens=99);"
        "trace = mc.simulate(scene, model='llama-2-7b', gpu='a100-80g-sxm'); "
        "trace.validate(); print(len(trace.steps), trace.metrics().num_finished)"
    )
    steps, finished = map(int, run_python(code).split())
    assert steps > 10
    assert finished == 3


def test_every_public_name_leads_somewhere() -> None:
    code = (
        "import minichunk as mc; "
        "missing = [name for name in dir(mc) if getattr(mc, name, None) is None]; "
        "print(missing)"
    )
    assert run_python(code).strip() == "[]"


def test_each_room_imports_only_what_it_may() -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or "lint-imports"
    result = subprocess.run(
        [command, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout
