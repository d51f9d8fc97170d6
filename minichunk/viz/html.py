"""The timeline as one self-contained HTML page: it opens anywhere and asks the network for nothing.

The page holds the same JavaScript module that the notebook widget runs, and the payload as JSON.
Whatever a user typed (request names, notes, titles) stays text: JSON in a script element is
written without `<`, `>` and `&`, and the title is escaped.
"""

from __future__ import annotations

import html
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from minichunk.core.trace_io import write_whole
from minichunk.viz.columns import Traces, columns


def to_html(traces: Traces, path: str | Path | None = None, **options: Any) -> str:
    """One trace, or several by name, as a page. Written to `path` if given; returned as text.

    `options` set what is shown first: `cursor` (seconds), `view` ((start, end) in seconds),
    `selection` (a request id), `theme` ("auto", "light", "dark"), `height` (pixels of the lanes).
    The file is written whole or not at all.
    """
    text = page(columns(traces), check_options(options))
    if path is not None:
        write_whole(Path(path), text.encode(errors="replace"))  # half a character becomes "?"
    return text


def page(payload: dict[str, Any], options: dict[str, Any] | None = None) -> str:
    """The page for a payload of `columns`."""
    template = static("page.html")
    title = " and ".join(pane["name"] for pane in payload["panes"])
    values = {
        "title": html.escape(title),
        "css": static("timeline.css"),
        "source": static("timeline.js"),
        "data": script_safe({"payload": payload, "options": options or {}, "page": template}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def script_safe(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end that element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """The display options that JavaScript understands; an unknown one is an error that names it."""
    known = {"cursor", "view", "selection", "theme", "height"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"unknown timeline option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    if options.get("theme", "auto") not in ("auto", "light", "dark"):
        raise ValueError(f"theme={options['theme']!r} must be 'auto', 'light' or 'dark'")
    return {key: value for key, value in options.items() if value is not None}


@cache
def static(name: str) -> str:
    """The text of a file in `viz/static`."""
    return files("minichunk.viz").joinpath("static", name).read_text(encoding="utf-8")
