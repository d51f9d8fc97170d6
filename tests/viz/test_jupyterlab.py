"""One smoke test in a real JupyterLab: a real model's trace, a slider, and the cursor in Python."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.required import unavailable

SETUP = """
import random
import ipywidgets as widgets
from IPython.display import display
from transformers import LlamaConfig
import minichunk as mc
from tests.viz.scenes import stall_scene

config = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
)
llm = mc.LLM(config, quiet=True, device="cpu", max_num_batched_tokens=128, num_blocks=200)
prompts = [[random.randrange(3, 300) for _ in range(n)] for n in (10, 12, 14, 16, 400)]
llm.generate(prompts, mc.SamplingParams(max_tokens=20, ignore_eos=True))
timeline = llm.trace.timeline()
slider = widgets.IntSlider(1, 1, 9, description="chunk")
slider.observe(lambda change: timeline.show(stall_scene(change["new"] * 250)), "value")
display(timeline)
display(slider)
"""


# How many colours cover a noticeable part of the lanes.
SHADES = """(() => {
  const c = document.querySelector('.mc-lanes'), counts = new Map();
  const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  for (let i = 0; i < d.length; i += 4) {
    const colour = [d[i], d[i + 1], d[i + 2], d[i + 3]].join();
    counts.set(colour, (counts.get(colour) ?? 0) + 1);
  }
  return [...counts.values()].filter(n => n > d.length / 4 / 500).length;
})()"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def notebook(cells: list[str]) -> str:
    return json.dumps(
        {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
            },
            "cells": [
                {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source,
                 "outputs": [], "execution_count": None}
                for i, source in enumerate(cells)
            ],
        }
    )  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path, chromium: Any) -> Iterator[tuple[str, Path]]:
    if importlib.util.find_spec("jupyterlab") is None:
        unavailable("browser", "jupyterlab is not installed")
    work = tmp_path / "work"
    work.mkdir()
    own = {
        name: str(tmp_path / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ, **own, "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    port, token = free_port(), secrets.token_hex(8)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={work}", "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--expose-app-in-browser",
    ]  # fmt: skip
    log = (tmp_path / "lab.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert server.poll() is None, (tmp_path / "lab.log").read_text()
            try:
                urlopen(f"{address}/api?token={token}", timeout=1).close()
                break
            except OSError:
                time.sleep(0.25)
        yield f"{address}/lab/tree/NAME?token={token}", work
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


def run_cells(page: Any, count: int) -> None:
    """Shift+Enter through the cells; each must finish without an error."""
    page.locator(".jp-Cell .cm-content").first.click()
    for i in range(count):
        page.keyboard.press("Shift+Enter")
        page.wait_for_function(
            """i => /\\[\\d+\\]/.test(
                document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[i]?.textContent ?? '')""",
            arg=i,
            timeout=90_000,
        )
    errors = page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']")
    assert errors.all_inner_texts() == []


@pytest.mark.timeout(170)
def test_a_real_models_trace_in_jupyterlab(lab: tuple[str, Path], chromium: Any) -> None:
    address, work = lab
    (work / "timeline.ipynb").write_text(
        notebook([SETUP, "print(timeline.cursor, timeline.step())"])
    )
    context = chromium.new_context(viewport={"width": 1400, "height": 1100})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    # A dialog (kernel choice, news) must not cover the notebook.
    page.add_locator_handler(
        page.locator(".jp-Dialog .jp-mod-accept"), lambda button: button.click(), no_wait_after=True
    )
    try:
        page.goto(address.replace("NAME", "timeline.ipynb"))
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        # Until the kernel answers, the notebook ignores what it is told to run.
        page.wait_for_function("document.body.innerText.includes('| Idle')", timeout=60_000)
        run_cells(page, 1)
        timeline = page.locator(".mc-timeline[data-draws]")
        timeline.wait_for(timeout=30_000)
        assert timeline.get_attribute("data-headline").startswith("measured on ")
        assert timeline.get_attribute("data-theme") == "light"

        assert page.evaluate(SHADES) > 3, "lanes, chunks and ground differ in colour"

        # Keys that the timeline handles do not reach the notebook's command mode: "0" twice would
        # ask to restart the kernel, Space would scroll, "]" and arrows would select cells.
        page.locator(".mc-main").focus()
        cells = page.locator(".jp-Cell").count()
        for key in ("ArrowRight", "ArrowRight", "0", "0", "]", "Home", "ArrowRight", "b", "x"):
            page.keyboard.press(key)
        page.locator("[data-action=zoom-all]").click()
        for key in ("b", "0", "0"):
            page.keyboard.press(key)
        assert page.locator(".jp-Dialog").count() == 0
        assert page.locator(".jp-Cell").count() == cells
        page.wait_for_function("document.querySelector('.mc-timeline').dataset.step === '1'")

        # The cursor comes back to Python.
        cursor = float(timeline.get_attribute("data-cursor"))
        page.locator(".jp-Cell .cm-content").nth(1).click()
        page.keyboard.press("Shift+Enter")
        printed = page.locator(".jp-Cell").nth(1).locator(".jp-OutputArea-output").first
        printed.wait_for(timeout=30_000)
        value, step = printed.inner_text().split()
        assert float(value) == pytest.approx(cursor, abs=1e-6)
        assert step == "1"

        # Moving the slider changes the timeline.
        handle = page.locator(".noUi-handle").first
        handle.focus()
        handle.press("ArrowRight")
        page.wait_for_function(
            "document.querySelector('.mc-timeline').dataset.headline.startsWith('simulated')"
        )
        latencies = [slide(page) for _ in range(5)]
        print(f"slider to timeline: {sorted(round(ms) for ms in latencies)} ms")
        # The best tells what the code costs, the others what else the machine was doing.
        assert min(latencies) <= 300
        assert errors == []
    finally:
        if keep := os.environ.get("MINICHUNK_SCREENSHOTS"):
            page.screenshot(path=str(Path(keep) / "jupyterlab.png"))
        context.close()


def slide(page: Any) -> float:
    """Milliseconds from a key on the slider to a timeline that has drawn the new trace."""
    page.locator(".noUi-handle").first.focus()
    page.evaluate("""() => {
      const t = document.querySelector('.mc-timeline'), before = t.dataset.revision;
      window.slid = new Promise(done => document.addEventListener('keydown', () => {
        const began = performance.now();
        new MutationObserver((_, observer) => {
          if (t.dataset.revision === before) return;
          observer.disconnect();
          requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
        }).observe(t, { attributes: true });
      }, { once: true, capture: true }));
    }""")
    page.keyboard.press("ArrowRight")
    return page.evaluate("window.slid")
