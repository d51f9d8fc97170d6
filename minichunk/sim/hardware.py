"""GPUs by slug: the few figures of a datasheet that bound what a step can cost.

The cost model starts from these: no step is faster than its floating-point operations at peak rate
or its bytes at peak bandwidth. Their ratio, the ridge, is why decode and prefill complement each
other: decode lies far below it (bandwidth bound), a long chunk far above it (compute bound).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One accelerator. Rates are dense 16-bit peaks from the vendor's datasheet.

    `memory_gib`: a datasheet's "80 GB" of HBM are 80 GiB. `num_processors` are streaming
    multiprocessors (NVIDIA) or compute units (AMD). `link_gbps` is the bandwidth in GB/s per
    direction to a neighbour: half the NVLink total (with its bridge, where a card takes one), or
    PCIe where there is no NVLink.
    """

    slug: str
    name: str
    family: str
    peak_tflops: float
    memory_gbps: float
    memory_gib: float
    num_processors: int
    link_gbps: float

    @property
    def peak_flops(self) -> float:
        """Floating-point operations per second."""
        return self.peak_tflops * 1e12

    @property
    def peak_bandwidth(self) -> float:
        """Bytes per second."""
        return self.memory_gbps * 1e9

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def ridge(self) -> float:
        """Operations per byte above which work is bound by compute and no longer by bandwidth."""
        return self.peak_flops / self.peak_bandwidth


# Sources: the vendors' datasheets and architecture whitepapers (NVIDIA T4, A10, L4, L40S, Ada,
# A40, RTX A6000, A100, H100, H200, Blackwell; AMD Instinct MI300X). The A10G has half the tensor
# rate of the A10. The RTX 4090 figure is with 32-bit accumulation.
_TABLE = (
    GPU("t4", "T4", "turing", 65, 320, 16, 40, 16),
    GPU("a10g", "A10G", "ampere", 70, 600, 24, 80, 32),
    GPU("l4", "L4", "ada", 121, 300, 24, 58, 32),
    GPU("l40s", "L40S", "ada", 362, 864, 48, 142, 32),
    GPU("rtx-4090", "RTX 4090", "ada", 165.2, 1008, 24, 128, 32),
    GPU("a40", "A40", "ampere", 149.7, 696, 48, 84, 56),
    GPU("a6000", "RTX A6000", "ampere", 154.8, 768, 48, 84, 56),
    GPU("a100-40g-sxm", "A100 40 GB SXM", "ampere", 312, 1555, 40, 108, 300),
    GPU("a100-80g-pcie", "A100 80 GB PCIe", "ampere", 312, 1935, 80, 108, 300),
    GPU("a100-80g-sxm", "A100 80 GB SXM", "ampere", 312, 2039, 80, 108, 300),
    GPU("h100-sxm", "H100 SXM", "hopper", 989, 3350, 80, 132, 450),
    GPU("h200-sxm", "H200 SXM", "hopper", 989, 4800, 141, 132, 450),
    GPU("b200-sxm", "B200 SXM", "blackwell", 2250, 7700, 180, 148, 900),
    GPU("mi300x", "Instinct MI300X", "cdna3", 1307.4, 5300, 192, 304, 448),
)
GPUS: dict[str, GPU] = {gpu.slug: gpu for gpu in _TABLE}


def get_gpu(gpu: str | GPU) -> GPU:
    """The GPU of that slug; a `GPU` passes through, so one's own card needs no table entry."""
    if isinstance(gpu, GPU):
        return gpu
    if gpu not in GPUS:
        raise ValueError(unknown_slug("gpu", gpu, GPUS))
    return GPUS[gpu]


def unknown_slug(kind: str, slug: object, known: Iterable[str]) -> str:
    """An error text that offers what was probably meant."""
    known = list(known)
    close = difflib.get_close_matches(str(slug).lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"unknown {kind} {slug!r}: {hint}Known: {', '.join(known)}"
