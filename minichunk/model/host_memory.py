"""The host's memory as a matrix product likes it: in large pages, and kept when it is freed.

A decode step reads all the weights, 65,000 small pages for a model of 270 MB, and looking up where
each page lies can cost more than reading it, most of all inside a virtual machine. And a prefill
step that must fault its activations in anew spends a third of its time on that. Other engines
preload another allocator for this; asking the C library and the kernel is enough.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

# Parameters of mallopt (malloc.h) and advice for madvise (asm-generic/mman-common.h).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
PIECE = 2**29  # bytes; larger blocks, such as a KV cache, come from the system and not the heap
NEVER = 2**31 - 1  # the largest number that mallopt takes
PAGE = 4096


def prepare_heap(num_bytes: int) -> bool:
    """Make the heap `num_bytes` larger, all of it in huge pages, and never give its memory back.

    Nothing is used by that yet: a page comes to be when it is first written. Returns False where
    this is not Linux with glibc, or there is no room; all works as before then, only slower.
    """
    library = _glibc()
    if library is None:
        return False
    for parameter, value in (
        (M_MMAP_THRESHOLD, PIECE),
        (M_TRIM_THRESHOLD, NEVER),
        (M_TOP_PAD, 2**26),
    ):
        if not library.mallopt(parameter, value):
            return False
    size = PIECE - PAGE
    pieces = [library.malloc(size) for _ in range(-(-num_bytes // size))]
    for address in filter(None, pieces):
        library.free(address)  # it stays in the heap, and the next tensors are taken from it
    return all(pieces) and all([advise_huge_pages(*place) for place in _heap()])


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask for huge pages in a range of memory, for what is in use and for what will be."""
    library = _glibc()
    first = -(-address // PAGE) * PAGE
    last = (address + num_bytes) // PAGE * PAGE
    if library is None or first >= last:
        return False
    advised = library.madvise(first, last - first, MADV_HUGEPAGE) == 0
    library.madvise(first, last - first, MADV_COLLAPSE)  # from Linux 6.1; others do it in time
    return advised


def _heap() -> list[tuple[int, int]]:
    """Address and size of each part of the heap."""
    places = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            places.append((first, last - first))
    return places


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libc.so.6")
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):  # another system, or another C library
        return None
    return library
