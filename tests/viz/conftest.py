"""A headless Chromium of the machine's own, and pages opened in it with the network blocked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.required import unavailable

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium_path() -> str | None:
    return os.environ.get("MINICHUNK_CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = chromium_path()
    if path is None:
        unavailable("browser", "there is no chromium on the PATH (or in MINICHUNK_CHROMIUM)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("browser", "playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page under test with what went wrong on it, and every request it made to the network."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def state(self) -> dict[str, str]:
        self.settle()
        return self.page.evaluate("({...document.querySelector('.mc-timeline').dataset})")

    def settle(self) -> None:
        """Two frames: what was asked for has been drawn."""
        self.page.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def press(self, *keys: str) -> dict[str, str]:
        self.page.focus(".mc-main")
        for key in keys:
            self.page.keyboard.press(key)
        return self.state()

    def box(self, selector: str, nth: int = 0) -> dict[str, float]:
        return self.page.locator(selector).nth(nth).bounding_box()


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """open_page(html, ...) -> Opened. At the end of the test: no page error, no request."""
    opened: list[Opened] = []
    contexts = []

    def show(
        html: str,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        calm: bool = False,
        wait_for: str = ".mc-timeline[data-draws]",
    ) -> Opened:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if calm else "no-preference",
            accept_downloads=True,
        )
        contexts.append(context)
        page = context.new_page()
        result = Opened(page)
        opened.append(result)
        page.on("pageerror", lambda error: result.errors.append(str(error)))
        page.on(
            "console",
            lambda line: result.errors.append(line.text) if line.type == "error" else None,
        )

        def block(route: Any) -> None:
            result.requests.append(route.request.url)
            route.abort()

        page.route(lambda url: not url.startswith(("file:", "data:", "blob:")), block)
        path = tmp_path / f"page-{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        page.goto(path.as_uri())
        page.wait_for_selector(wait_for)
        return result

    yield show
    for context in contexts:
        context.close()
    for result in opened:
        assert result.errors == []
        assert result.requests == []
