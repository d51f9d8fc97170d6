"""A modest set of published measurements, as literals, that the cost model is tested against.

Source: the profiling data of Vidur (Agrawal et al., MLSys 2024; github.com/microsoft/vidur, MIT
licence). Milliseconds per layer, medians. An A100 is an A100 80 GB PCIe, an H100 an H100 SXM.
"""

from minichunk.sim.calibrate import Measurement
from minichunk.sim.counter import StepLoad
from minichunk.sim.hardware import get_gpu
from minichunk.sim.profiles import attention_load, one_layer

# (gpu, hidden, heads, kv_heads, ffn, tensor_parallel) -> rows -> (matrix products, and with the
# small kernels between them).
LINEAR_MS = {
    ("a100-80g-pcie", 4096, 32, 32, 11008, 1): {
        1: (0.266, 0.292),
        2: (0.258, 0.282),
        4: (0.259, 0.284),
        8: (0.26, 0.285),
        16: (0.263, 0.289),
        32: (0.273, 0.3),
        64: (0.278, 0.305),
        128: (0.3515, 0.3855),
        192: (0.4595, 0.5015),
        256: (0.5025, 0.5605),
        264: (0.6455, 0.7045),
        384: (0.671, 0.742),
        512: (0.953, 1.05),
        520: (1.067, 1.161),
        768: (1.317, 1.448),
        1024: (1.959, 2.135),
        1536: (2.838, 3.113),
        2048: (3.825, 4.2),
        3072: (5.643, 6.197),
        4096: (7.492, 8.226),
    },
    ("a100-80g-pcie", 4096, 32, 8, 14336, 2): {
        1: (0.159, 0.179),
        4: (0.1625, 0.1825),
        16: (0.1685, 0.1885),
        64: (0.168, 0.188),
        192: (0.258, 0.289),
        264: (0.399, 0.444),
        512: (0.515, 0.579),
        768: (0.761, 0.853),
        1536: (1.502, 1.69),
        3072: (3.002, 3.402),
        8192: (8.189, 9.28),
        32768: (31.76, 36.08),
    },
    ("h100-sxm", 4096, 32, 32, 11008, 1): {
        1: (0.156, 0.176),
        2: (0.151, 0.172),
        4: (0.152, 0.173),
        8: (0.152, 0.173),
        16: (0.1605, 0.1825),
        32: (0.159, 0.183),
        64: (0.162, 0.185),
        128: (0.18, 0.201),
        192: (0.2055, 0.2335),
        256: (0.26, 0.289),
        264: (0.265, 0.296),
        384: (0.304, 0.349),
        512: (0.3285, 0.3785),
        520: (0.4345, 0.486),
        768: (0.521, 0.593),
        1024: (0.565, 0.664),
        1536: (0.909, 1.053),
        2048: (1.087, 1.281),
        3072: (1.703, 2.022),
        4096: (2.205, 2.623),
    },
}

# 32 query heads, 4 KV heads, head size 128, on an A100: (phase, batch, new tokens of each) ->
# tokens in the cache of each -> milliseconds.
ATTENTION_MS = {
    ("prefill", 1, 128): {
        0: 0.016,
        256: 0.03,
        512: 0.03,
        768: 0.032,
        1024: 0.04,
        1536: 0.042,
        2048: 0.051,
        2560: 0.059,
        3072: 0.061,
        3584: 0.07,
    },
    ("prefill", 1, 512): {
        0: 0.072,
        256: 0.091,
        512: 0.11,
        768: 0.126,
        1024: 0.148,
        1536: 0.186,
        2048: 0.224,
        2560: 0.261,
        3072: 0.298,
        3584: 0.339,
    },
    ("prefill", 1, 2048): {
        0: 0.681,
        256: 0.721,
        512: 0.762,
        768: 0.799,
        1024: 0.85,
        1536: 0.934,
        2048: 1.027,
    },
    ("decode", 1, 1): {
        32: 0.015,
        288: 0.017,
        544: 0.017,
        800: 0.017,
        1088: 0.017,
        1600: 0.017,
        2112: 0.017,
        2624: 0.017,
        3136: 0.017,
        3648: 0.017,
    },
    ("decode", 8, 1): {
        32: 0.012,
        288: 0.018,
        544: 0.024,
        800: 0.03,
        1088: 0.038,
        1600: 0.043,
        2112: 0.046,
        2624: 0.049,
        3136: 0.053,
        3648: 0.055,
    },
    ("decode", 32, 1): {
        32: 0.012,
        288: 0.022,
        544: 0.037,
        800: 0.053,
        1088: 0.065,
        1600: 0.087,
        2112: 0.11,
        2624: 0.132,
        3136: 0.155,
        3648: 0.176,
    },
    ("decode", 128, 1): {
        32: 0.029,
        288: 0.075,
        544: 0.116,
        800: 0.156,
        1088: 0.196,
        1600: 0.274,
        2112: 0.351,
        2624: 0.431,
        3136: 0.514,
        3648: 0.599,
    },
}


def linear_rows(gpu: str) -> list[Measurement]:
    """Matrix products and small kernels of one layer on that GPU."""
    rows = []
    for (slug, hidden, heads, kv_heads, ffn, split), times in LINEAR_MS.items():
        shape = one_layer(hidden, heads, kv_heads, hidden // heads, ffn)
        for tokens, (linear, total) in times.items() if slug == gpu else ():
            load, device = StepLoad(tokens, 0), get_gpu(slug)
            rows.append(Measurement("linear", shape, device, load, linear / 1e3, split))
            small = (total - linear) / 1e3
            rows.append(Measurement("elementwise", shape, device, load, small, split))
    return rows


def attention_rows() -> list[Measurement]:
    """Attention of one layer on an A100."""
    shape = one_layer(4096, 32, 4, 128, 16384)
    return [
        Measurement(
            f"{phase}_attention",
            shape,
            get_gpu("a100-80g-pcie"),
            attention_load(phase, batch, chunk, prefix),
            ms / 1e3,
        )
        for (phase, batch, chunk), times in ATTENTION_MS.items()
        for prefix, ms in times.items()
    ]
