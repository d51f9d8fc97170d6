"""The page as text: self-contained, safe, written whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minichunk.viz.columns import columns
from minichunk.viz.html import script_safe, to_html
from tests.viz.scenes import stall_scene


def test_is_one_file_that_refers_to_nothing(tmp_path: Path) -> None:
    text = to_html(stall_scene(), tmp_path / "timeline.html")
    assert (tmp_path / "timeline.html").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.html"]
    # SVG's name space is a name; nothing is fetched from it.
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
    assert addresses <= {"http://www.w3.org"}
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=(?!\"data:,)", text)
    assert len(text) < 400_000


def test_the_page_holds_the_payload_and_the_options() -> None:
    trace = stall_scene(1000)
    text = to_html({"a": trace}, cursor=0.5, selection="3", theme="dark")
    data = re.search(r'id="minichunk-data">(.*?)</script>', text, re.S)[1]
    held = json.loads(data)
    assert held["payload"] == json.loads(json.dumps(columns({"a": trace})))
    assert held["options"] == {"cursor": 0.5, "selection": "3", "theme": "dark"}


@pytest.mark.parametrize(
    "text", ["</script>", "<!--", "&amp;", "\u2028", 'a"b', "\\u003c", "{{css}}"]
)
def test_texts_survive_the_script_element(text: str) -> None:
    safe = script_safe({"x": text})
    assert not re.search("[<>&\u2028\u2029]", safe)
    assert json.loads(safe) == {"x": text}


def test_user_texts_cannot_end_a_script_or_a_title() -> None:
    evil = "</title></script><script>alert(1)</script>"
    trace = stall_scene(names=[evil, *map(str, range(10))])
    text = to_html({evil: trace})
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert text.count("</title>") == 1


def test_unknown_options_and_themes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown timeline option colour; known: cursor"):
        to_html(stall_scene(), colour="red")
    with pytest.raises(ValueError, match="theme='blue'"):
        to_html(stall_scene(), theme="blue")


def test_a_trace_writes_its_own_page(tmp_path: Path) -> None:
    path = stall_scene().to_html(tmp_path / "t.html")
    assert "minichunk-data" in path.read_text()


def test_half_a_character_in_a_name_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "timeline.html"
    to_html({"half \ud800": stall_scene(1000)}, path)
    assert "<title>half ?" in path.read_text(encoding="utf-8")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    to_html(stall_scene(1000), tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text(encoding="utf-8").startswith("<!")
