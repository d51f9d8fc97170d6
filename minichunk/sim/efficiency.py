"""How much of a datasheet's peak a real kernel reaches: the cost model's few fitted parameters.

Each number has a physical meaning and one set serves a whole GPU family, so that a model, a GPU or
a chunk size that was never measured is still predicted. `calibrate.py` fits them to measurements,
yours included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Shares of peak rates (0 to 1), and constants in seconds.

    A matrix product takes `launch` plus a smooth maximum of its compute time and its memory time,
    `(a**s + b**s)**(1/s)` with s = `sharpness`: near the ridge it is slower than either bound.

    Prefill attention pays `attention_setup` extra key positions for every query row (loading it,
    rescaling, writing it back), so its efficiency rises with context. Decode attention streams
    the KV cache at `attention_bandwidth` after `attention_latency`, so its efficiency rises with
    batch and context.
    """

    compute: float  # matrix products, of peak operations per second
    bandwidth: float  # matrix products, of peak memory bandwidth
    sharpness: float
    launch: float  # seconds per kernel
    elementwise: float  # normalisation, rotary embedding, activation, residual: of peak bandwidth
    attention_compute: float  # prefill attention, of peak operations per second
    attention_setup: float  # tokens of context
    attention_bandwidth: float  # decode attention, of peak memory bandwidth
    attention_latency: float  # seconds per decode attention kernel
    link: float = 0.7  # all-reduce, of the link's bandwidth
    link_latency: float = 10e-6  # seconds per all-reduce


# Fitted with `calibrate.py` to the profiling data published with Vidur (Agrawal et al., MLSys
# 2024; github.com/microsoft/vidur, MIT licence): linear layers of Llama-2-7B and Llama-3-8B on an
# A100 80 GB PCIe and of Llama-2-7B on an H100; attention of 32 query and 4 KV heads on an A100.
# That attention kernel seems to compute the masked half of a chunk's own square as well: its rows
# of 2,048 tokens without a prefix take 1.3 times as long as predicted here. Kernels that skip the
# masked half, as FlashAttention-2 does, have no such excess, so it is not modelled.
AMPERE = Efficiency(
    compute=0.726,
    bandwidth=0.85,
    sharpness=1.8,
    launch=3.9e-6,
    elementwise=0.53,
    attention_compute=0.43,
    attention_setup=1100.0,
    attention_bandwidth=0.77,
    attention_latency=16e-6,
)
# Attention was not measured on an H100: its shares are Ampere's.
HOPPER = Efficiency(
    compute=0.803,
    bandwidth=0.892,
    sharpness=1.39,
    launch=4.0e-6,
    elementwise=0.61,
    attention_compute=0.43,
    attention_setup=1100.0,
    attention_bandwidth=0.77,
    attention_latency=16e-6,
)
# Families without measurements here borrow the nearest one's shares: an assumption, not a fit.
# Matrix products on an MI300X reach about half of its peak in public benchmarks.
CDNA3 = Efficiency(
    compute=0.5,
    bandwidth=0.75,
    sharpness=1.37,
    launch=6e-6,
    elementwise=0.5,
    attention_compute=0.25,
    attention_setup=1100.0,
    attention_bandwidth=0.65,
    attention_latency=20e-6,
)
EFFICIENCIES: dict[str, Efficiency] = {
    "turing": AMPERE,
    "ampere": AMPERE,
    "ada": AMPERE,
    "hopper": HOPPER,
    "blackwell": HOPPER,
    "cdna3": CDNA3,
}
