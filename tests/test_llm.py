"""The front door: text and token ids, streams, chats, errors that leave the engine usable."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from minichunk.core.request import SamplingParams
from minichunk.llm import LLM
from minichunk.model.detokenize import REPLACEMENT
from minichunk.model.outputs import params_for

VOCAB_SIZE = 700
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=128,
    initializer_range=0.3,
    eos_token_id=2,
)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def make(backend: str = "auto", **knobs: object) -> LLM:
    options = {"num_blocks": 64, "seed": random.randrange(1000), "check_invariants": True, **knobs}
    return LLM(CONFIG, dtype="float32", device="cpu", backend=backend, quiet=True, **options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def test_text_and_token_ids_in_one_call_keep_their_order(llm: LLM) -> None:
    prompts = ["Once upon a time", [5, 6, 7], "你好 🎉", (9,)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["Once upon a time", None, "你好 🎉", None]
    assert outputs[1].prompt_token_ids == (5, 6, 7)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 12
        assert output.finish_reason == "length"
        whole = llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert output.text.rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)
        assert llm.generate(prompt, GREEDY)[0].token_ids == output.token_ids


def test_one_prompt_or_many(llm: LLM) -> None:
    assert len(llm.generate("text", GREEDY)) == 1
    assert len(llm.generate([3, 4], GREEDY)) == 1
    assert len(llm.generate(["a", "b"], GREEDY)) == 2
    assert llm.generate([], GREEDY) == []


def test_arrays_and_tensors_are_prompts_as_lists_are(llm: LLM) -> None:
    expected = llm.generate([3, 4, 5], GREEDY)[0].token_ids
    for one in (np.array([3, 4, 5]), torch.tensor([3, 4, 5]), list(np.array([3, 4, 5]))):
        assert [output.token_ids for output in llm.generate(one, GREEDY)] == [expected]
        many = llm.generate([one, one], GREEDY)
        assert [output.token_ids for output in many] == [expected, expected]
    for wrong in (None, 5, [None], [1.5]):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(wrong, GREEDY)


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (3, 9)
    ]
    outputs = llm.generate(["a", "b"], params)
    assert [len(output.token_ids) for output in outputs] == [3, 9]
    with pytest.raises(ValueError, match=r"2 prompts.*3"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_metrics_are_those_of_the_trace(llm: LLM) -> None:
    [output] = llm.generate("measure me", GREEDY)
    times = llm.trace.requests[output.request_id].token_times
    metrics = output.metrics
    assert metrics.ttft is not None
    assert metrics.ttft > 0
    assert list(metrics.itl) == [b - a for a, b in pairwise(times)]
    assert metrics.max_itl == max(metrics.itl)
    assert metrics.tpot == pytest.approx(sum(metrics.itl) / 11)
    assert all(step.flops and step.bytes for step in llm.trace.steps)


def test_a_stream_adds_up_to_the_whole_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=random.randrange(2**40))
    [whole] = llm.generate("好", params)
    events = list(llm.stream("好", params))
    assert "".join(event.text for event in events) == whole.text
    assert tuple(event.token_id for event in events) == whole.token_ids
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.finish_reason


def test_streams_can_be_read_in_turns(llm: LLM) -> None:
    apart = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in ("one", "other")]
    pairs = list(zip(llm.stream("one", GREEDY), llm.stream("other", GREEDY), strict=True))
    assert [tuple(event.token_id for event in side) for side in zip(*pairs, strict=True)] == apart


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_closing_a_stream_early_cancels_its_request(num_read: int, llm: LLM) -> None:
    free = llm.engine.scheduler.pool.num_free
    stream = llm.stream("a long answer", SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(num_read):
        next(stream)
    name = list(llm.trace.requests)[-1]
    stream.close()
    assert llm.trace.requests[name].finish_reason == "cancelled"
    assert llm.engine.scheduler.pool.num_free == free
    llm.engine.step()
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_stays_with_its_engine() -> None:
    llm = make()
    expected = llm.generate([3, 4], GREEDY)[0].token_ids
    stream = llm.stream([3, 4], GREEDY)
    llm.engine = llm.new_engine()
    llm.engine.step = lambda: pytest.fail("another engine's step")  # type: ignore[method-assign]
    assert tuple(event.token_id for event in stream) == expected


def test_a_request_cancelled_from_outside_ends_its_stream(llm: LLM) -> None:
    stream = llm.stream("never mind", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    llm.engine.cancel(list(llm.trace.requests)[-1])
    last = list(stream)[-1]
    assert (last.token_id, last.finish_reason) == (None, "cancelled")


def test_a_stop_string_ends_text_and_request(llm: LLM) -> None:
    [free] = llm.generate(
        "tell me", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    )
    start = len(free.text) // 2
    stop = free.text[start : start + 3]  # may begin and end within tokens
    params = replace(GREEDY, max_tokens=30, stop=stop)
    [stopped] = llm.generate("tell me", params)
    assert stopped.text == free.text[: free.text.find(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < 30
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert "".join(event.text for event in llm.stream("tell me", params)) == stopped.text


def test_end_of_text_and_stop_tokens_end_a_request(llm: LLM) -> None:
    [free] = llm.generate([8, 9], GREEDY)
    third = free.token_ids[2]
    params = SamplingParams(
        max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(third,)
    )
    [stopped] = llm.generate([8, 9], params)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    assert stopped.finish_reason == "stop"


IMPOSSIBLE = [
    ([], "empty"),
    ([1] * 128, "max_model_len=128"),
    ([5, VOCAB_SIZE], f"{VOCAB_SIZE}"),
    ([5, -1], "-1"),
]


@pytest.mark.parametrize(("prompt", "words"), IMPOSSIBLE)
def test_an_impossible_request_is_refused_and_the_engine_goes_on(
    prompt: list[int], words: str, llm: LLM
) -> None:
    before = llm.generate([4, 5], GREEDY)[0].token_ids
    with pytest.raises(ValueError, match=words):
        llm.generate([[4, 5], prompt], GREEDY)
    llm.engine.step()
    assert not llm.engine.has_unfinished_requests()  # nor does the possible one linger
    with pytest.raises(ValueError, match=words):
        llm.stream(prompt, GREEDY)
    assert llm.generate([4, 5], GREEDY)[0].token_ids == before


def test_a_prompt_that_never_fits_the_pool_is_refused() -> None:
    small = make(num_blocks=2)
    with pytest.raises(ValueError, match="num_blocks=2"):
        small.generate([[3] * 40], GREEDY)
    [output] = small.generate([[3] * 30], SamplingParams(max_tokens=50, ignore_eos=True))
    assert output.finish_reason == "length"
    assert "block pool" in output.note


def test_outputs_end_at_max_model_len_with_a_note(llm: LLM) -> None:
    [output] = llm.generate([[3] * 120], SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(output.token_ids) == 8
    assert "max_model_len=128" in output.note


def test_generate_works_through_a_bounded_queue() -> None:
    bounded = make(max_queued_requests=2, max_num_seqs=2)
    assert len(bounded.generate([[i] for i in range(3, 13)], GREEDY)) == 10


def test_engine_options_are_checked_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="chunk_sise"):
        llm.new_engine(chunk_sise=4)
    with pytest.raises(ValueError, match="bloc_size"):
        make(bloc_size=4)
    with pytest.raises(ValueError, match="max_model_len=129"):
        llm.new_engine(max_model_len=129)


def test_engines_share_the_model_but_not_the_pool(llm: LLM) -> None:
    llm.generate([[7] * 60], GREEDY)
    engine = llm.new_engine(block_size=4, num_blocks=100, policy="continuous")
    assert engine.trace.requests == {}
    assert engine.scheduler.pool.num_free == 100
    assert engine.trace.meta["policy"] == "continuous"
    assert engine.trace.meta["model"] == "random-llama"
    name = engine.add_request([7] * 60, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.trace.events[1].tokens == 0  # nothing was found in a prefix cache
    tokens = tuple(engine.trace.requests[name].output_token_ids or ())
    assert tokens == llm.generate([[7] * 60], GREEDY)[0].token_ids


def test_a_prefix_is_not_shared_after_another_engine_wrote_over_it() -> None:
    llm = make()
    [before] = llm.generate([[7, 8, 9] * 20], GREEDY)
    other = llm.new_engine()
    other.add_request([3, 4, 5] * 30, GREEDY)
    while other.has_unfinished_requests():
        other.step()
    [after] = llm.generate([[7, 8, 9] * 20], GREEDY)
    assert after.token_ids == before.token_ids
    hits = [event.tokens for event in llm.trace.events if event.kind == "admit"]
    assert hits == [0, 0]
    llm.generate([[7, 8, 9] * 20], GREEDY)  # alone again, it finds its own
    assert llm.trace.events[-2].tokens > 0


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    token_ids = llm.encode_chat(messages)
    text = llm.tokenizer.decode(token_ids)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat(messages, GREEDY).token_ids == llm.generate([token_ids], GREEDY)[0].token_ids


def test_the_logit_gap_names_the_two_likeliest_tokens(llm: LLM) -> None:
    prompt = [5, 6, 7]
    [output] = llm.generate([prompt], GREEDY)
    gap = llm.logit_gap(prompt)
    assert gap.a == output.token_ids[0]
    assert gap.gap >= 0
    reverse = llm.logit_gap(prompt, gap.b, gap.a)
    assert reverse.gap == -gap.gap
    later = llm.logit_gap([*prompt, *output.token_ids[:5]])
    assert later.a == output.token_ids[5]


def test_without_a_tokenizer_token_ids_still_work() -> None:
    bare = LLM(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 99}), quiet=True, num_blocks=8)
    assert bare.tokenizer is None
    [output] = bare.generate([5, 6], GREEDY)
    assert (len(output.token_ids), output.text) == (12, "")
    assert len(list(bare.stream([5, 6], GREEDY))) == 12
    with pytest.raises(ValueError, match="tokenizer"):
        bare.generate("text")
    with pytest.raises(ValueError, match="tokenizer"):
        bare.generate([5], SamplingParams(stop="x"))


def test_a_folder_can_be_given_as_path_or_text(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"config\.json"):
        LLM(tmp_path, quiet=True)
    with pytest.raises(RuntimeError, match=r"config\.json"):
        LLM(str(tmp_path), quiet=True)


@pytest.mark.parametrize("params", [5, {"max_tokens": 5}, [5, 5], "greedy"])
def test_params_of_another_kind_are_refused_by_value(params: object) -> None:
    with pytest.raises(TypeError, match=r"give SamplingParams, e\.g\.") as caught:
        params_for(["a", "b"], params)  # type: ignore[arg-type]
    assert f"params={params!r}" in str(caught.value)
