# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 01 · Two phases: prefill and decode
#
# **Time:** 45 minutes · **Needs:** PyTorch, and what a transformer layer computes. No GPU.
#
# After this notebook you can
#
# 1. measure prefill and decode on your own machine, and say what a token costs in each;
# 2. compute the arithmetic intensity of a step, and place it on a roofline;
# 3. say for a given GPU which of the two phases waits for memory, and how many tokens a step needs
#    before it no longer does.

# %%
import math
import time

import matplotlib.pyplot as plt
import torch

import minichunk as mc
from minichunk.compare import Table
from minichunk.labs import check
from minichunk.labs.result import is_fast
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.sim.hardware import GPUS
from minichunk.sim.shapes import MODELS
from minichunk.viz.figures import roofline_figure

# %% [markdown]
# ## One answer, step by step
#
# A language model answers in two phases. In **prefill** it computes all tokens of the prompt: it
# knows them all, so they go through the network side by side. The last of them yields the first
# token of the answer. In **decode** each further token depends on the one before it, so they come
# one by one.
#
# The engine below does one *step* per call of `step()`: one pass through the network. The prompt's
# keys and values stay in the KV cache, so a decode step computes a single token.
#
# **Predict**: the first step computes a whole prompt, each later one a single token. How many
# times as long does the first one take? (The cell prints the prompt's length; guess a *ratio of
# times*, and the milliseconds per token of each phase.)

# %%
llm = mc.LLM("smollm2-135m", quiet=True)
prompt_tokens, answer_tokens = (48, 3) if is_fast() else (256, 8)


def answer(prompt_tokens: int, answer_tokens: int) -> mc.Trace:
    """One request from its first step to its last."""
    engine = llm.new_engine(policy="continuous", max_num_batched_tokens=1024)
    prompt = [100 + i for i in range(prompt_tokens)]
    params = mc.SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


# %%
answer(prompt_tokens, 2)  # once to warm up: the first use of a shape is slow
trace = answer(prompt_tokens, answer_tokens)
Table(
    [
        {
            "step": number,
            "phase": "prefill" if step.prefill_tokens else "decode",
            "tokens": (tokens := step.prefill_tokens + step.decode_tokens),
            "ms": round(step.duration * 1e3, 1),
            "ms per token": round(step.duration * 1e3 / tokens, 2),
        }
        for number, step in enumerate(trace.steps)
    ]
)

# %% [markdown]
# Look at the last column. The network is the same, each token meets the same weights, and yet a
# token of the prompt is cheaper than a token of the answer. By which factor on your machine? And
# is the first step's time anywhere near (prompt tokens) × (a decode step's time)?
#
# ## Exercise 1: where did the time go? (5 minutes, easy)
#
# Write `time_by_phase(steps)`: the seconds spent in steps that compute prompt tokens, and the
# seconds spent in steps that only decode. A step has `duration`, `prefill_tokens` and
# `decode_tokens`. Later in the course a step may have both kinds; count it as prefill.


# %%
# Exercise time-by-phase (5 minutes, easy)
def time_by_phase(steps) -> tuple[float, float]:
    raise NotImplementedError


# %%
check.time_by_phase(time_by_phase)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two sums over `steps`, with one condition and its opposite.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: time-by-phase -->
# ```python
# def time_by_phase(steps) -> tuple[float, float]:
#     prefill = sum(step.duration for step in steps if step.prefill_tokens)
#     decode = sum(step.duration for step in steps if not step.prefill_tokens)
#     return prefill, decode
# ```
# </details>

# %% [markdown]
# ## What a step asks of the hardware
#
# Two things can keep a processor busy: doing arithmetic, and moving data between memory and the
# arithmetic units. The engine counts both for every step, from the model's shape alone:
# floating-point operations, and bytes read or written. Their quotient is the step's **arithmetic
# intensity**.
#
# **Predict**: which of the two numbers differs more between the prefill step and a decode step,
# the operations or the bytes?

# %%
Table(
    [
        {
            "step": name,
            "operations": f"{step.flops:.3g}",
            "bytes": f"{step.bytes:.3g}",
            "operations per byte": round(step.flops / step.bytes, 2),
        }
        for name, step in (("prefill", trace.steps[0]), ("decode", trace.steps[-1]))
    ]
)

# %% [markdown]
# A step reads every weight of the model once, whether one token passes through it or hundreds. The
# operations grow with the tokens; of the bytes only activations and the cache do. So a decode step
# carries all the weights to the arithmetic units and does a single multiplication and addition with
# each.
#
# ## The roof of your machine
#
# Take one matrix out of such a model and let *n* rows (tokens) pass through it, for n from 1 to a
# few hundred.
#
# **Predict**: from 1 row to 16 rows there is 16 times the arithmetic. How many times the time?

# %%
size = 1024 if is_fast() else 2048
weights = torch.randn(size, 2 * size)
rows = [1, 2, 4, 8, 16, 32, 64] if is_fast() else [1, 2, 4, 8, 16, 32, 64, 128, 256]


def fastest(function, repeats: int = 8) -> float:
    """The shortest of some runs: what the machine can do when nothing else disturbs it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


# %%
measured = []
for n in rows:
    x = torch.randn(n, size)
    seconds = fastest(lambda x=x: x @ weights)
    flops = 2 * n * weights.numel()
    moved = 4 * (weights.numel() + n * 3 * size)  # float32: weights, input, output
    measured.append((n, flops / moved, flops / seconds, seconds))
Table(
    [
        {"rows": n, "operations per byte": round(i, 1), "ms": round(s * 1e3, 2),
         "10⁹ operations/s": round(rate / 1e9, 1)}
        for n, i, rate, s in measured
    ]
)  # fmt: skip

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
axis.loglog([i for _, i, _, _ in measured], [r for _, _, r, _ in measured], "o-", label="measured")
best = max(rate for _, _, rate, _ in measured)
axis.axhline(best, color="k", ls="--", lw=1, label="the best rate seen")
axis.set(xlabel="operations per byte", ylabel="operations per second", title="one matrix, n rows")
axis.legend()
plt.show()

# %% [markdown]
# Where reading the matrix is what takes the time, more rows cost little and the rate grows with
# them. Where the arithmetic units are busy, the rate is flat and the time grows with the rows.
# Which rows of your table belong to which part? Is 16 times the work 16 times the time? (The curve
# is bent by more than the two limits: a single row may go through a routine of its own, a few cores
# are busy from few rows on, and a machine may have other things to do.)
#
# This shape is the **roofline** (Williams, Waterman and Patterson, *Roofline*, CACM 2009): a
# program with intensity *i* runs at most at `min(i × bandwidth, peak)`. The two lines meet at the
# **ridge**, `peak / bandwidth` operations per byte.
#
# ## GPUs
#
# The datasheets give both numbers. Weights are stored in 2 bytes, and each costs 2 operations
# per token, so a step whose bytes are mostly weights has about as many operations per byte as it
# has tokens.
#
# **Predict**: an A100 computes 312 × 10¹² operations per second and reads 2 × 10¹² bytes per
# second. How many requests would have to decode together to use its arithmetic units fully?

# %%
Table(
    [
        {
            "gpu": gpu.name,
            "peak (10¹²/s)": gpu.peak_tflops,
            "bandwidth (10¹² B/s)": gpu.memory_gbps / 1e3,
            "ridge (operations per byte)": math.ceil(gpu.ridge),
        }
        for gpu in GPUS.values()
    ]
)

# %% [markdown]
# ## Exercise 2: tokens to the ridge (10 minutes, easy)
#
# Write `tokens_to_ridge(gpu, bytes_per_weight)`: the smallest number of tokens in a step for which
# the matrix products take at least as long to compute as their weights take to read. Count only
# weights as bytes. `gpu` has `peak_flops` and `peak_bandwidth`. What do 8-bit weights change?


# %%
# Exercise tokens-to-ridge (10 minutes, easy)
def tokens_to_ridge(gpu, bytes_per_weight: float) -> int:
    raise NotImplementedError


# %%
check.tokens_to_ridge(tokens_to_ridge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For one weight: reading takes `bytes_per_weight / peak_bandwidth`, computing n tokens takes
# `2 * n / peak_flops`. `math.ceil` rounds up.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: tokens-to-ridge -->
# ```python
# def tokens_to_ridge(gpu, bytes_per_weight: float) -> int:
#     return math.ceil(gpu.peak_flops / gpu.peak_bandwidth * bytes_per_weight / 2)
# ```
# </details>

# %% [markdown]
# ## Why a bigger batch is not enough
#
# So put a few hundred requests into each decode step? The weights are shared by the batch; but
# each request also reads its *own* keys and values, all of them, in every step.
#
# ## Exercise 3: intensity of a decode step (15 minutes, medium)
#
# Write `decode_intensity(shape, batch, context)`: operations per byte of a step in which `batch`
# requests decode one token each, with `context` tokens in the cache each. Count
#
# - matrix products: 2 operations per weight and token; each weight is 2 bytes, read once per step;
# - attention: 4 operations per element of the query, per layer and cached token; all keys and
#   values of a token are `shape.kv_bytes_per_token` bytes (all layers together).
#
# `shape` also has `linear_params`, `query_size` and `num_layers`.


# %%
# Exercise decode-intensity (15 minutes, medium)
def decode_intensity(shape, batch: int, context: int) -> float:
    raise NotImplementedError


# %%
check.decode_intensity(decode_intensity)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write the four numbers down first: two kinds of operations, two kinds of bytes. Only the weights'
# bytes do not grow with the batch.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: decode-intensity -->
# ```python
# def decode_intensity(shape, batch: int, context: int) -> float:
#     products = 2 * shape.linear_params * batch
#     attention = 4 * shape.query_size * shape.num_layers * batch * context
#     weights = 2 * shape.linear_params
#     keys_and_values = shape.kv_bytes_per_token * batch * context
#     return (products + attention) / (weights + keys_and_values)
# ```
# </details>

# %% [markdown]
# **Predict**: with 2,000 tokens of context each, how many requests does Llama-2-7B need in a
# decode step to reach the A100's ridge? The cell uses the engine's counter, which counts
# activations, too.

# %%
cost_model = CostModel("llama-2-7b", "a100-80g-sxm")


def counted_intensity(batch: int, context: int) -> float:
    """Operations per byte of a step that decodes `batch` requests."""
    load = StepLoad(batch, batch, num_decodes=batch, decode_context=batch * context)
    parts = cost_model.counter.count(load)
    return sum(part.flops for part in parts) / sum(part.bytes for part in parts)


batches = [1, 4, 16, 64, 256, 1024, 4096]
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for context in (100, 500, 2000, 8000):
    values = [counted_intensity(b, context) for b in batches]
    axis.loglog(batches, values, "o-", label=f"context {context:,}")
axis.axhline(GPUS["a100-80g-sxm"].ridge, color="k", ls="--", lw=1, label="ridge of the A100")
axis.set(xlabel="requests in the step", ylabel="operations per byte", title="decode, Llama-2-7B")
axis.legend()
plt.show()

# %% [markdown]
# With a long context the curve flattens far below the ridge: almost all bytes are then keys and
# values, and each of them is used for one token only. No number of requests helps. (How many would
# fit into the memory is another question: notebook 02.)
#
# A curve flattens where the weights no longer count: there it is one token's operations over the
# bytes of one request's keys and values. The longer the context, the closer that comes to the
# intensity of attention alone. In Llama-2-7B each query head has its own keys; where a group of
# query heads shares them, each key is used more often.

# %%
for slug in ("llama-2-7b", "llama-3-8b", "qwen2.5-7b"):
    shape = MODELS[slug]
    attention = 4 * shape.query_size * shape.num_layers / shape.kv_bytes_per_token
    group = shape.num_heads // shape.num_kv_heads
    print(f"{slug:12} {group} query heads per KV head: {attention:.0f} operations per byte of KV")

# %% [markdown]
# ## Both phases under one roof
#
# Now a whole run on a simulated A100: ten requests decode when a prompt of 8,000 tokens arrives,
# in chunks of 1,000. Each dot is a step; notebook 06 explains the chunks.
#
# **Predict**: on which side of the ridge (the corner of the line) lie the decode-only steps, and
# on which the steps with a chunk?

# %%
scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
run = mc.simulate(
    scene, policy="decode-first", chunk_size=1000, max_num_batched_tokens=1024,
    model="llama-2-7b", gpu="a100-80g-sxm",
)  # fmt: skip
roofline_figure(run)

# %% [markdown]
# ## How idle is "idle"?
#
# A textbook chapter on this subject says that pure decode leaves 30% of the arithmetic idle.
#
# **Predict**: what share of the A100's peak arithmetic does a decode step of 32 requests use? And
# a prefill of 1,000 tokens: what share of the *bandwidth*?


# %%
def use(name: str, load: StepLoad) -> dict[str, str]:
    parts, gpu = cost_model.parts(load), cost_model.gpu
    flops, moved, seconds = (
        sum(getattr(part, key) for part in parts) for key in ("flops", "bytes", "seconds")
    )
    return {
        "step": name, "ms": f"{seconds * 1e3:.1f}",
        "of peak arithmetic": f"{flops / seconds / gpu.peak_flops:.0%}",
        "of peak bandwidth": f"{moved / seconds / gpu.peak_bandwidth:.0%}",
    }  # fmt: skip


n, context = 1000, 500
prompt = dict(prefill_tokens=n, prefill_pairs=n * (n + 1) / 2, prefill_context=n)
loads = {
    f"decode of {b}": StepLoad(b, b, num_decodes=b, decode_context=b * context)
    for b in (1, 32, 128)
}
loads["prefill of 1,000"] = StepLoad(n, 1, **prompt)
loads["both: 32 + 1,000"] = StepLoad(
    n + 32, 33, **prompt, num_decodes=32, decode_context=32 * context
)
Table([use(name, load) for name, load in loads.items()])

# %% [markdown]
# Compare with your numbers, and with the 30%: in these steps, how much of the arithmetic is idle in
# decode? The two kinds of steps lack opposite things. The last row does both in one step: compare
# its time with the sum of the two rows it is made of. The weights are read once for both. That is
# the idea behind everything from notebook 06 on.
#
# ## Recap
#
# 1. On a GPU, why does a decode step for one request take almost as long as one for four?
# 2. What limits the intensity of decode when contexts are long?
# 3. Weights in 8 bits instead of 16, computed at the same rate: what happens to the number of
#    tokens at the ridge, and to the time of a small decode step?
#
# <details><summary>Answers</summary>
#
# 1. Both read all the weights once, and reading is what takes the time.
# 2. Keys and values are read for one token only: the longer the contexts, the closer the intensity
#    comes to attention's own, which is the number of query heads per KV head (at 16 bits).
# 3. Both halve, as far as weights are what is read.
# </details>
