"""Building the C++ kernels: kept and found again, and one clear line where it cannot be done."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minichunk.kernels import _cpp, backend
from minichunk.kernels._cpp import CompileError, cpp_problem, library
from minichunk.kernels.backend import choose_backend, runs_on_cpp
from minichunk.kernels.swiglu import swiglu
from tests.required import needs

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = sys.platform == "linux" and shutil.which("g++") is not None
needs_compiler = needs("compiler", "" if HAS_COMPILER else "no g++ on Linux here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has loaded nothing yet."""
    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "kernels"
    forget()


def forget() -> None:
    for cached in (library, _cpp._function, cpp_problem, backend._check_cpp):
        cached.cache_clear()


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script before all else that is called g++."""

    def install(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return install


def swiglu_works() -> bool:
    x = torch.randn(3, 8)
    return torch.allclose(swiglu(x, backend="cpp"), swiglu(x), atol=1e-6)


def check_that_torch_serves(words: str) -> None:
    """`auto` falls back, and who asked for C++ is told why not and what to do, in one line."""
    assert choose_backend("auto", "cpu", torch.float32) == "torch"
    with pytest.raises(ValueError, match=words) as caught:
        choose_backend("cpp", "cpu", torch.float32)
    message = str(caught.value)
    assert "use backend='torch'" in message
    assert "\n" not in message
    with pytest.raises(ValueError, match=words):
        swiglu(torch.zeros(1, 4), backend="cpp")


DAMAGES = {
    "emptied": lambda whole: b"",
    "overwritten": lambda whole: b"not a library",
    "a header only": lambda whole: whole[:64],
    "cut in the middle": lambda whole: whole[: len(whole) // 2],
    "cut at the end": lambda whole: whole[:-1],
    "never written to the disk": lambda whole: whole[:4096] + bytes(len(whole) - 4096),
}


# What is kept -------------------------------------------------------------------------------------


@needs_compiler
def test_a_kernel_is_built_once_and_found_again(cache, fake_compiler):
    assert swiglu_works()
    [built] = cache.iterdir()  # nor is anything left of the building
    assert built.name.startswith("swiglu-")
    forget()
    fake_compiler("exit 1")
    assert swiglu_works()
    assert list(cache.iterdir()) == [built]


@needs_compiler
def test_other_constants_types_processors_or_sources_are_other_files(cache, tmp_path, monkeypatch):
    def files_after(**shapes: int) -> int:
        forget()
        library("rope_and_cache", torch.float32, **shapes)
        return len(list(cache.iterdir()))

    assert files_after(HEAD_DIM=32) == 1
    assert files_after(HEAD_DIM=64) == 2
    library("rope_and_cache", torch.bfloat16, HEAD_DIM=64)
    assert files_after(HEAD_DIM=32) == 3
    monkeypatch.setattr(_cpp, "_processor", lambda: "another one")
    assert files_after(HEAD_DIM=32) == 4
    sources = shutil.copytree(_cpp.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(_cpp, "SOURCES", sources)
    assert files_after(HEAD_DIM=32) == 4
    for number, name in enumerate(("rope_and_cache.cpp", "elements.h"), start=5):
        with (sources / name).open("a") as source:
            source.write("\n// changed\n")
        assert files_after(HEAD_DIM=32) == number


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew(cache, damage, tmp_path, monkeypatch):
    assert swiglu_works()
    [whole] = cache.iterdir()
    damaged = tmp_path / "another cache" / "kernels" / whole.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(DAMAGES[damage](whole.read_bytes()))
    monkeypatch.setenv("MINICHUNK_CACHE", str(damaged.parent.parent))
    forget()
    assert swiglu_works()
    assert list(damaged.parent.iterdir()) == [damaged]
    assert damaged.read_bytes() == whole.read_bytes()


def run_swiglu(cache: Path) -> subprocess.Popen[str]:
    code = (
        "import torch; from minichunk.kernels.swiglu import swiglu; "
        "x = torch.ones(2, 6); assert torch.allclose(swiglu(x, backend='cpp'), swiglu(x))"
    )
    environment = {**os.environ, "MINICHUNK_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


@needs_compiler
def test_processes_that_build_at_the_same_time_do_not_disturb_each_other(cache):
    processes = [run_swiglu(cache.parent) for _ in range(3)]
    for process in processes:
        _, complaints = process.communicate()
        assert process.returncode == 0, complaints
    assert len(list(cache.iterdir())) == 1


SHARED_WORK = """
import os, threading
import torch
from minichunk.kernels.swiglu import swiglu

def work():
    before = len(os.listdir("/proc/self/task"))
    swiglu(x, backend="cpp")
    print(len(os.listdir("/proc/self/task")) - before, flush=True)

x = torch.zeros(1000, 4000)
swiglu(x[:1], backend="cpp")
torch.set_num_threads({num_threads})
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_kernel_takes_as_many_threads_as_torch_in_any_thread_of_python(num_threads, cache):
    done = subprocess.run(
        [sys.executable, "-c", SHARED_WORK.format(num_threads=num_threads)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{num_threads - 1}\n", done.stderr


# What stands in the way ---------------------------------------------------------------------------


def test_without_a_compiler_torch_serves(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_that_torch_serves(r"need g\+\+, which is not installed here")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_elsewhere_than_on_linux_torch_serves(system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    check_that_torch_serves("built on Linux only")


COMPLAINTS = {
    "echo 'swiglu.cpp: In function:\nswiglu.cpp:3:1: error: no such thing\nmore' >&2; exit 1":
        "cannot be built: swiglu.cpp:3:1: error: no such thing; use",
    "echo 'cc1plus: unknown option' >&2; exit 1": "cc1plus: unknown option; use",
    "exit 7": r"g\+\+ ended with code 7; use",
    "kill -9 $$": r"g\+\+ ended with code -9; use",
    "exit 0": "cannot be built: .*No such file or directory",  # and it left nothing behind
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no compiler is called")
@pytest.mark.parametrize("script", COMPLAINTS)
def test_a_compiler_that_fails_is_quoted(script, fake_compiler, cache):
    fake_compiler(script)
    check_that_torch_serves(COMPLAINTS[script])
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_cache_folder_that_cannot_be_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINICHUNK_CACHE", str(tmp_path / "file"))
    check_that_torch_serves(
        r"Not a directory: .*file.* .MINICHUNK_CACHE can name another folder.; use"
    )


@needs_compiler
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_cache_folder_that_takes_nothing_is_named(code, monkeypatch):
    def refuse(*_: object, dir: Path) -> None:
        raise OSError(code, os.strerror(code), str(dir))

    monkeypatch.setattr(_cpp.tempfile, "TemporaryDirectory", refuse)
    check_that_torch_serves(f"{os.strerror(code)}.*kernels.* .MINICHUNK_CACHE can name another")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_computed_by_torch(dtype):
    assert choose_backend("auto", "cpu", dtype) == "torch"
    for refused in (
        lambda: choose_backend("cpp", "cpu", dtype),
        lambda: swiglu(torch.zeros(1, 4, dtype=dtype), backend="cpp"),
    ):
        with pytest.raises(ValueError, match=f"bfloat16 or float32, not in {dtype}; use .*'torch'"):
            refused()


def test_tensors_elsewhere_than_on_the_cpu_are_refused():
    with pytest.raises(ValueError, match="the tensors are on meta; use 'triton' or 'torch'"):
        runs_on_cpp("cpp", torch.zeros(1, device="meta"))
    assert not runs_on_cpp("torch", torch.zeros(1, device="meta"))


@needs_compiler
def test_one_kernel_may_fail_and_be_built_later(fake_compiler):
    compiler = shutil.which("g++")
    assert choose_backend("auto", "cpu", torch.bfloat16) == "cpp"
    fake_compiler("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1")
    with pytest.raises(CompileError, match=r"kernel rms_norm cannot be built: .* Killed "):
        library("rms_norm", torch.bfloat16)
    fake_compiler(f'exec {compiler} "$@"')
    assert library("rms_norm", torch.bfloat16).rms_norm
