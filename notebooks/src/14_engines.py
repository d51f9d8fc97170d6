# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 14 · Where next: the engines that people run
#
# **Time:** 40 minutes · **Needs:** notebooks 08 and 09 (policies, Dynamic SplitFuse). No GPU.
# Words: the [glossary](glossary.md).
#
# After this notebook you can
#
# 1. say how vLLM, SGLang, TensorRT-LLM and DeepSpeed share a step between prompts and decodes, in
#    the words of this course;
# 2. translate a configuration into their flags, read a command line back, and name
#    what has no flag;
# 3. tell from a timeline whether an engine that "has chunked prefill" also mixes.

# %%
import minichunk as mc
from minichunk.compare import Table
from minichunk.export import ENGINES, export
from minichunk.labs import check, engines
from minichunk.labs.result import is_fast
from minichunk.workloads import Lengths, poisson

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")

# %% [markdown]
# ## One configuration, four dialects
#
# You have a configuration that suits your service: decodes first, 1,024 tokens a step, at most 256
# tokens of one prompt in it, fair between tenants.
#
# **Predict**: which of these can each of the four engines be told: the policy, the budget, the
# chunk of one request, the order? Make a table of four by four.

# %%
config = mc.EngineConfig(
    policy="decode-first", order="fair", max_num_batched_tokens=1024, chunk_size=256
)
for engine in ENGINES:
    print(f"===== {engine}\n{export(config, engine, model='my/model')}\n")

# %% [markdown]
# The lines under "Cannot be expressed" matter as much as the flags: a flag that exists and means
# something else is worse than none. (The translation is from the engines' documentation of
# mid-2026, which `minichunk/export.py` names; flags change between releases, so check yours.)
#
# The same for every policy of this course: how many things get lost in translation?

# %%
rows = []
for policy in ("continuous", "decode-first", "prefill-first", "split-fuse"):
    row = {"policy": policy}
    for engine in ENGINES:
        lost = export(mc.EngineConfig(policy=policy), engine).not_expressed
        about = [line for line in lost if policy in line]
        row[engine] = "yes" if not about else "not quite"
    rows.append(row)
Table(rows)

# %%
for policy, engine in (("continuous", "vllm"), ("prefill-first", "sglang"),
                       ("split-fuse", "deepspeed")):  # fmt: skip
    lost = export(mc.EngineConfig(policy=policy), engine).not_expressed
    print(f"{engine}:", *(line for line in lost if policy in line), sep="\n    ")

# %% [markdown]
# ## Exercise 1: flags for vLLM (10 minutes, easy)
#
# Write `vllm_flags(config)` for a config whose policy is decode-first: a dict with the values of
# `--max-num-batched-tokens`, `--max-num-seqs`, `--scheduling-policy` (`fcfs` or `priority`) and,
# *only where the config sets a chunk size*, `--long-prefill-token-threshold`. vLLM refuses to start
# if a step has fewer tokens than sequences, so where the config says so, lower the sequences.


# %%
# Exercise vllm-flags (10 minutes, easy)
def vllm_flags(config) -> dict:
    raise NotImplementedError


# %%
check.vllm_flags(vllm_flags)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The fields are `max_num_batched_tokens`, `max_num_seqs`, `order` and `chunk_size`. Values may be
# numbers or strings.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: vllm-flags -->
# ```python
# def vllm_flags(config) -> dict:
#     flags = {
#         "--max-num-batched-tokens": config.max_num_batched_tokens,
#         "--max-num-seqs": min(config.max_num_seqs, config.max_num_batched_tokens),
#         "--scheduling-policy": config.order,
#     }
#     if config.chunk_size is not None:
#         flags["--long-prefill-token-threshold"] = config.chunk_size
#     return flags
# ```
#
# </details>

# %% [markdown]
# ## Exercise 2: and back (15 minutes, medium)
#
# A colleague sends a command line. Write `read_command(flags)`: from vLLM's flags (a dict of flag
# to value, `None` for a bare flag) to the knobs of an `EngineConfig`. It passes if exporting your
# knobs gives the same command again. This is how you *simulate what somebody else runs*.

# %%
command = export(config, "vllm").command
flags = engines.flags_of(command)
print(command, flags, sep="\n\n")


# %%
# Exercise read-command (15 minutes, medium)
def read_command(flags: dict) -> dict:
    raise NotImplementedError


# %%
check.read_command(read_command)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Bare flags say yes or no by their presence: `--enable-prefix-caching` or
# `--no-enable-prefix-caching`. Numbers come as strings. The policy is always `decode-first`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: read-command -->
# ```python
# def read_command(flags: dict) -> dict:
#     knobs = dict(
#         policy="decode-first",
#         order=flags["--scheduling-policy"],
#         max_num_batched_tokens=int(flags["--max-num-batched-tokens"]),
#         max_num_seqs=int(flags["--max-num-seqs"]),
#         block_size=int(flags["--block-size"]),
#         seed=int(flags["--seed"]),
#         prefix_caching="--enable-prefix-caching" in flags,
#     )
#     if "--long-prefill-token-threshold" in flags:
#         knobs["chunk_size"] = int(flags["--long-prefill-token-threshold"])
#     return knobs
# ```
#
# </details>

# %% [markdown]
# ## Chunked is not mixed
#
# SGLang chunks prompts by default, and puts chunks and decodes into one step only with
# `--enable-mixed-chunk` (its server arguments; look at the commands above). Prompts go first.
#
# **Predict**: ten answers stream, a prompt of 8,000 tokens comes, chunks of 1,024, no mixing. How
# long is the longest gap: like one chunk, or like the whole prompt?
#
# ## Exercise 3: chunks without mixing (10 minutes, easy)
#
# Write that policy: prompts get the budget, in chunks; only a step in which no prompt got a token
# serves decodes.


# %%
# Exercise unmixed-chunks (10 minutes, easy)
def unmixed_chunks(view):
    raise NotImplementedError
    yield  # a policy is a generator


# %%
check.unmixed_chunks(unmixed_chunks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# It is `continuous` (notebook 04) without `whole=True`: `granted = yield request, tokens`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: unmixed-chunks -->
# ```python
# def unmixed_chunks(view):
#     prefilled = 0
#     for request in view.prefilling:
#         prefilled += yield request, request.num_uncomputed_tokens
#     if not prefilled:
#         for request in view.decoding:
#             yield request, 1
# ```
#
# </details>

# %%
scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
runs = {
    "whole prompts": dict(policy="continuous", max_num_batched_tokens=8192),
    "chunks, not mixed": dict(policy=engines.chunks_without_mixing, max_num_batched_tokens=1024),
    "chunks, mixed": dict(policy="decode-first", max_num_batched_tokens=1024),
}
both = mc.compare(scene, runs, **A100)
both.table()

# %%
both.timeline()

# %% [markdown]
# Look at the middle pane. The prompt is in eight pieces, and the ten readers see one hole. What
# chunks without mixing buy is bounded activation memory, not smooth answers. So when an engine's
# feature table says "chunked prefill: yes", ask whether it mixes, and in whose favour.
#
# ## Four engines under one load
#
# Each engine's way of sharing a step, on the same load and machine. This compares *schedules*: the
# kernels, the host code and a dozen other things of the real engines are not in it.
#
# **Predict** the row with the shortest P99 gap, and the one with the shortest median TTFT.

# %%
load = poisson(3.5, 40 if is_fast() else 120, prompt=Lengths(700, p90=3000, maximum=8000),
               output=Lengths(120, p90=300), seed=7)  # fmt: skip
ways = {
    "vLLM's way": dict(policy="decode-first", max_num_batched_tokens=2048),
    "SGLang's, default": dict(policy=engines.chunks_without_mixing, max_num_batched_tokens=8192),
    "SGLang's, mixed chunk": dict(policy="decode-first", max_num_batched_tokens=8192),
    "TensorRT-LLM's": dict(policy="decode-first", max_num_batched_tokens=8192),
    "FastGen's": dict(policy="split-fuse(context_per_token=inf)", max_num_batched_tokens=768),
}
mc.compare(load, ways, **A100).table()

# %% [markdown]
# Two rows are equal: a scheduler is its policy and its numbers, whatever the name on the box. (The
# numbers are examples: vLLM's scheduler configuration gives 2,048 as its default and lets the
# engine's arguments replace it by use and hardware, SGLang's documentation gives 8,192 as a common
# chunk; FastGen's 768 is the budget of the simulation in notebook 13.)
#
# ## What they have that minichunk has not
#
# What you learnt is the step. Around it, the engines have much that this course leaves out:
#
# | idea | where to read | what it changes about the step |
# |---|---|---|
# | prefill and decode on two GPUs | DistServe (OSDI 2024) | no mixing at all; KV travels |
# | a radix tree of prefixes | SGLang (NeurIPS 2024) | who goes first: the longest shared prefix |
# | speculative decoding | Leviathan et al. (ICML 2023) | a decode has n > 1 tokens, guesses |
# | KV offload and transfer | Mooncake (FAST 2025) | a hit may be on another machine |
# | asynchronous scheduling | the engines' source | step n + 1 is planned while step n runs |
#
# The plan of a step as plain data, `num_computed_tokens` chasing `num_tokens`, survives most of
# these. Read next: vLLM's `vllm/v1/core/sched/scheduler.py` with this course beside
# it. You will recognise the loop over `running`, the token budget, the preemption, and the queue.
#
# ## Recap
#
# 1. Your team's SGLang server has chunked prefill on, and streams still freeze. What do you check?
# 2. Which of your knobs has no flag in any of the four engines?
# 3. You want Dynamic SplitFuse weighed by context on vLLM. What can you do?
#
# <details><summary>Answers</summary>
#
# 1. Whether chunks are mixed with decodes (`--enable-mixed-chunk`), then the chunk's size.
# 2. Fairness between tenants (`order="fair"`), for one: look for "order" in the first output.
# 3. Not by flags: its scheduler counts tokens. Write a scheduler class of your own, or choose the
#    budget for the worst context.
#
# </details>
