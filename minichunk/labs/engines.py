"""Checks for notebook 14: other engines' flags, both ways, and a scheduler that is not ours.

Flags are judged by `minichunk.export`, a schedule by the engine itself: two policies are the same
if no step differs.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from minichunk.core.config import EngineConfig
from minichunk.core.diff import diff_traces
from minichunk.core.policies import Policy
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.export import export
from minichunk.labs.result import Wrong, exercise
from minichunk.sim.run import simulate


def flags_of(command: str) -> dict[str, str | None]:
    """The flags of a command line: `--flag value` gives flag → value, a bare one None."""
    words = shlex.split(command.replace("\\\n", " "))
    found: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


def _draw(rng: random.Random) -> EngineConfig:
    budget = rng.choice([256, 512, 1024, 2048, 4096, 8192])
    return EngineConfig(
        policy="decode-first",
        order=rng.choice(["fcfs", "priority"]),
        max_num_batched_tokens=budget,
        chunk_size=rng.choice([None, None, 128, 256]),
        max_num_seqs=rng.choice([64, 128, 512, 1024]),
        prefix_caching=rng.random() < 0.5,
    )


OF_INTEREST = (
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--long-prefill-token-threshold",
    "--scheduling-policy",
)


@exercise("vllm-flags")
def vllm_flags(answer: Callable[[EngineConfig], Mapping[str, str]]) -> str:
    """`answer(config)`: four of vLLM's flags with their values, for a decode-first config."""
    rng = random.Random()
    for _ in range(25):
        config = _draw(rng)
        flags = flags_of(export(config, "vllm").command)
        expected = {flag: flags[flag] for flag in OF_INTEREST if flag in flags}
        got = {flag: str(value) for flag, value in answer(config).items()}
        if got != expected:
            wrong = sorted(
                flag for flag in {*got, *expected} if got.get(flag) != expected.get(flag)
            )
            lines = [f"{f}: you {got.get(f, 'nothing')}, it is {expected.get(f, 'nothing')}"
                     for f in wrong]  # fmt: skip
            raise Wrong(
                f"for order={config.order!r}, max_num_batched_tokens="
                f"{config.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}, "
                f"chunk_size={config.chunk_size}:\n" + "\n".join(lines)
            )
    return "vLLM would start, and do what the configuration says"


@exercise("read-command")
def read_command(answer: Callable[[Mapping[str, str | None]], Mapping[str, Any]]) -> str:
    """`answer(flags)`: the engine knobs that a vLLM command line stands for."""
    rng = random.Random()
    for _ in range(25):
        command = export(_draw(rng), "vllm").command
        flags = flags_of(command)
        knobs = dict(answer(dict(flags)))
        again = flags_of(export(EngineConfig(**knobs), "vllm").command)
        differing = sorted(f for f in {*flags, *again} if flags.get(f, 0) != again.get(f, 0))
        if differing:
            shown = ", ".join(f"{f}: {again.get(f, 'absent')} instead of {flags.get(f, 'absent')}"
                              for f in differing)  # fmt: skip
            raise Wrong(
                f"{command}\n\nYour knobs {knobs} give other flags when they are exported again: "
                f"{shown} ({len(differing)} differ)"
            )
    return "there and back, and nothing was lost"


def chunks_without_mixing(view: Any) -> Any:
    """Chunks of prompts first, whole steps of them; decodes only where no prompt can run."""
    prefilled = 0
    for request in view.prefilling:
        prefilled += yield request, request.num_uncomputed_tokens
    if not prefilled:
        for request in view.decoding:
            yield request, 1


@exercise("unmixed-chunks")
def unmixed_chunks(answer: Callable[..., Any]) -> str:
    """`answer(view)`: chunked prefill without mixing, prompts before decodes."""
    rng = random.Random()
    for _ in range(5):
        workload = [
            RequestSpec(rng.random() * 3.0, PromptShape(rng.randint(20, 4000)), rng.randint(2, 40))
            for _ in range(14)
        ]
        workload.sort(key=lambda spec: spec.arrival)
        options: dict[str, Any] = {
            "model": "llama-2-7b", "gpu": "a100-80g-sxm", "max_num_batched_tokens": 512
        }  # fmt: skip
        mine = simulate(workload, policy=Policy("unmixed", chunks_without_mixing), **options)
        theirs = simulate(workload, policy=Policy("yours", answer), **options)
        both = [i for i, s in enumerate(theirs.steps) if s.prefill_tokens and s.decode_tokens]
        if both:
            step = theirs.steps[both[0]]
            raise Wrong(
                f"step {both[0]} carries {step.prefill_tokens} prompt tokens and "
                f"{step.decode_tokens} decodes: this engine never mixes",
                theirs.timeline(),
            )
        difference = diff_traces(mine, theirs)
        if difference is not None:
            raise Wrong(str(difference), theirs.timeline())
    return "step by step what an engine does that chunks but does not mix"
