"""Builds every picture that the README and the notebooks show, from the simulator: one command.

    python -m minichunk.viz.build_figures [folder]

Each run gives the same pictures. `interactive.png` is a photograph of the real page, taken with
the machine's own Chromium; where there is none (or no Playwright), it is left as it is.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minichunk import workloads
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.core.trace import Trace
from minichunk.core.trace_io import write_whole
from minichunk.sim.run import simulate
from minichunk.viz import figures
from minichunk.viz.html import to_html

MACHINE: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-80g-sxm"}
CHUNK_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
MAX_BYTES = 150_000


def stall_pair() -> dict[str, Trace]:
    """The course's scene under whole prompts and under chunked prefill."""
    scene = workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
    return {
        "whole prompts": simulate(
            scene, policy="continuous", max_num_batched_tokens=8192, **MACHINE
        ),
        "chunked prefill": simulate(
            scene, policy="decode-first", chunk_size=512, max_num_batched_tokens=1024, **MACHINE
        ),
    }


def chunk_sweep() -> list[Trace]:
    """The same scene under every chunk size."""
    scene = workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
    knobs: dict[str, Any] = {"policy": "decode-first", "max_num_batched_tokens": 8448}
    return [simulate(scene, chunk_size=size, **knobs, **MACHINE) for size in CHUNK_SIZES]


def two_tenants(order: str) -> Trace:
    """Two tenants who both always have work waiting: one with long prompts, one with short ones."""
    bulk = (RequestSpec(0.0, PromptShape(4000), 40),) * 15
    chat = tuple(RequestSpec(0.02 * i, PromptShape(500), 60) for i in range(60))
    workload = workloads.multi_tenant(
        {"bulk": workloads.Workload("bulk", bulk), "chat": workloads.Workload("chat", chat)}
    )
    knobs: dict[str, Any] = {"policy": "decode-first", "max_num_batched_tokens": 1024}
    return simulate(workload, order=order, max_num_seqs=16, **knobs, **MACHINE)


def pictures() -> dict[str, Callable[[], bytes]]:
    """File name -> how it is made."""
    pair = stall_pair()
    chunked = pair["chunked prefill"]
    return {
        "timeline.png": lambda: figures.to_png(figures.timeline_figure(pair), dpi=110),
        "itl.png": lambda: figures.to_png(figures.itl_figure(pair)),
        "tradeoff.png": lambda: figures.to_png(figures.tradeoff_figure(chunk_sweep())),
        "roofline.png": lambda: figures.to_png(figures.roofline_figure(chunked)),
        "utilisation.png": lambda: figures.to_png(figures.utilisation_figure(chunked)),
        "fairness.png": lambda: figures.to_png(figures.fairness_figure(two_tenants("fair"))),
    }


def photograph(traces: dict[str, Trace], width: int = 1180) -> bytes | None:
    """The interactive page as the reader sees it, at the first stall; None without a browser."""
    path = os.environ.get("MINICHUNK_CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if path is None:
        return None
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "timeline.html"
        to_html(traces, page_file, theme="light")
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        page = browser.new_page(viewport={"width": width, "height": 700})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".mc-timeline[data-draws]")
        page.focus(".mc-main")
        page.keyboard.press("]")
        page.mouse.click(5, 5)  # the focus ring is for those who use it
        page.wait_for_timeout(200)
        shot: Any = page.locator(".mc-frame").screenshot()
        browser.close()
    return _few_colours(shot)


def _few_colours(png: bytes) -> bytes:
    """The same picture with a palette: a third of the bytes, and no difference to the eye."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    # Maximum coverage: a colour that is rare, like the legend's, is kept.
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def build(folder: Path) -> list[str]:
    """Write every picture into `folder`; returns what was written, in words."""
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for name, draw in pictures().items():
        said.append(_save(folder / name, draw()))
    shot = photograph(stall_pair())
    if shot is None:
        said.append("interactive.png: left as it is, there is no Chromium or no Playwright here")
    else:
        said.append(_save(folder / "interactive.png", shot))
    return said


def _save(path: Path, data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path.name} has {len(data):,} bytes, more than {MAX_BYTES:,}")
    write_whole(path, data)
    return f"{path.name}: {len(data) // 1024} KB"


if __name__ == "__main__":
    for line in build(Path(sys.argv[1] if len(sys.argv) > 1 else "figures")):
        print(line)
