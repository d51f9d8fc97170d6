"""Huge pages for a CPU's weights: asked for, in processes of their own since the heap is shared."""

import platform
import subprocess
import sys

import pytest

from minichunk.model import host_memory

PREPARED = """
import torch
from minichunk.model.host_memory import advise_huge_pages, prepare_heap
before = torch.arange(3_000_000)
assert prepare_heap(300 * 2**20)
after = torch.arange(60_000_000, dtype=torch.float32)  # 240 MB, below the size of a piece
large = torch.empty(700 * 2**20, dtype=torch.uint8)  # above it: not from the heap
assert advise_huge_pages(large.data_ptr(), large.nbytes)
large.fill_(7)
assert before.sum() == 3_000_000 * 2_999_999 // 2 and after[-1] == 59_999_999
assert int(large[-1]) == 7

def place(tensor):
    address, flags = tensor.data_ptr() + tensor.nbytes // 2, ""
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside, name = low <= address < high, line.split()[-1]
        elif first == "VmFlags:" and inside:
            return name, "hg" in line.split()

assert place(after) == ("[heap]", True), place(after)
name, is_huge = place(large)
assert name != "[heap]" and is_huge, (name, is_huge)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs Linux with glibc")
def test_tensors_lie_in_memory_that_may_have_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_glibc_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(host_memory.ctypes, "CDLL", missing)
    assert not host_memory.prepare_heap(2**20)
    assert not host_memory.advise_huge_pages(2**30, 2**21)


def test_a_range_smaller_than_a_page_is_left_alone() -> None:
    assert not host_memory.advise_huge_pages(2**30 + 1, 100)
