"""The checks of notebook 14 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

import pytest

from minichunk.core.config import EngineConfig
from minichunk.export import export
from minichunk.labs import check, engines
from tests.labs.wrong_answers import assert_all_wrong

NOTEBOOK = "14_engines"


@pytest.mark.parametrize("name", ["vllm-flags", "read-command", "unmixed-chunks"])
def test_solutions_pass(solution, name) -> None:
    result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
    assert result.passed, str(result)


def _flags(config, **changed):
    flags = {
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-num-seqs": min(config.max_num_seqs, config.max_num_batched_tokens),
        "--scheduling-policy": config.order,
    }
    if config.chunk_size is not None:
        flags["--long-prefill-token-threshold"] = config.chunk_size
    return {**flags, **changed}


def test_vllm_flags_shows_the_flag_that_differs() -> None:
    results = assert_all_wrong(
        check.vllm_flags,
        {
            "more sequences than tokens": lambda c: _flags(c, **{"--max-num-seqs": c.max_num_seqs}),
            "always a threshold": lambda c: _flags(
                c, **{"--long-prefill-token-threshold": c.chunk_size or 0}
            ),
            "always fcfs": lambda c: _flags(c, **{"--scheduling-policy": "fcfs"}),
            "the chunk as the budget": lambda c: _flags(
                c, **{"--max-num-batched-tokens": c.chunk_size or c.max_num_batched_tokens}
            ),
        },
    )
    assert all("--" in result.message for result in results)


def _knobs(flags, **changed):
    knobs = {
        "policy": "decode-first",
        "order": flags["--scheduling-policy"],
        "max_num_batched_tokens": int(flags["--max-num-batched-tokens"]),
        "max_num_seqs": int(flags["--max-num-seqs"]),
        "prefix_caching": "--enable-prefix-caching" in flags,
    }
    threshold = flags.get("--long-prefill-token-threshold")
    if threshold is not None:
        knobs["chunk_size"] = int(threshold)
    return {**knobs, **changed}


def test_read_command_shows_what_was_lost() -> None:
    def forgets_the_threshold(flags):
        return _knobs(flags, chunk_size=None)

    def takes_presence_for_the_value(flags):
        return _knobs(flags, prefix_caching=flags.get("--enable-prefix-caching") is not None)

    def another_policy(flags):
        return _knobs(flags, policy="continuous")

    assert_all_wrong(
        check.read_command,
        {
            "no chunk size": forgets_the_threshold,
            "a bare flag has no value": takes_presence_for_the_value,
            "continuous": another_policy,
        },
    )


def test_unmixed_chunks_shows_the_step() -> None:
    def fills_up_with_decodes(view):
        for request in view.prefilling:
            yield request, request.num_uncomputed_tokens
        for request in view.decoding:
            yield request, 1

    def alternates(view):
        view.state["turn"] = not view.state.get("turn", False)
        prefilled = 0
        if view.state["turn"] or not view.decoding:
            for request in view.prefilling:
                prefilled += yield request, request.num_uncomputed_tokens
        if not prefilled:
            for request in view.decoding:
                yield request, 1

    def one_prompt_a_step(view):
        prefilled = 0
        for request in view.prefilling:
            prefilled += yield request, request.num_uncomputed_tokens
            break
        if not prefilled:
            for request in view.decoding:
                yield request, 1

    results = assert_all_wrong(
        check.unmixed_chunks,
        {
            "decodes in the rest": fills_up_with_decodes,
            "turns": alternates,
            "one prompt a step": one_prompt_a_step,
        },
    )
    assert all(result.picture is not None for result in results)


def test_flags_are_read_as_a_shell_reads_them() -> None:
    command = export(EngineConfig(max_num_batched_tokens=512), "vllm", model="a model").command
    flags = engines.flags_of(command)
    assert flags["--max-num-batched-tokens"] == "512"
    assert flags["--enable-chunked-prefill"] is None
    assert len(flags) == command.count("--")
