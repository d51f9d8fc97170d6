"""The notebook widget in Python: what it sends, what it shows where, what comes back."""

from __future__ import annotations

import base64
import sys
import types

import pytest

from minichunk.viz.timeline import Timeline, timeline, widgets_answer
from tests.viz.scenes import stall_scene

WIDGET = "application/vnd.jupyter.widget-view+json"


def data_of(bundle: object) -> dict:
    return bundle[0] if isinstance(bundle, tuple) else bundle


def test_a_display_carries_widget_and_picture() -> None:
    data = data_of(timeline(stall_scene())._repr_mimebundle_())
    assert data[WIDGET]["model_id"]
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "text/html" not in data  # GitHub would prefer it, and then show nothing


def test_without_a_widget_manager_the_page_comes_in_an_iframe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINICHUNK_WIDGETS", "0")
    trace = stall_scene(names=['"><script>alert(1)</script>', *map(str, range(10))])
    data = data_of(timeline(trace)._repr_mimebundle_())
    assert WIDGET not in data
    assert data["text/html"].startswith("<iframe")
    assert "<script" not in data["text/html"]
    assert "image/png" in data


@pytest.mark.parametrize("works", [True, False])
def test_colab_is_switched_on_or_shown_the_page(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    calls: list[str] = []

    def enable() -> None:
        calls.append("enabled")
        if not works:
            raise RuntimeError("no widget manager here")

    output = types.SimpleNamespace(enable_custom_widget_manager=enable)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    colab = types.ModuleType("google.colab")
    colab.output = output  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    assert widgets_answer() is works
    assert calls == ["enabled"]


def test_data_goes_once_and_only_what_the_reader_does_travels() -> None:
    widget = timeline(stall_scene(1000))
    synced = {name for name in widget.keys if not name.startswith("_")}
    assert {"payload", "cursor", "view", "selection"} <= synced
    sent: list[set[str]] = []
    widget.send_state = lambda key=None: sent.append({key} if isinstance(key, str) else set(key))
    widget.cursor = 0.5
    widget.selection = "10"
    widget.view = [0.1, 0.9]
    assert set().union(*sent) == {"cursor", "selection", "view"}


def test_the_cursor_tells_the_step() -> None:
    whole, chunked = stall_scene(), stall_scene(1000)
    widget = Timeline({"whole": whole, "chunked": chunked})
    assert widget.step() == 0
    widget.cursor = round(chunked.steps[17].start, 7)
    assert widget.step("chunked") == 17
    assert widget.step("whole") == sum(s.start <= widget.cursor for s in whole.steps) - 1


def test_shows_other_traces_in_place() -> None:
    widget = timeline(stall_scene())
    widget.show({"a": stall_scene(500), "b": stall_scene(1000)})
    assert [pane["name"] for pane in widget.payload["panes"]] == ["a", "b"]


def test_a_page_shows_what_the_widget_shows(tmp_path: object) -> None:
    widget = timeline(stall_scene(), cursor=0.25, view=(0.1, 0.9), selection="10")
    text = widget.to_html(tmp_path / "t.html")
    assert '"cursor":0.25,"view":[0.1,0.9],"selection":"10"' in text
    assert (tmp_path / "t.html").read_text() == text


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown timeline option colour"):
        timeline(stall_scene(), colour="red")


def test_a_trace_gives_its_own_timeline() -> None:
    assert isinstance(stall_scene().timeline(cursor=0.1), Timeline)
