"""The whole engine on a GPU: step times against their floor, with Transformers beside it.

    python -m benchmarks.engine --out benchmarks/results/engine.md    on a GPU
    python -m benchmarks.engine --dry-run                             tiny shapes on a CPU, no times

The floor of a step is the larger of its bytes over the measured copy bandwidth and its operations
over the measured matrix product rate, both counted by the engine's own step counter. Weights are
random: shapes, memory and times are the real ones. Transformers' continuous batching serves the
same prompts with the same lengths in the same precision.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3Config

import minichunk as mc
from benchmarks.kernels import heading, table, write
from benchmarks.kernels_timed import Machine

HEADER = ("what", "ms a step (median, P10 to P90)", "floor", "times the floor", "tokens/s")


@dataclass(frozen=True)
class Sizes:
    """What is served: batches of decodes at a context, and a prompt in chunks beside decodes."""

    batches: tuple[int, ...]
    context: int
    outputs: int
    chunk: int
    long_prompt: int


GPU_SIZES = Sizes(batches=(1, 8, 32, 128), context=1024, outputs=64, chunk=2048, long_prompt=16384)
TINY_SIZES = Sizes(batches=(1, 3), context=20, outputs=6, chunk=16, long_prompt=64)


def shapes(dry_run: bool) -> dict[str, Any]:
    """Transformers configurations with the published shapes, or one that a CPU runs at once."""
    if dry_run:
        tiny = dict(vocab_size=300, hidden_size=96, intermediate_size=128, num_hidden_layers=2)
        heads = dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512)
        return {"tiny": LlamaConfig(**tiny, **heads)}
    return {
        "qwen3-0.6b": Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        ),
        "llama-3-8b": LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32768,
            rope_theta=500000.0,
        ),
    }


def prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def serve(llm: mc.LLM, asked: list[list[int]], outputs: int, **knobs: Any) -> mc.Trace:
    """Serve these prompts to their end on a fresh engine."""
    engine = llm.new_engine(prefix_caching=False, **knobs)
    params = mc.SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    for prompt in asked:
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


def row(what: str, steps: list[Any], machine: Machine) -> tuple[str, ...]:
    """One line of the table; on a CPU the times would mean nothing and are left out."""
    if machine.device.type == "cpu":
        return (what, f"{len(steps)} steps, not timed", "-", "-", "-")
    times = sorted(step.duration for step in steps)
    median = statistics.median(times)
    low, high = times[len(times) // 10], times[-1 - len(times) // 10]
    floor = statistics.median(
        max(step.bytes / machine.bytes_per_second, step.flops / machine.flops_per_second)
        for step in steps
    )
    tokens = statistics.median(step.decode_tokens for step in steps)
    return (
        what,
        f"{median * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})",
        f"{floor * 1e3:.2f} ms",
        f"{median / floor:.2f}",
        f"{tokens / median:,.0f}",
    )


def measure(llm: mc.LLM, sizes: Sizes, machine: Machine, seed: int) -> list[tuple[str, ...]]:
    rng, vocab = random.Random(seed), llm.model_config.vocab_size
    rows = []
    budget = max(sizes.chunk, max(sizes.batches)) + max(sizes.batches)
    for batch in sizes.batches:
        asked = prompts(rng, batch, sizes.context, vocab)
        knobs = dict(max_num_seqs=batch, max_num_batched_tokens=budget)
        serve(llm, asked, 4, **knobs)  # warm-up: graphs are captured, kernels compiled
        trace = serve(llm, asked, sizes.outputs, **knobs)
        steps = [s for s in trace.steps if s.prefill_tokens == 0 and s.num_decodes == batch]
        rows.append(row(f"{batch} decodes at context {sizes.context}", steps, machine))
    batch = sizes.batches[-1]
    asked = [*prompts(rng, batch, sizes.context, vocab), *prompts(rng, 1, sizes.long_prompt, vocab)]
    outputs = sizes.outputs + sizes.long_prompt // sizes.chunk
    knobs = dict(chunk_size=sizes.chunk, max_num_seqs=batch + 1, max_num_batched_tokens=budget)
    serve(llm, asked, 4, **knobs)
    trace = serve(llm, asked, outputs, **knobs)
    steps = [s for s in trace.steps if s.prefill_tokens == sizes.chunk and s.num_decodes == batch]
    rows.append(row(f"a chunk of {sizes.chunk} beside {batch} decodes", steps, machine))
    return rows


def throughput(run: Callable[[], int], machine: Machine) -> str:
    """Output tokens per second of the second of two runs."""
    run()
    started = time.perf_counter()
    tokens = run()
    if machine.device.type == "cpu":
        return f"{tokens} tokens, not timed"
    return f"{tokens / (time.perf_counter() - started):,.0f}"


def side_by_side(
    name: str, config: Any, llm: mc.LLM, sizes: Sizes, machine: Machine, seed: int
) -> list[tuple[str, str]]:
    """The same prompts to their end: minichunk, then Transformers' continuous batching."""
    batch = sizes.batches[-1]
    asked = prompts(random.Random(seed), batch, sizes.context, config.vocab_size)

    def ours() -> int:
        trace = serve(llm, asked, sizes.outputs, max_num_seqs=batch)
        return sum(len(record.token_times) for record in trace.requests.values())

    cells = [(f"{name}: minichunk", throughput(ours, machine))]
    llm.executor.release()
    model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype).to(machine.device).eval()
    wanted = GenerationConfig(max_new_tokens=sizes.outputs, do_sample=False, eos_token_id=-1)

    def theirs() -> int:
        done = model.generate_batch(inputs=asked, generation_config=wanted)
        return sum(len(result.generated_tokens) for result in done.values())

    cells.append((f"{name}: Transformers, continuous batching", throughput(theirs, machine)))
    return cells


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="", help="qwen3-0.6b,llama-3-8b")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, no times")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="write a Markdown file, as in benchmarks/results/")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU here: nothing can be timed; --dry-run runs tiny shapes", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    machine = Machine.measure(device)
    where = "dry run on a CPU" if options.dry_run else torch.cuda.get_device_name()
    sizes = TINY_SIZES if options.dry_run else GPU_SIZES
    text = [f"# The engine against its floor\n\n{heading(where)}, seed {options.seed}."]
    chosen = [name for name in options.shapes.split(",") if name]
    for name, config in shapes(options.dry_run).items():
        if chosen and name not in chosen:
            continue
        llm = mc.LLM(config, device=device.type, dtype=machine.dtype, quiet=True)
        text.append(table((name, *HEADER[1:]), measure(llm, sizes, machine, options.seed)))
        print(text[-1], flush=True)
        beside = side_by_side(name, config, llm, sizes, machine, options.seed)
        text.append(table(("the same prompts to their end", "output tokens/s"), beside))
        print(text[-1], flush=True)
        del llm
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.out:
        write(options.out, "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
