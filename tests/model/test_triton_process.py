"""Runs the tests that need Triton's interpreter in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minichunk.kernels._triton import TRITON_MISSING
from minichunk.llm import LLM
from minichunk.model.errors import ModelError

from .tiny import config_of

LAUNCHED = Path(__file__).parent / "launched"


@pytest.mark.skipif(bool(TRITON_MISSING), reason="Triton does not exist on this platform")
def test_the_decoder_on_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", str(LAUNCHED), "-p", "no:cacheprovider"]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
def test_triton_on_a_cpu_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(ModelError, match="torch"):
        LLM(config_of("llama"), device="cpu", backend="triton", num_blocks=4, quiet=True)
