"""GPUs and model shapes: the figures that everything else is computed from."""

import pytest

from minichunk.sim.hardware import GPU, GPUS, get_gpu
from minichunk.sim.shapes import MODELS, get_shape

GPU_SLUGS = (
    "t4 a10g l4 l40s rtx-4090 a40 a6000 a100-40g-sxm a100-80g-pcie a100-80g-sxm h100-sxm "
    "h200-sxm b200-sxm mi300x"
)
MODEL_SLUGS = (
    "smollm2-135m qwen2.5-0.5b qwen2.5-7b qwen3-0.6b qwen3-8b llama-2-7b llama-2-13b llama-2-70b "
    "llama-3-8b llama-3-70b llama-33b mistral-7b yi-34b falcon-180b gpt-3-175b"
)
# Parameters in billions as the models' cards give them, and KV bytes per token in bfloat16.
KNOWN_SHAPES = {
    "smollm2-135m": (0.134, 23040),
    "qwen2.5-0.5b": (0.494, 12288),
    "qwen3-0.6b": (0.596, 114688),
    "llama-2-7b": (6.738, 524288),
    "llama-3-8b": (8.030, 131072),
    "mistral-7b": (7.241, 131072),
    "yi-34b": (34.388, 245760),
    "llama-2-70b": (68.975, 327680),
    "falcon-180b": (178.552, 163840),
    "gpt-3-175b": (174.564, 4718592),
}


def test_every_promised_slug_is_known():
    assert set(GPUS) == set(GPU_SLUGS.split())
    assert set(MODELS) == set(MODEL_SLUGS.split())


@pytest.mark.parametrize("slug", KNOWN_SHAPES)
def test_parameters_and_kv_bytes_follow_from_the_widths(slug):
    billions, kv_bytes = KNOWN_SHAPES[slug]
    assert get_shape(slug).num_params / 1e9 == pytest.approx(billions, abs=0.001)
    assert get_shape(slug).kv_bytes_per_token == kv_bytes


def test_the_ridge_of_an_a100_is_153_operations_per_byte():
    assert get_gpu("a100-80g-sxm").ridge == pytest.approx(153.0, abs=0.1)


def test_a_gpu_of_ones_own_needs_no_entry():
    mine = GPU("mine", "Mine", "ampere", 100, 500, 16, 50, 32)
    assert get_gpu(mine) is mine


@pytest.mark.parametrize(
    ("lookup", "typo", "meant"),
    [(get_gpu, "h100", "h100-sxm"), (get_gpu, "A100-80G-SXM", "a100-80g-sxm"),
     (get_shape, "llama2-7b", "llama-2-7b"), (get_shape, "qwen3-06b", "qwen3-0.6b")],
)  # fmt: skip
def test_an_unknown_slug_names_the_close_ones(lookup, typo, meant):
    with pytest.raises(ValueError, match="did you mean") as error:
        lookup(typo)
    assert repr(typo) in str(error.value)
    assert repr(meant) in str(error.value)


def test_a_slug_like_nothing_lists_them_all():
    with pytest.raises(ValueError, match=r"llama-2-7b.*yi-34b"):
        get_shape("###")
