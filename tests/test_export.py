"""Export: what a configuration becomes elsewhere, and that nothing is dropped in silence."""

from __future__ import annotations

import ast
import random
import shlex

import pytest
import yaml

from minichunk.core.config import EngineConfig
from minichunk.core.orders import REGISTRY as ORDERS
from minichunk.core.policies import REGISTRY as POLICIES
from minichunk.export import ENGINES, Export, export


def flags(result: Export) -> dict[str, str]:
    """The command's flags with their values ("" for a switch); each may appear once."""
    words = shlex.split(result.command.replace("\\\n", " "))
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in found
            found[word] = "" if following.startswith("--") else following
    return found


def test_vllm_gets_budget_chunk_and_block_flags() -> None:
    config = EngineConfig(max_num_batched_tokens=1024, chunk_size=512, block_size=32, num_blocks=77)
    found = flags(export(config, "vllm", "some/model"))
    assert found["--max-num-batched-tokens"] == "1024"
    assert found["--long-prefill-token-threshold"] == "512"
    assert found["--block-size"] == "32"
    assert found["--num-gpu-blocks-override"] == "77"
    assert found["--scheduling-policy"] == "fcfs"
    assert "--enable-chunked-prefill" in found
    assert not export(config, "vllm").not_expressed


def test_vllm_accepts_no_more_sequences_than_tokens() -> None:
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=256)
    assert flags(export(config, "vllm"))["--max-num-seqs"] == "64"


def test_whole_prompts_switch_chunked_prefill_off_everywhere_it_can_be() -> None:
    config = EngineConfig(policy="continuous")
    assert "--no-enable-chunked-prefill" in flags(export(config, "vllm"))
    sglang = flags(export(config, "sglang"))
    assert sglang["--chunked-prefill-size"] == "-1"
    assert "--enable-mixed-chunk" not in sglang
    files = export(config, "tensorrt-llm").files
    assert yaml.safe_load(files["config.yaml"])["enable_chunked_prefill"] is False


def test_sglang_mixes_chunks_with_decodes_for_decode_first() -> None:
    found = flags(export(EngineConfig(max_num_batched_tokens=300), "sglang"))
    assert found["--chunked-prefill-size"] == "300"
    assert "--enable-mixed-chunk" in found


def test_tensorrt_llm_gets_a_file_that_is_yaml() -> None:
    config = EngineConfig(block_size=64, num_blocks=10, prefix_caching=False, policy="static")
    content = yaml.safe_load(export(config, "tensorrt-llm").files["config.yaml"])
    assert content["kv_cache_config"] == {
        "enable_block_reuse": False,
        "tokens_per_block": 64,
        "max_tokens": 640,
    }
    assert content["scheduler_config"]["capacity_scheduler_policy"] == "STATIC_BATCH"


def test_deepspeed_gets_a_file_that_is_python() -> None:
    config = EngineConfig(max_num_batched_tokens=768, max_model_len=4096)
    script = export(config, "deepspeed", "it's/a model").files["serve.py"]
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    given = {key.arg: ast.literal_eval(key.value) for key in calls[0].keywords}
    assert given["max_ragged_batch_size"] == 768
    assert given["max_context"] == 4096
    assert ast.literal_eval(calls[1].args[0]) == "it's/a model"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_knob_is_either_in_the_export_or_named_as_lost(
    engine: str, rng: random.Random
) -> None:
    names = (
        "max_num_batched_tokens",
        "chunk_size",
        "max_num_seqs",
        "max_queued_requests",
        "max_long_partial_prefills",
        "long_prefill_threshold",
        "block_size",
        "max_model_len",
    )
    values = rng.sample(range(1_000, 10_000), len(names))
    knobs = dict(zip(names, values, strict=True))
    knobs["max_num_batched_tokens"] = 20_011  # the most, so that it clips nothing
    result = export(EngineConfig(**knobs), engine)
    said = " ".join([result.command, *result.files.values()])
    lost = " ".join(result.not_expressed)
    for name, value in knobs.items():
        assert str(value) in said or name in lost, name


@pytest.mark.parametrize("engine", ENGINES)
def test_policies_and_orders_that_an_engine_lacks_are_named(engine: str) -> None:
    native = {"vllm": {"decode-first"}, "sglang": {"decode-first"}, "deepspeed": {"decode-first"}}
    for policy in set(POLICIES) - native.get(engine, {"decode-first", "static"}):
        lost = export(EngineConfig(policy=policy), engine).not_expressed
        assert any(policy in note or "max_num_batched_tokens" in note for note in lost), policy
    for order in set(ORDERS) - {"fcfs"}:
        lost = export(EngineConfig(order=order), engine).not_expressed
        assert any(f"order {order}" in note for note in lost), order


def test_a_policy_with_parameters_is_understood() -> None:
    lost = export(EngineConfig(policy="balanced(share=0.3)"), "vllm").not_expressed
    assert lost
    assert "balanced" in lost[0]


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'tgi'; known: vllm, sglang"):
        export(EngineConfig(), "tgi")


def test_a_model_name_is_quoted_for_the_shell() -> None:
    words = shlex.split(export(EngineConfig(), "vllm", "my model").command.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "my model"]
