"""The timeline as a notebook widget: lanes, budget, stalls and KV blocks on one scrubber.

The data goes to the browser once, as columns; after that only cursor, view and selection travel,
both ways. Works wherever anywidget does (JupyterLab, Notebook, VS Code, Colab, marimo). Each
display also carries a PNG, so that GitHub, nbviewer and PDF exports show a picture; where no
widget manager is known to answer, the same timeline is shown as a page in an iframe.
"""

from __future__ import annotations

import base64
import html
import os
import sys
from typing import Any

import anywidget
import traitlets

from minichunk.viz.columns import Traces, as_named, columns
from minichunk.viz.html import check_options, page, static, to_html

# Front ends that run Python but have no widget manager; the variable is set by the front end.
_WITHOUT_WIDGETS = ("PYCHARM_HOSTED", "ZEPPELIN_HOME", "SPYDER_KERNEL_ID")


class Timeline(anywidget.AnyWidget):
    """The timeline of one trace, or of several by name on one time axis.

    `cursor` (seconds), `view` ((start, end) in seconds; empty: everything) and `selection` (a
    request id, or "") follow what the reader does and may be set from Python.
    """

    _esm = static("timeline.js")
    _css = static("timeline.css")
    payload = traitlets.Dict().tag(sync=True)
    page = traitlets.Unicode(static("page.html")).tag(sync=True)
    cursor = traitlets.Float(None, allow_none=True).tag(sync=True)
    view = traitlets.List(traitlets.Float(), default_value=[]).tag(sync=True)
    selection = traitlets.Unicode("").tag(sync=True)
    theme = traitlets.Unicode("auto").tag(sync=True)
    height = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(self, traces: Traces, **options: Any) -> None:
        options = check_options(options)
        options["view"] = [float(edge) for edge in options.get("view", ())]
        self.traces = as_named(traces)
        super().__init__(payload=columns(self.traces), **options)

    def show(self, traces: Traces) -> None:
        """Show other traces in the same widget: what is displayed changes, wherever it is."""
        self.traces = as_named(traces)
        self.payload = columns(self.traces)

    def step(self, name: str | None = None) -> int | None:
        """The step under the cursor in the named trace (default: the first); None before it."""
        trace = self.traces[name] if name is not None else next(iter(self.traces.values()))
        if self.cursor is None:
            return 0 if trace.steps else None
        # JavaScript keeps tenths of microseconds, so the cursor may lie a hair before the step.
        begun = sum(step.start <= self.cursor + 1e-7 for step in trace.steps)
        return begun - 1 if begun else None

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same timeline as one self-contained page."""
        return to_html(self.traces, None if path is None else os.fspath(path), **self._shown())

    def to_png(self) -> bytes:
        """A still picture of the same traces and view, drawn by matplotlib."""
        from minichunk.viz.figures import timeline_figure, to_png

        view = (self.view[0], self.view[1]) if self.view else None
        return to_png(timeline_figure(self.traces, view=view))

    def iframe(self) -> str:
        """The page in an `<iframe srcdoc>`: for front ends without widgets. HTML text."""
        lanes = sum(min(max(len(trace.requests), 6) * 24, 440) for trace in self.traces.values())
        height = self.height or lanes + 190 * len(self.traces) + 140
        source = html.escape(page(self.payload, self._shown()))
        return (
            f'<iframe title="minichunk timeline" srcdoc="{source}" '
            f'style="width:100%;height:{height}px;border:0" '
            'sandbox="allow-scripts allow-downloads"></iframe>'
        )

    def _shown(self) -> dict[str, Any]:
        shown = {
            "cursor": self.cursor,
            "view": list(self.view) or None,
            "selection": self.selection or None,
            "theme": self.theme,
            "height": self.height,
        }
        return {key: value for key, value in shown.items() if value is not None}

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return completed(super()._repr_mimebundle_(**kwargs), self)


def timeline(traces: Traces, **options: Any) -> Timeline:
    """A `Timeline` to display. `options`: cursor, view, selection, theme, height."""
    return Timeline(traces, **options)


def completed(bundle: Any, shown: Timeline) -> Any:
    """A widget's mime bundle with a PNG beside the widget, for those who only read the notebook.

    Where no widget manager answers, the page in an iframe takes the widget's place. It is not
    added elsewhere: GitHub would prefer it to the PNG, strip it, and show nothing.
    """
    if bundle is None:
        return None
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    data["image/png"] = base64.b64encode(shown.to_png()).decode()
    if not widgets_answer():
        data.pop("application/vnd.jupyter.widget-view+json", None)
        data["text/html"] = shown.iframe()
    return bundle


def widgets_answer() -> bool:
    """Whether a widget manager can be expected. Colab's is switched on first.

    A kernel cannot ask its front end before it displays, so this goes by what front ends tell of
    themselves; everything else is taken to have a widget manager, as Jupyter does.
    MINICHUNK_WIDGETS=0 or 1 in the environment overrules.
    """
    wish = os.environ.get("MINICHUNK_WIDGETS")
    if wish in ("0", "1"):
        return wish == "1"
    if "google.colab" in sys.modules:
        return _enable_colab()
    return not any(name in os.environ for name in _WITHOUT_WIDGETS)


def _enable_colab() -> bool:
    """Colab shows custom widgets only after being told to; older ones cannot."""
    try:
        from google.colab import output  # type: ignore[import-not-found]

        output.enable_custom_widget_manager()
    except Exception:  # whatever goes wrong there, the iframe still works
        return False
    return True
