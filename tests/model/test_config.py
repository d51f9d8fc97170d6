"""Configurations that the decoder would compute wrongly are refused, and code is never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minichunk.llm import LLM
from minichunk.model.config import ModelConfig
from minichunk.model.errors import ModelError
from minichunk.model.loading import backend_for, choose_device, choose_dtype, describe_device

from .tiny import ARCHITECTURES, SIZES, config_of


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    hf = config_of(name)
    config = ModelConfig.from_hf(hf)
    rotary = LlamaRotaryEmbedding(hf)
    assert torch.equal(torch.tensor(config.inv_freq), rotary.inv_freq)
    assert config.rope_scale == rotary.attention_scaling


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None}, "not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
    ],
)
def test_an_unsupported_configuration_is_one_clear_line(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    content = {**config_of("llama").to_dict(), **change}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words) as caught:
        ModelConfig.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_or_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: ...\n")
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with pytest.raises(ModelError, match="evil"):
        LLM(tmp_path, quiet=True)
    content = {**config_of("llama").to_dict(), "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(content))
    ModelConfig.from_folder(tmp_path)
    assert not marker.exists()


def test_a_sliding_window_matters_only_where_it_bites() -> None:
    hf = MistralConfig(**SIZES, sliding_window=128)
    with pytest.raises(ModelError, match="max_model_len=128"):
        LLM(hf, device="cpu", quiet=True, num_blocks=4)
    llm = LLM(hf, device="cpu", quiet=True, num_blocks=4, max_model_len=128)
    assert llm.config.max_model_len == 128
    assert (
        ModelConfig.from_hf(Qwen2Config(**SIZES, use_sliding_window=False)).sliding_window is None
    )


def test_end_of_text_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2, 7)


def test_choices_that_do_not_exist_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match="quantum"):
        choose_device("quantum")
    with pytest.raises(ModelError, match="int3"):
        choose_dtype("int3", cpu)
    with pytest.raises(ModelError, match="cuddly"):
        backend_for("cuddly", cpu, torch.float32)
    assert choose_dtype("fp32", cpu) is torch.float32
    assert backend_for("auto", cpu, torch.float16) == "torch"
    with pytest.raises(ModelError, match=r"not in torch\.float16; use backend='torch'"):
        backend_for("cpp", cpu, torch.float16)


def test_old_gpus_get_float16_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 (compute capability 7.5): no bfloat16, and Triton emits no tensor-core code for it.

    The device numbers are ones that no machine has, since a device's target is looked up once.
    """
    old, new = torch.device("cuda", 98), torch.device("cuda", 99)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (7, 5) if device == old else (8, 0)
    )
    assert choose_dtype("auto", old) is torch.float16
    assert backend_for("auto", old, torch.float16) == "torch"
    with pytest.raises(ModelError, match="float16"):
        backend_for("torch", old, torch.bfloat16)
    assert choose_dtype("auto", new) is torch.bfloat16
    assert backend_for("auto", new, torch.bfloat16) in ("triton", "torch")  # torch: no Triton here


def test_a_measured_trace_names_the_processor_and_its_threads():
    name = describe_device(torch.device("cpu"))
    assert name.startswith("CPU (")
    assert f"{torch.get_num_threads()} thread" in name
