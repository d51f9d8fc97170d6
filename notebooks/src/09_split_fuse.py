# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 09 · Dynamic SplitFuse: what is dynamic, and what it buys
#
# **Time:** 50 minutes · **Needs:** notebooks 07 (chunk size) and 08 (policies). No GPU.
#
# After this notebook you can
#
# 1. compose a SplitFuse step by hand, and say which engines' rule it equals;
# 2. compute what a decode weighs against a prompt token, for any model and GPU;
# 3. say when an adaptive chunk beats a static one and when it does not, each from a computed table.

# %%
import inspect

import matplotlib.pyplot as plt
from tqdm import tqdm

import minichunk as mc
from minichunk.compare import Table
from minichunk.core.metrics import percentile
from minichunk.core.policies import Policy
from minichunk.labs import check
from minichunk.labs.result import is_fast
from minichunk.sim.cost import CostModel
from minichunk.workloads import Lengths

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")
count = 25 if is_fast() else 100

# %% [markdown]
# ## The rule
#
# DeepSpeed-FastGen (Holmes et al., 2024, arXiv 2401.08671) schedules by two sentences: long prompts
# are decomposed and spread over several forward passes, and short prompts are composed so that a
# pass meets a *target* number of tokens exactly. A textbook chapter adds that the share of prompts
# adapts to the number *and length* of the decodes. minichunk has both readings in one policy:

# %%
print(inspect.getsource(mc.policies.split_fuse.function))

# %% [markdown]
# Every decode has a *weight*: 1 for its own row in the matrix products, plus its context divided by
# `context_per_token`, for the keys and values it reads. With `context_per_token=inf` only tokens
# count: that is FastGen's rule. Prompts get what the weights leave of the target.
#
# **Predict**: the target is 512 tokens; 12 requests decode, each with a context of 1,000 tokens;
# prompts of 300, 100 and 900 tokens wait. Which chunks do the prompts get if only tokens count?
# And if 200 tokens of context weigh as much as one token?


# %% [markdown]
# ## Exercise 1: compose a step (10 minutes, easy)
#
# Write `fuse_step`, the chunk of each prompt in one step. `contexts` are the decodes' context
# lengths, `prompts` the uncomputed tokens of the prompts in order. Chunks are whole tokens, weights
# need not be. If the decodes alone exceed the target, prompts get nothing; if there are no decodes,
# the first prompt gets at least one token.


# %%
# Exercise fuse-step (10 minutes, easy)
def fuse_step(target, contexts: list, prompts: list, context_per_token: float) -> list:
    """The chunk of each prompt in one step; 0 for a prompt that gets none."""
    raise NotImplementedError


# %%
check.fuse_step(fuse_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Subtract the decodes' weights from the target. Then go through the prompts: each gets the smaller
# of its length and the whole part of what is left, until less than 1 is left.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: fuse-step -->
# ```python
# def fuse_step(target, contexts: list, prompts: list, context_per_token: float) -> list:
#     left = target - sum(1 + context / context_per_token for context in contexts)
#     chunks, anything = [], bool(contexts)
#     for prompt in prompts:
#         chunk = 0
#         if left >= 1 or not anything:
#             chunk = max(1, min(prompt, int(left)))
#             anything = True
#         left -= chunk
#         chunks.append(chunk)
#     return chunks
# ```
#
# </details>

# %% [markdown]
# ## Is it new?
#
# Put FastGen's rule, tokens only, beside decode-first with the same number as its token budget.
# **Predict**: in how many of the steps below do the two schedulers differ?

# %%
chat = mc.workloads.poisson(
    5, count, prompt=Lengths(512, p90=2048, maximum=6000), output=Lengths(200, p90=500), seed=1
)
for budget in (256, 512, 1024):
    fused = mc.simulate(
        chat, policy="split-fuse(context_per_token=inf)", max_num_batched_tokens=budget, **A100
    )
    plain = mc.simulate(chat, policy="decode-first", max_num_batched_tokens=budget, **A100)
    print(f"budget {budget}: {len(fused.steps)} steps, difference: {mc.diff_traces(fused, plain)}")

# %% [markdown]
# `None` means that every step of both runs granted the same tokens to the same requests. FastGen's
# rule, Sarathi-Serve's stall-free batching and vLLM's token budget are one rule under three names.
#
# So "Dynamic SplitFuse beats a static chunk" needs a static chunk to compare with. There are two in
# use. One chunk of fixed size per step, beside all decodes, whatever their number:


# %%
def static_chunk(view, chunk: int = 512):
    """Every step: all decodes, and one chunk of one prompt."""
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        yield request, min(chunk, request.num_uncomputed_tokens)
        break


# %% [markdown]
# And a fixed `chunk_size` *per prompt*: with three prompts unfinished, a step carries three chunks.
# That makes four families; each has one size to choose.

# %%
FAMILIES = {
    "one static chunk": lambda n: dict(
        policy=Policy("static-chunk", static_chunk, {"chunk": n}), max_num_batched_tokens=8192
    ),
    "chunk per prompt": lambda n: dict(
        policy="decode-first", chunk_size=n, max_num_batched_tokens=8192
    ),
    "fused, tokens": lambda n: dict(
        policy="split-fuse(context_per_token=inf)", max_num_batched_tokens=n
    ),
    "fused, weighted": lambda n: dict(policy="split-fuse", max_num_batched_tokens=n),
}

# %% [markdown]
# ## What differs inside the steps
#
# Long prompts (median 4,000 tokens) and answers of 200 tokens; all sizes are 512.
#
# **Predict**: under which family do mixed steps all take about the same time?

# %%
documents = mc.workloads.poisson(
    1.1,
    15 if is_fast() else 50,
    prompt=Lengths(4000, p90=9000, maximum=14000),
    output=Lengths(200, p90=500),
    seed=1,
)
runs = {
    name: mc.simulate(documents, **knobs(512), **A100) for name, knobs in tqdm(FAMILIES.items())
}
figure, axes = plt.subplots(1, 4, figsize=(12, 2.8), sharey=True, layout="constrained")
for ax, (name, trace) in zip(axes, runs.items(), strict=True):
    mixed = [s for s in trace.steps if s.prefill_tokens and s.decode_tokens]
    ax.scatter([s.start for s in mixed], [s.duration * 1e3 for s in mixed], s=3)
    ax.set(title=name, xlabel="time (s)")
_ = axes[0].set_ylabel("duration of a mixed step (ms)")


# %%
def step_times(name: str, trace: mc.Trace) -> dict[str, str]:
    times = [s.duration * 1e3 for s in trace.steps if s.prefill_tokens and s.decode_tokens]
    p5, p50, p95 = (percentile(times, p) for p in (5, 50, 95))
    return {
        "family": name,
        "mixed steps": len(times),
        "P5": f"{p5:.0f} ms",
        "P50": f"{p50:.0f} ms",
        "P95": f"{p95:.0f} ms",
        "P95 / P5": f"{p95 / p5:.2f}",
        "all done": f"{trace.metrics().duration:.1f} s",
    }


Table([step_times(name, trace) for name, trace in runs.items()])

# %% [markdown]
# Two readings of that table. The column "P95 / P5" says who is steady. But the rows are not
# comparable in the other columns: a weighted target of 512 admits fewer prompt tokens than a plain
# one, so its steps are shorter *and there are more of them*. A fair comparison gives each family
# its own best size. First, though: what does a token of context weigh?

# %% [markdown]
# ## What a decode weighs
#
# **Predict**: Llama-2-7B keeps 32 KV heads, Llama-3-8B 8. For which of them does a long context
# weigh more? By what factor?

# %%
models = ["llama-2-7b", "llama-3-8b", "qwen2.5-7b", "llama-2-70b"]
Table(
    [
        {
            "model": model,
            **{
                gpu: f"{CostModel(model, gpu).context_per_token:.0f} tokens of context"
                for gpu in ("a100-80g-sxm", "h100-sxm")
            },
        }
        for model in models
    ]
)

# %% [markdown]
# A context of that many tokens doubles the weight of a decode. With 32 KV heads, decodes with long
# contexts are heavy and "one token each" is a poor measure of them; with grouped-query attention
# they are light. The H100 has three times the arithmetic of the A100 and not twice its bandwidth,
# so context weighs more there.
#
# ## Exercise 2: what a token weighs (10 minutes, medium)
#
# Derive the number from a data sheet. Write `context_per_token(shape, gpu)`: how many tokens of
# context take as long to read, at `gpu.peak_bandwidth` (bytes/s), as one token's matrix products
# take at `gpu.peak_flops`? Use `shape.linear_params` (parameters of all layers' matrices) and
# `shape.kv_bytes_per_token` (of all layers).


# %%
# Exercise context-per-token (10 minutes, medium)
def context_per_token(shape, gpu) -> float:
    raise NotImplementedError


# %%
check.context_per_token(context_per_token)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A matrix product spends two operations, a multiplication and an addition, on each parameter and
# token.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: context-per-token -->
# ```python
# def context_per_token(shape, gpu) -> float:
#     token = 2 * shape.linear_params / gpu.peak_flops
#     context = shape.kv_bytes_per_token / gpu.peak_bandwidth
#     return token / context
# ```
#
# </details>
#
# The cost model's figures in the table above differ from yours by its efficiencies: kernels reach
# different shares of the two peaks.

# %% [markdown]
# ## Each family at its best
#
# For three workloads, run every family at several sizes. Each run is a point: how smooth the
# streams are (P99 gap) and how soon they start (P99 TTFT). A family is better where its curve lies
# nearer to the lower left corner.
#
# **Predict**: chat, documents, and short prompts among long documents. On which does FastGen's rule
# beat one static chunk by more than a tenth in TTFT, at equal gaps?

# %%
short = mc.workloads.poisson(3, count, prompt=200, output=Lengths(150, p90=300), seed=4)
long = mc.workloads.poisson(
    0.5, count // 6, prompt=Lengths(8000, p90=12000, maximum=14000), output=300, seed=3
)
WORKLOADS = {"chat": chat, "documents": documents, "mixture": mc.workloads.merge(short, long)}
SIZES = (256, 768) if is_fast() else (256, 384, 512, 768, 1024, 1536)


def measure(workload, family: str, size: int, **options) -> dict:
    """One run as a point: P99 gap and TTFT, in seconds."""
    metrics = mc.simulate(workload, **FAMILIES[family](size), **A100, **options).metrics()
    return dict(size=size, gap=metrics.itl.p99, ttft=metrics.ttft.p99, median=metrics.ttft.p50)


points = {
    (load, family): [measure(workload, family, size) for size in SIZES]
    for load, workload in tqdm(WORKLOADS.items())
    for family in FAMILIES
}

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
for ax, load in zip(axes, WORKLOADS, strict=True):
    for family, marker in zip(FAMILIES, "os^v", strict=True):
        curve = points[load, family]
        gaps, ttfts = [p["gap"] * 1e3 for p in curve], [p["ttft"] for p in curve]
        ax.plot(gaps, ttfts, marker=marker, label=family)
    ax.set(title=load, xlabel="P99 gap (ms)", yscale="log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
axes[0].set_ylabel("P99 TTFT (s)")
_ = axes[0].legend(fontsize=8)

# %% [markdown]
# Now the table that decides. Users are promised a P99 gap; each family takes the size that keeps it
# and starts streams soonest.


# %%
def best(curve: list[dict], promise: float) -> dict | None:
    """The point of a family with the lowest P99 TTFT among those that keep the promise."""
    return min((p for p in curve if p["gap"] <= promise), key=lambda p: p["ttft"], default=None)


def verdict(points: dict, promise: float) -> list[dict]:
    rows = []
    for load in WORKLOADS:
        row = {"workload": load, "P99 gap within": f"{promise * 1e3:.0f} ms"}
        for family in FAMILIES:
            p = best(points[load, family], promise)
            row[family] = f"{p['ttft']:.2f} s (size {p['size']})" if p else "cannot"
        rows.append(row)
    return rows


Table([row for promise in (0.060, 0.100, 0.150) for row in verdict(points, promise)])

# %% [markdown]
# Compare columns within a row: P99 TTFT, smaller is better. Sizes come in steps, so differences of
# a few percent mean nothing. Look for these:
#
# - "fused, tokens" against "one static chunk": how far apart are they? With prompts longer than a
#   chunk, one chunk of 512 and a budget of 512 + the decodes are nearly the same step.
# - "fused, weighted" against "fused, tokens": do its steadier steps buy an earlier first token at
#   the same P99 gap?
# - "chunk per prompt" keeps tight promises only with tiny chunks, since its steps grow with the
#   number of prompts. But look at the *median* TTFT of the mixture:

# %%
HELD = dict(max_num_batched_tokens=512, max_long_partial_prefills=2, long_prefill_threshold=256)


def median_row(name: str, knobs: dict) -> dict:
    metrics = mc.simulate(WORKLOADS["mixture"], **knobs, **A100).metrics()
    return {
        "schedule": name,
        "TTFT p50": f"{metrics.ttft.p50:.2f} s",
        "TTFT p99": f"{metrics.ttft.p99:.2f} s",
        "P99 gap": f"{metrics.itl.p99 * 1e3:.0f} ms",
    }


bests = {family: best(points["mixture", family], 0.100) for family in FAMILIES}
rows = [
    median_row(f"{family}, {p['size']}", FAMILIES[family](p["size"]))
    for family, p in bests.items()
    if p
]
Table([*rows, median_row("tokens, 512, long prompts held", HELD)])

# %% [markdown]
# Which family has the lowest median? A fused step fills itself first come, first served: a document
# at the head takes the whole budget, step after step, and short prompts queue behind it. A chunk
# *per prompt* lets short ones through in the same step. The last row gives a token budget the same
# property: of prompts above 256 tokens (`long_prefill_threshold`) at most two are partial at a time
# (`max_long_partial_prefills`), and while others wait each gets 256 tokens per step. vLLM has both
# knobs, as `--max-long-partial-prefills` and `--long-prefill-token-threshold`.

# %% [markdown]
# ## Where exact sizes pay: tiles
#
# GPU kernels compute matrix products in tiles; with tiles of 128 rows, a step of 513 tokens costs
# as much as one of 640. FastGen's "exactly" now means something: a fused step of 512 tokens fills
# four tiles, one static chunk of 512 beside 20 decodes needs a fifth.
#
# **Predict**: with tiles of 128 rows, does the comparison of "fused, tokens" with "one static
# chunk" change? And what do tiles do to the weighted rule, whose steps have fewer rows than the
# target?

# %%
tiled = {
    (load, family): [measure(workload, family, size, tile=128) for size in SIZES]
    for load, workload in tqdm(WORKLOADS.items())
    for family in FAMILIES
}
Table([row for promise in (0.060, 0.100, 0.150) for row in verdict(tiled, promise)])


# %%
def against(points: dict, family: str, other: str, promise: float) -> str:
    ours, theirs = (
        [best(points[load, name], promise) for load in WORKLOADS] for name in (family, other)
    )
    return ", ".join(
        f"{load} {theirs[i]['ttft'] / ours[i]['ttft']:.2f}×" if ours[i] and theirs[i] else load
        for i, load in enumerate(WORKLOADS)
    )


for label, data in (("smooth costs", points), ("tiles of 128", tiled)):
    print(f"{label}: P99 TTFT of others, as a multiple of that of 'fused, tokens', gap ≤ 100 ms")
    for other in ("one static chunk", "fused, weighted"):
        print(f"  {other:17s} {against(data, 'fused, tokens', other, 0.100)}")

# %% [markdown]
# A multiple above 1 means that "fused, tokens" starts streams earlier than the other family. Read
# it twice, and compare with your predictions:
#
# - Against one static chunk. In our run the two are about even where costs are smooth. With tiles
#   FastGen's rule is well ahead on documents and on the mixture: its steps fill the tiles, those of
#   the static chunk spill over.
# - Against the weighted rule. In our run the weighted rule is ahead on the mixture only, where the
#   decodes of a few documents are heavy and come and go; equal tokens are then not equal work. With
#   contexts that are alike, weighing them merely shifts the size that you should have chosen, and
#   its rows no longer fill tiles.

# %% [markdown]
# ## The published claim
#
# FastGen's paper reports up to 2.3× the effective throughput of vLLM (abstract of arXiv
# 2401.08671). The vLLM of that time computed whole prompts in steps of their own: minichunk's
# `continuous`. So the claim compares *chunks with no chunks*. A textbook chapter quotes it as an
# advantage over a static chunk.
#
# Effective throughput counts only requests that were served as promised: our goodput, here with a
# first token within 2 s and every gap within 100 ms. Each family has the size that the tiled table
# chose for chat.
#
# **Predict**: at which rate (requests per second) does each schedule's goodput stop growing?

# %%
schedules = {"whole prompts": dict(policy="continuous", max_num_batched_tokens=8192)}
for family, knobs in FAMILIES.items():
    point = best(tiled["chat", family], 0.100)
    if point:
        schedules[f"{family}, {point['size']}"] = knobs(point["size"])
schedules["fused, tokens, 512"] = FAMILIES["fused, tokens"](512)
rows = []
for name, knobs in tqdm(schedules.items()):
    row = {"schedule": name}
    for rate in (2, 4, 6, 8):
        trace = mc.simulate(chat.scaled(rate / 5), **knobs, **A100, tile=128)
        row[f"at {rate}/s"] = round(trace.goodput(ttft=2.0, itl=0.100), 2)
    rows.append(row)
Table(rows)

# %% [markdown]
# Read the table by column, then by row.
#
# - At the low rates: which step is large, from whole prompts to any chunk, or from a static to a
#   dynamic one? That is the share of the published gain that belongs to chunking itself.
# - To the right: the sizes were chosen for 5 requests per second. More load means more decodes in a
#   step and longer gaps, and a size that was just right breaks the promise, for nearly everybody at
#   once. The weighted rule gives prompts less when decodes weigh more, and keeps it. So does a
#   plain budget of 512, chosen with the higher load in mind: compare the last two rows.
#
# This is the case for an adaptive chunk: not that it beats the right size, but that it stays near
# the right size when the load moves.

# %% [markdown]
# ## Adapting without a cost model
#
# The weighted rule needs to know what a token of context costs on this GPU. There is another way to
# be dynamic: *look at how long the last step took.*
#
# ## Exercise 3: a budget that finds itself (20 minutes, hard)
#
# Write a policy `feedback(view, limit)` whose mixed steps take about `limit` seconds, on any GPU.
# Decodes go first. `view.now` is the time at which this step begins; `view.state` is a dict that
# survives from step to step; `view.last_plan` is the plan of the step before (None at first) with
# its `num_prefill_tokens`. The check runs it on three GPUs with three limits: after it has learnt,
# at most 5% of the mixed steps may take longer than 1.3 limits, and the median must reach 0.7
# limits.


# %%
# Exercise feedback-policy (20 minutes, hard)
def feedback(view, limit: float = 0.06):
    raise NotImplementedError
    yield  # a policy is a generator


# %%
check.feedback_policy(feedback)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Keep a target number of tokens and the time at which the step began in `view.state`. If the last
# step carried prompt tokens, multiply the target by limit / duration; let it grow slowly (one tenth
# per step) and shrink at once. Keep it between a few tokens and `view.max_num_batched_tokens`. Then
# fill the step as SplitFuse does.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: feedback-policy -->
# ```python
# def feedback(view, limit: float = 0.06):
#     state = view.state
#     target = state.get("target", 64.0)
#     if view.last_plan is not None and view.last_plan.num_prefill_tokens:
#         took = view.now - state["start"]
#         target *= min(1.1, max(0.5, 0.95 * limit / took))
#     target = min(max(16.0, target), view.max_num_batched_tokens)
#     state.update(target=target, start=view.now)
#     left = int(target)
#     for request in view.decoding:
#         left -= yield request, 1
#     for request in view.prefilling:
#         if left < 1 and view.num_scheduled_tokens:
#             break
#         left -= yield request, max(1, min(left, request.num_uncomputed_tokens))
# ```
#
# </details>
#
# This is where "dynamic" earns its name: no size that you choose on one GPU is right on another,
# and the feedback needs neither a benchmark nor a cost model. But it learns from what has happened.
# The check has a steady backlog, and its message names the longest step of each run. Try your
# policy on `chat` too, where prompts come after pauses: `mc.simulate(chat, policy=feedback,
# **A100)`. Is the longest step still near the limit?

# %% [markdown]
# ## Recap
#
# 1. FastGen's rule schedules the same steps as decode-first with a token budget. Then what exactly
#    did its paper compare, and why was the gain large?
# 2. On which kind of model does the weighted rule differ most from the plain one?
# 3. Name a workload on which a fused step starts most streams *later* than a chunk per prompt does.
#
# <details><summary>Answers</summary>
#
# 1. Chunks against whole prompts: the vLLM of its day stalled decodes during a prompt. Most of the
#    gain is that of chunked prefill itself (notebook 06).
# 2. On one with as many KV heads as query heads (no grouped queries) and long contexts: reading
#    keys and values then costs as much as the matrix products of many tokens.
# 3. Short prompts among long documents: whoever is at the head fills the step, and the short ones
#    queue behind a document until its last chunk.
#
# </details>
