# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 07 · Choosing a chunk size: overhead against stall
#
# **Time:** 50 minutes · **Needs:** notebook 06 (chunked prefill). No GPU.
#
# After this notebook you can
#
# 1. draw the trade between the longest gap and the time to first token, for chunks of 64 to 8,192;
# 2. split what small chunks cost into launches, weights read again and keys and values read again;
# 3. choose a chunk size for a promise to users, a model and a GPU, and know when it is odd by a
#    tile.

# %%
import math

import matplotlib.pyplot as plt

import minichunk as mc
from minichunk.compare import Table
from minichunk.labs import check
from minichunk.labs.chunk_size import step_seconds
from minichunk.labs.result import is_fast
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad
from minichunk.viz import figures

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
PROMPT = 8000

# %% [markdown]
# ## The trade
#
# The scene of notebooks 05 and 06: ten answers stream, a prompt of 8,000 tokens arrives. Now the
# chunk size runs from 64 to 8,192, where the prompt is one piece.
#
# **Predict**, for chunks of 64 against the whole prompt:
#
# - the longest gap of the ten, in milliseconds;
# - by what factor the newcomer's first token (TTFT) comes later;
# - the time until *everybody* has finished: longer or shorter?

# %%
scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=PROMPT)
traces = {}
for size in SIZES:
    knobs = dict(policy="decode-first", chunk_size=size, max_num_batched_tokens=size + 10)
    traces[f"{size:,}"] = mc.simulate(scene, **knobs, **A100)

# %%
rows = []
for name, trace in traces.items():
    metrics = trace.metrics()
    rows.append(
        {
            "chunk": name,
            "steps": metrics.num_steps,
            "longest gap (ms)": round(metrics.itl.max * 1e3, 1),
            "stalls": metrics.num_stalls,
            "newcomer's TTFT (s)": round(metrics.requests["10"].ttft, 3),
            "all done (s)": round(metrics.duration, 3),
        }
    )
Table(rows)

# %%
figures.tradeoff_figure(traces)

# %% [markdown]
# From the right: each halving of the chunk about halves the longest gap, and for a while the
# newcomer hardly notices. Then the curve turns: below some size the gap shrinks less and less, and
# the first token runs away. Mark the size at which you would stop.
#
# Did the last column surprise you? The prefill itself takes longer in small chunks, and yet all is
# done *earlier*. The ten need their 200 or so steps anyway, each of which reads all the weights;
# spread over many of these steps, the prompt rides with them. It is the newcomer who pays, not the
# server. This holds as long as somebody decodes. For the costs themselves, look at a prompt that
# is alone.

# %% [markdown]
# ## What a small chunk costs
#
# Cutting a prompt into chunks leaves the multiplications what they are. Three things are paid per
# step, and so again with each chunk:
#
# - **launches**: the software's work per step, and the start of each kernel of each layer;
# - **weights read again**: a step reads all of them, for 64 tokens as for 8,000. With few rows the
#   reading takes longer than the multiplying;
# - **keys and values read again**: each chunk reads those of all chunks before it.
#
# ## Exercise 1: keys and values (10 minutes, easy)
#
# Write `kv_tokens_read(prompt_tokens, chunk_size)`: at how many positions all chunks of a prompt
# together read keys and values, each chunk's own positions included.


# %%
# Exercise kv-tokens-read (10 minutes, easy)
def kv_tokens_read(prompt_tokens: int, chunk_size: int) -> int:
    raise NotImplementedError


# %%
check.kv_tokens_read(kv_tokens_read)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A chunk that ends at position *e* reads *e* positions. Where do the chunks end? Mind the last
# one.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: kv-tokens-read -->
# ```python
# def kv_tokens_read(prompt_tokens: int, chunk_size: int) -> int:
#     starts = range(0, prompt_tokens, chunk_size)
#     return sum(min(start + chunk_size, prompt_tokens) for start in starts)
# ```
# </details>

# %% [markdown]
# **Predict**: halve the chunk size, and the keys and values read grow by about which factor? The
# weights read?
#
# Now the account, from the parts of the cost model: for each chunk size, what 8,000 tokens cost
# *more* than in one piece, in milliseconds, and how many gigabytes are read.

# %%
cost_model = CostModel(**A100)


def prefill_parts(chunk: int, model: CostModel = cost_model) -> tuple[dict, dict]:
    """Seconds and bytes of a prompt's prefill, by part, summed over its chunks."""
    seconds, moved = {}, {}
    for start in range(0, PROMPT, chunk):
        n = min(chunk, PROMPT - start)
        load = StepLoad(n, 0, n, n * (start + (n + 1) / 2), start + n)
        for part in model.parts(load):
            seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds
            moved[part.name] = moved.get(part.name, 0.0) + part.bytes
    return seconds, moved


# %%
launch = cost_model.efficiency.launch * cost_model.shape.num_layers  # one kernel in every layer
matrices, small_kernels = len(cost_model.shape.matrices), 5
whole = prefill_parts(PROMPT)[0]


def extra_cost(size: int) -> dict:
    """What chunks of that size cost more than the prompt in one piece (ms), and bytes read."""
    seconds, moved = prefill_parts(size)
    extra = {name: 1e3 * (seconds[name] - whole[name]) for name in seconds}
    kernels = 1e3 * launch * (math.ceil(PROMPT / size) - 1)  # in the steps beyond the first
    return {
        "chunk": size,
        "steps' software": round(extra["overhead"], 1),
        "kernel launches": round(kernels * (matrices + small_kernels + 1), 1),
        "weights again": round(extra["linear"] - kernels * matrices, 1) + 0.0,
        "KV again": round(extra["prefill_attention"] - kernels, 1) + 0.0,
        "sum (ms)": round(sum(extra.values()), 1),
        "linear GB": round(moved["linear"] / 1e9),
        "KV GB": round(moved["prefill_attention"] / 1e9),
    }


account = [extra_cost(size) for size in SIZES]
Table(account)

# %%
figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
bottom = [0.0] * len(SIZES)
for kind in ("steps' software", "kernel launches", "weights again", "KV again"):
    values = [max(0.0, row[kind]) for row in account]
    axis.bar([str(size) for size in SIZES], values, bottom=bottom, label=kind)
    bottom = [b + v for b, v in zip(bottom, values, strict=True)]
axis.set(xlabel="chunk size", ylabel="extra ms for 8,000 tokens")
axis.legend()
plt.show()

# %% [markdown]
# Compare with your prediction, and rank the three. A textbook chapter warns of chunks of 64
# tokens, because the CPU would have to schedule too often. Is that the tall part of the bar?
#
# Two remarks for the sceptic.
#
# *Keys and values.* The column `KV GB` grows fast, and the milliseconds of `KV again` hardly do.
# In a chunk of *c* tokens each key that is read meets *c* queries, so from some *c* on the
# multiplications take longer than the reading, which hides behind them. The next cell gives both
# sides for the last chunk.

# %%
for size in (16, 64, 256, 1024):
    start = PROMPT - size
    part = cost_model.counter.prefill_attention(
        StepLoad(size, 0, size, size * (start + (size + 1) / 2), PROMPT)
    )
    reading = part.bytes / cost_model.peak_bandwidth * 1e3
    computing = part.flops / cost_model.peak_flops * 1e3
    print(
        f"last chunk of {size:4}, at peak: reading {reading:5.2f} ms, computing {computing:5.2f} ms"
    )

# %% [markdown]
# *The software's time.* It depends on the engine, not on the GPU. What this engine's scheduler
# takes per step is measured in every trace, on the wall clock, even when the GPU is simulated. And
# if an engine launches the kernels of a step one by one, the host may take longer to launch than
# the GPU to compute; `host_time` models that. (CUDA graphs, which replay a recorded step with one
# launch, are the cure.)

# %%
measured = sorted(step.scheduling_time for step in traces["64"].steps)
print(f"scheduling one step took {measured[len(measured) // 2] * 1e6:.0f} µs here (median)")
for host_time in (0.0, 0.02, 0.04):
    slow = CostModel(**A100, host_time=host_time)
    times = {size: sum(prefill_parts(size, slow)[0].values()) for size in (64, 512, 8192)}
    line = ", ".join(f"chunks of {size}: {seconds:.2f} s" for size, seconds in times.items())
    print(f"host needs {host_time * 1e3:2.0f} ms to launch a step: {line}")

# %% [markdown]
# So the chapter's warning is right where launching is slow, and its reason changes where it is
# not: then reading the weights again is what small chunks cost.
#
# ## Tiles
#
# A matrix product is computed in tiles, for instance of 128 rows. A tile that is not full costs as
# much as a full one. `tile=128` puts that into the cost model.
#
# **Predict**: ten decodes ride with each chunk. Which chunk is cheaper per token, 246 or 256?

# %%
plain = step_seconds(cost_model, num_decodes=10, decode_context=230)
tiled = step_seconds(CostModel(**A100, tile=128), num_decodes=10, decode_context=230)
chunks = range(64, 641)
figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
axis.plot(chunks, [plain(0, c) * 1e3 for c in chunks], "--", label="no tiles")
axis.plot(chunks, [tiled(0, c) * 1e3 for c in chunks], label="tiles of 128 rows")
axis.set(xlabel="chunk size, beside ten decodes", ylabel="step (ms)")
axis.legend()
plt.show()
for c in (246, 256):
    print(f"chunk {c}: {tiled(0, c) * 1e3:.1f} ms, {tiled(0, c) / c * 1e6:.1f} µs per token")

# %% [markdown]
# The steps of the curve do not lie at multiples of 128: the tile counts rows, and the decodes are
# rows. That is one reason why engines have a *token budget* per step (`max_num_batched_tokens`)
# rather than only a chunk size: set the budget to a multiple of the tile, and the chunk is what
# the decodes leave.
#
# ## Exercise 2: align the chunk (10 minutes, easy)
#
# Write `align_chunk(limit, num_decodes, tile)`: the largest chunk of 1 to `limit` tokens for which
# chunk and decodes together fill their tiles exactly. Where there is none, return `limit`.


# %%
# Exercise align-chunk (10 minutes, easy)
def align_chunk(limit: int, num_decodes: int, tile: int) -> int:
    raise NotImplementedError


# %%
check.align_chunk(align_chunk)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many full tiles do `limit + num_decodes` rows hold? Take the decodes off again, and see
# whether anything is left.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: align-chunk -->
# ```python
# def align_chunk(limit: int, num_decodes: int, tile: int) -> int:
#     full_rows = (limit + num_decodes) // tile * tile
#     chunk = full_rows - num_decodes
#     return chunk if chunk > 0 else limit
# ```
# </details>

# %% [markdown]
# ## The knee
#
# Below some size a chunk is bound by reading the weights, above it by computing. The datasheet
# gives a first guess: the *ridge*, peak operations over peak bandwidth. A product with *n* rows of
# 16-bit numbers does about *n* operations per byte of weights, so it leaves the memory bound near
# *n* = ridge.
#
# **Predict** from the column `ridge`: at what chunk size does each GPU reach 90% of its best
# prefill rate? At the ridge, at twice the ridge, beyond?

# %%
figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
rows, grid = [], range(64, 4097, 64)
for gpu in ("l4", "a100-80g-sxm", "h100-sxm", "mi300x"):
    model = CostModel("llama-3-8b", gpu)
    one_chunk = step_seconds(model, num_decodes=0, decode_context=0)
    rate = {c: c / one_chunk(0, c) for c in grid}
    best = max(rate.values())
    knee = next(c for c in grid if rate[c] >= 0.9 * best)
    ridge = model.peak_flops / model.peak_bandwidth
    rows.append(
        {"gpu": gpu, "ridge": round(ridge), "knee": knee, "tokens/s there": round(rate[knee])}
    )
    axis.plot(list(grid), [rate[c] / best for c in grid], label=gpu)
axis.set(xlabel="chunk size", ylabel="share of the best rate", xscale="log")
axis.legend()
plt.show()
Table(rows)

# %% [markdown]
# The knee lies well beyond the ridge: near the ridge reading and computing take equally long and
# neither hides the other completely, and the constants per step have to be spread over more
# tokens.
#
# The knee says from where on *larger* chunks gain nothing. It does not say how large a chunk your
# users will bear. That is the other side of the trade.
#
# ## From a promise to a chunk size
#
# "No gap above 100 ms." Of all sizes that keep the promise, take the largest: it wastes least. Two
# things make it more than a division: the decodes' own cost belongs into the step, and chunks of
# one prompt differ (notebook 06: which one is the longest?).
#
# ## Exercise 3: choose (15 minutes, medium)
#
# Write `choose_chunk(target, seconds, prompt_tokens, sizes)`. `seconds(start, chunk)` gives the
# time of a step with a chunk that begins at position `start` (beside the decodes). Return the
# largest of `sizes` with which every step of this prompt stays within `target` seconds. Where none
# does, raise a `ValueError` that says what the smallest size would take.


# %%
# Exercise choose-chunk (15 minutes, medium)
def choose_chunk(target, seconds, prompt_tokens, sizes):
    raise NotImplementedError


# %%
check.choose_chunk(choose_chunk)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The worst chunk begins at `prompt_tokens - chunk`. Collect the sizes that fit; is the list empty?
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: choose-chunk -->
# ```python
# def choose_chunk(target, seconds, prompt_tokens, sizes):
#     fitting = [size for size in sizes if seconds(prompt_tokens - size, size) <= target]
#     if not fitting:
#         least = min(sizes)
#         took = seconds(prompt_tokens - least, least)
#         raise ValueError(f"target={target} s: even a chunk of {least} takes {took:.3f} s")
#     return max(fitting)
# ```
# </details>

# %% [markdown]
# The package has it as `mc.choose_chunk_size`. Does a simulated run keep what it promises?

# %%
for target in (0.03, 0.05, 0.1, 0.2):
    chunk = mc.choose_chunk_size(
        target, num_decodes=10, decode_context=230, prompt_tokens=PROMPT, **A100
    )
    knobs = dict(policy="decode-first", chunk_size=chunk, max_num_batched_tokens=chunk + 10)
    metrics = mc.simulate(scene, **knobs, **A100).metrics()
    gap, ttft = metrics.itl.max * 1e3, metrics.requests["10"].ttft
    print(f"promise {target * 1e3:3.0f} ms: chunk {chunk:4}, gap {gap:5.1f} ms, TTFT {ttft:.2f} s")

# %% [markdown]
# ## Is 512 to 2,048 the right range?
#
# The chapter recommends chunks of 512 to 2,048 tokens, at least 512, and finds defaults good
# enough in most cases; vLLM's default budget, it says, is 2,048.
#
# **Predict**: for how many of the promises and machines below does the largest chunk that keeps
# the promise lie in that range? (32 decodes with contexts of 1,024 tokens, prompts of 8,192.)

# %%
machines = {
    "Llama-3-8B, L4": dict(model="llama-3-8b", gpu="l4"),
    "Llama-2-7B, A100": A100,
    "Llama-3-8B, A100": dict(model="llama-3-8b", gpu="a100-80g-sxm"),
    "Llama-3-8B, H100": dict(model="llama-3-8b", gpu="h100-sxm"),
    "Llama-3-70B, 4 × H100": dict(model="llama-3-70b", gpu="h100-sxm", tensor_parallel=4),
}


def largest(target: float, **machine) -> int | None:
    try:
        return mc.choose_chunk_size(target, **machine)
    except ValueError:
        return None  # even the smallest chunk is too slow


# %%
chosen = {name: {t: largest(t, **m) for t in (0.05, 0.1, 0.2)} for name, m in machines.items()}
inside = sum(512 <= (c or 0) <= 2048 for row in chosen.values() for c in row.values())
print(f"{inside} of {3 * len(machines)} lie within 512 to 2,048")
Table(
    [
        {"machine": name, **{f"{t * 1e3:.0f} ms": c or "none" for t, c in row.items()}}
        for name, row in chosen.items()
    ]
)

# %% [markdown]
# A range of sizes is advice for one kind of machine. What carries over is the procedure: a
# promise, a cost model (or a measurement), the largest chunk that keeps the one under the other.
# Where the table says "none", no chunk size helps: fewer decodes per step, a faster GPU or a
# weaker promise will.
#
# ## Your own machine
#
# The same question to the real model here: SmolLM2-135M computes one prompt, chunk by chunk.
# **Predict**: does a CPU have a knee? Its bandwidth is a fraction of a GPU's, but so is its speed.

# %%
llm = mc.LLM("smollm2-135m", quiet=True)
prompt_tokens, sizes = (128, [32, 128]) if is_fast() else (512, [16, 32, 64, 128, 256, 512])
prompt = [100 + i for i in range(prompt_tokens)]


def step_times(size: int) -> list[float]:
    """Seconds of each step that computes the prompt in chunks of `size`."""
    engine = llm.new_engine(chunk_size=size, max_num_batched_tokens=size)
    engine.add_request(prompt, mc.SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return [step.duration for step in engine.trace.steps]


for size in sizes:
    step_times(size)  # once to warm up: the first use of a shape is slow
    times = min((step_times(size) for _ in range(2)), key=sum)
    rate, longest = prompt_tokens / sum(times), max(times)
    print(f"chunk {size:4}: {rate:5.0f} tokens/s, longest step {longest * 1e3:5.0f} ms")

# %% [markdown]
# Where does the rate stop growing on your machine? (The longest of many short steps may be
# one in which the machine had something else to do.) To let the simulator speak for your machine,
# fit a cost model to measurements like these: `minichunk.sim.calibrate`.
#
# ## Recap
#
# 1. Why can smaller chunks make the whole batch finish earlier and the newcomer later?
# 2. Which of the three costs of small chunks dominates on the simulated A100, and what would have
#    to be true of the software for another one to dominate?
# 3. Why should a budget, rather than a chunk size, be a multiple of the tile?
#
# <details><summary>Answers</summary>
#
# 1. The decode steps have to be run anyway and read all weights anyway; prompt tokens that ride
#    with them cost little. But the prompt then needs more steps.
# 2. Reading the weights again. With a host that takes longer to launch a step's kernels than the
#    GPU takes to run them, launching.
# 3. Decodes are rows of the same matrix products: chunk and decodes together fill the tiles.
# </details>
