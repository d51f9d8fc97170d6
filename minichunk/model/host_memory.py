"""Keeps freed memory in the process, so that the next step's activations need not be paged in.

glibc gives large blocks back to the system as soon as they are freed, and every page of a fresh one
costs a fault when it is first written: on a prefill step of 2,000 tokens a third of all the time.
Other engines preload another allocator for it; asking glibc is enough.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_BLOCK = 2**30  # larger ones, such as the KV cache, still come from the system directly
KEPT = 2**31 - 1  # bytes of freed memory at the end of the heap that are not given back
MORE = 2**26  # bytes by which the heap grows at a time


def keep_freed_memory() -> bool:
    """Ask glibc's allocator, for the whole process; False where there is none."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Older versions of glibc refuse a threshold above 32 MiB.
    enough = mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) or mallopt(M_MMAP_THRESHOLD, 2**25)
    return bool(enough and mallopt(M_TRIM_THRESHOLD, KEPT) and mallopt(M_TOP_PAD, MORE))
