"""The pictures in figures/ come from one command, are small, and are all there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from minichunk.viz import build_figures

FIGURES = Path(__file__).resolve().parents[2] / "figures"


def test_builds_every_picture_small_on_a_light_ground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_figures, "photograph", lambda traces: None)
    said = build_figures.build(tmp_path / "figures")
    built = {path.name for path in (tmp_path / "figures").iterdir()}
    assert built == set(build_figures.pictures())
    assert any("interactive.png: left as it is" in line for line in said)
    for path in (tmp_path / "figures").iterdir():
        assert path.stat().st_size < 150_000
        picture = Image.open(io.BytesIO(path.read_bytes())).convert("RGBA")
        assert picture.getpixel((1, 1)) == (255, 255, 255, 255)


def test_the_repository_holds_exactly_these_pictures() -> None:
    kept = {path.name for path in FIGURES.glob("*.png")}
    assert kept == {*build_figures.pictures(), "interactive.png"}
    assert all(path.stat().st_size < 150_000 for path in FIGURES.glob("*.png"))


def test_chunking_shrinks_the_longest_gap_in_the_pictures() -> None:
    whole, chunked = (trace.metrics() for trace in build_figures.stall_pair().values())
    assert chunked.itl.max < whole.itl.max / 5
    gaps = [trace.metrics().itl.max for trace in build_figures.chunk_sweep()]
    assert gaps == sorted(gaps)


def test_a_picture_that_grew_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than"):
        build_figures._save(tmp_path / "x.png", b"x" * 200_000)
    assert list(tmp_path.iterdir()) == []
