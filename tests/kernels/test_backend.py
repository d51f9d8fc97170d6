"""Which backend serves which GPU, with the GPUs played by a patched capability."""

from __future__ import annotations

import pytest
import torch

from minichunk.kernels import backend
from minichunk.kernels._cpp import cpp_problem
from minichunk.kernels.backend import choose_backend, runs_on_cpp, runs_on_triton


@pytest.fixture
def gpu(monkeypatch):
    """Makes `cuda:0` look like the given target, with a Triton that can launch."""

    def pretend(target: str) -> torch.device:
        monkeypatch.setattr(backend, "target_name", lambda device: target)
        monkeypatch.setattr(backend, "launch_problem", lambda on_cpu: "")
        backend._check_triton.cache_clear()
        return torch.device("cuda:0")

    yield pretend
    backend._check_triton.cache_clear()


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_120", "gfx942"])
def test_auto_is_triton_from_sm_80_up_and_on_rocm(gpu, target):
    assert choose_backend("auto", gpu(target), torch.bfloat16) == "triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_on_a_cpu_is_cpp_where_it_can_be_built(dtype, monkeypatch):
    assert choose_backend("auto", "cpu", dtype) == ("torch" if cpp_problem() else "cpp")
    monkeypatch.setattr(backend, "cpp_problem", lambda: "no compiler")
    assert choose_backend("auto", "cpu", dtype) == "torch"


def test_auto_is_torch_on_a_t4(gpu):
    device = gpu("sm_75")
    assert choose_backend("auto", device, torch.float16) == "torch"
    assert choose_backend("triton", device, torch.float16) == "triton"  # slow, but asked for


def test_auto_is_torch_for_a_dtype_that_the_kernels_do_not_take(gpu):
    assert choose_backend("auto", gpu("sm_90"), torch.float64) == "torch"
    with pytest.raises(ValueError, match=r"float16, bfloat16 or float32, but the tensor is .*64"):
        choose_backend("triton", gpu("sm_90"), torch.float64)


@pytest.mark.parametrize("name", ["auto", "torch", "triton"])
def test_bfloat16_on_a_t4_is_refused(gpu, name):
    with pytest.raises(ValueError, match="bfloat16 needs a GPU from sm_80 up, but cuda:0 is sm_75"):
        choose_backend(name, gpu("sm_75"), torch.bfloat16)


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        ValueError, match="'cuda' is unknown; choose 'auto', 'torch', 'cpp' or 'triton"
    ):
        choose_backend("cuda", "cpu", torch.float32)


def test_cpp_on_a_gpu_is_refused(gpu):
    with pytest.raises(ValueError, match="the tensors are on cuda; use 'triton' or 'torch'"):
        choose_backend("cpp", gpu("sm_90"), torch.float32)


def test_a_call_names_an_implementation(gpu):
    x = torch.zeros(1)
    for name in ("torch", "cpp"):
        assert not runs_on_triton(name, x)
    for name in ("torch", "triton"):
        assert not runs_on_cpp(name, x)
    with pytest.raises(ValueError, match="'auto' is not an implementation"):
        runs_on_triton("auto", x)
    gpu("sm_90")
    assert runs_on_triton("triton", x)
