# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 08 · Mixing: who gets the token budget
#
# **Time:** 50 minutes · **Needs:** notebooks 05 to 07 (the stall, chunks, chunk sizes). No GPU.
#
# After this notebook you can
#
# 1. read four ways to share a step's token budget between decodes and prompts, each about ten
#    lines long, and count the steps that a prompt needs under each;
# 2. say which of TTFT and ITL each way spends, and show it on a timeline;
# 3. choose a preset (chat, RAG, batch, multi-tenant) by the promise that a service makes, and say
#    on what workload it loses.

# %%
import inspect
from dataclasses import replace

import matplotlib.pyplot as plt

import minichunk as mc
from minichunk.compare import Table
from minichunk.labs import check, groups
from minichunk.labs.result import is_fast
from minichunk.workloads import Lengths

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")

# %% [markdown]
# ## One budget, two kinds of work
#
# A step computes at most `max_num_batched_tokens` tokens. Decodes want one token each, unfinished
# prompts want as many as they can get. When both want more than there is, somebody must decide,
# and the decision is a *policy*. This is the whole of the most common one:

# %%
print(inspect.getsource(mc.policies.decode_first.function))

# %% [markdown]
# Decodes are served first, so no decode ever waits for a prompt; prompts get what is left. And the
# opposite:

# %%
print(inspect.getsource(mc.policies.prefill_first.function))

# %% [markdown]
# Two more sit between them. `balanced` splits the budget by a share while both kinds have work.
# `alternating` cuts prompts into chunks but never mixes: a step of chunks, then a step of decodes.
# (That is the "chunked-prefills-only" row in the ablation of Sarathi-Serve, OSDI 2024, Table 4.)

# %%
print(inspect.getsource(mc.policies.balanced.function))
print(inspect.getsource(mc.policies.alternating.function))

# %% [markdown]
# ## The scene under four policies
#
# Ten answers are streaming when a prompt of 8,000 tokens arrives; the budget is 1,024 tokens.
#
# **Predict**, for each of decode-first, prefill-first, balanced (half and half) and alternating:
# how many steps pass from the prompt's first chunk to its last, and in how many of these steps do
# the ten decodes get their token? Write eight numbers down.

# %%
POLICIES = ["decode-first", "prefill-first", "balanced", "alternating"]
scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
runs = {name: dict(policy=name, max_num_batched_tokens=1024) for name in POLICIES}
both = mc.compare(scene, runs, **A100)


def prompt_steps(trace: mc.Trace) -> list:
    """The steps from the first to the last chunk of the long prompt."""
    spans = [s for s in trace.spans if s.request_id == "10" and s.kind == "prefill"]
    return trace.steps[spans[0].first_step : spans[-1].last_step + 1]


for name, trace in both.traces.items():
    steps = prompt_steps(trace)
    shares = " ".join(f"{step.prefill_tokens}+{step.decode_tokens}" for step in steps[:4])
    with_decodes = sum(step.decode_tokens > 0 for step in steps)
    print(f"{name:14s} {len(steps):2d} steps, {with_decodes:2d} with decodes: {shares} …")

# %% [markdown]
# Read a line as "prompt tokens + decode tokens" of the first four steps. Prefill-first leaves the
# decodes nothing until the last chunk leaves a rest; chunking alone does not end a stall. Now what
# users feel.
#
# **Predict**: which policy has the shortest longest gap ("ITL max"), and does it cost the long
# prompt its first token ("TTFT max")?

# %%
both.table()

# %% [markdown]
# Compare. The timeline shows where the numbers come from:

# %%
both.timeline()

# %% [markdown]
# Four things to find there:
#
# - Under prefill-first the ten lanes have one hole. Compare its length with that of the stall that
#   whole prompts caused in notebook 05: did chunking help?
# - Decode-first has no hole; every gap while the prompt runs is one mixed step.
# - Balanced halves the chunk, so a gap is shorter still, and the prompt takes about twice the
#   steps. It is decode-first with a smaller budget, as long as both kinds have work.
# - Alternating pays for each chunk and each decode step separately: a decode waits for the chunk
#   *and* for its own step, and weights are read twice where a mixed step reads them once.

# %% [markdown]
# ## Exercise 1: count the steps (10 minutes, medium)
#
# Write `prefill_steps(policy, prompt_tokens, budget, decodes)`: the number of steps from a prompt's
# first chunk to its last, both included, while `decodes` requests keep decoding (fewer than the
# budget). `balanced` has its default share of one half, rounded down to whole tokens.


# %%
# Exercise prefill-steps (10 minutes, medium)
def prefill_steps(policy: str, prompt_tokens: int, budget: int, decodes: int) -> int:
    raise NotImplementedError


# %%
check.prefill_steps(prefill_steps)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For three of the four, find the prompt tokens that one step can carry, and divide, rounding up.
# Under alternating a decode step lies between two chunks, but none before the first and none after
# the last.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: prefill-steps -->
# ```python
# import math
#
#
# def prefill_steps(policy: str, prompt_tokens: int, budget: int, decodes: int) -> int:
#     chunk = {"decode-first": budget - decodes, "balanced": budget // 2}.get(policy, budget)
#     chunks = math.ceil(prompt_tokens / chunk)
#     return 2 * chunks - 1 if policy == "alternating" else chunks
# ```
#
# </details>

# %% [markdown]
# ## Under load
#
# One scene is not a service. Chat requests arrive at random, 4 per second: prompts of 512 tokens in
# the middle and 2,048 at the 90th percentile, answers of 200 and 500.
#
# **Predict**: sort the four policies by their median TTFT, and by their P99 gap.

# %%
chat = mc.workloads.poisson(
    rate=4,
    num_requests=40 if is_fast() else 160,
    prompt=Lengths(512, p90=2048, maximum=6000),
    output=Lengths(200, p90=500),
    seed=1,
)
under_load = mc.compare(chat, runs, **A100)
under_load.table()

# %%
figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, trace in under_load.traces.items():
    metrics = trace.metrics()
    x, y = metrics.itl.max * 1e3, metrics.ttft.p99 * 1e3
    ax.scatter(x, y)
    ax.annotate(name, (x, y), textcoords="offset points", xytext=(6, 4))
ax.margins(x=0.3, y=0.2)
_ = ax.set(xlabel="longest gap (ms)", ylabel="P99 TTFT (ms)", xscale="log")

# %% [markdown]
# The figure puts each run where its TTFT and its gaps are. Is there a policy that is best at both?
# Compare also the last two columns of the table: do the policies differ in tokens per second? At
# this load the arrivals set the throughput, and a policy only decides *who waits for whom*. And
# beware of the column that counts stalls: which policy has the fewest, and which the longest gap?

# %% [markdown]
# ## Exercise 2: a cap instead of a share (15 minutes, medium)
#
# Write a policy `capped(view, cap=256)`. Decodes go first. While at least one decode is in the
# step, *all prompts together* get at most `cap` tokens; a step without decodes gives prompts the
# whole budget. Offer with `granted = yield request, tokens`.


# %%
# Exercise capped-policy (15 minutes, medium)
def capped(view, cap: int = 256):
    raise NotImplementedError
    yield  # a policy is a generator


# %%
check.capped_policy(capped)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `view.decoding` is empty where nobody decodes. `view.budget` is what is left of the step. Keep a
# variable `left`, take from it what each `yield` granted, and stop when nothing is left: an offer
# of 0 tokens to the queue's head would be refused.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: capped-policy -->
# ```python
# def capped(view, cap: int = 256):
#     decodes = 0
#     for request in view.decoding:
#         decodes += yield request, 1
#     left = cap if decodes else view.budget
#     for request in view.prefilling:
#         if left < 1:
#             break
#         left -= yield request, min(left, request.num_uncomputed_tokens)
# ```
#
# </details>

# %% [markdown]
# ## Presets, and when each loses
#
# A textbook chapter on this subject gives one line of advice per business: chat wants decode-first,
# retrieval (RAG) prefill-first, batch work throughput, many tenants fairness. minichunk has these
# as presets:

# %%
configurations = {name: mc.EngineConfig.make(name) for name in mc.PRESETS}
Table(
    [
        {"preset": name, "policy": c.policy, "order": c.order, "budget": c.max_num_batched_tokens}
        for name, c in configurations.items()
    ]
)

# %% [markdown]
# To judge a preset you need a workload *and a promise*. Here are four of each.
#
# | service | workload | judged by |
# |---|---|---|
# | chat | the one above | goodput: requests/s with TTFT ≤ 2 s and every gap ≤ 100 ms |
# | RAG | long prompts (median 4,000), short answers (median 40) | median TTFT |
# | batch | all requests there at the start | seconds until the last has finished |
# | tenants | one tenant floods, another asks now and then | the quiet tenant's worst TTFT |
#
# **Predict**: a table of four presets and four services. Mark the winner of each column, and the
# loser.

# %%
count = 40 if is_fast() else 120
rag = mc.workloads.poisson(
    2.2, count, prompt=Lengths(4000, p90=7000, maximum=12000), output=Lengths(40, p90=100), seed=2
)
pile = mc.workloads.poisson(
    1.0,
    2 * count,
    prompt=Lengths(1000, p90=3000, maximum=6000),
    output=Lengths(60, p90=150),
    seed=3,
)
batch = [replace(spec, arrival=0.0) for spec in pile]
flood = mc.workloads.poisson(20, count, prompt=Lengths(1500, p90=3000), output=150, seed=4)
quiet = mc.workloads.poisson(1, 6, prompt=300, output=100, seed=5)
tenants = mc.workloads.multi_tenant({"flood": flood, "quiet": quiet})


# %%
def judge(preset: str) -> dict[str, str]:
    """One preset before all four promises."""
    run = {
        name: mc.simulate(workload, preset=preset, **A100)
        for name, workload in dict(chat=chat, rag=rag, batch=batch, tenants=tenants).items()
    }
    waits = [request.ttft for request in groups.split(run["tenants"])["quiet"]]
    return {
        "preset": preset,
        "chat: requests/s": f"{run['chat'].goodput(ttft=2.0, itl=0.100):.2f}",
        "RAG: TTFT p50": f"{run['rag'].metrics().ttft.p50:.2f} s",
        "batch: all done": f"{run['batch'].metrics().duration:.1f} s",
        "tenants: worst TTFT": f"{max(waits):.2f} s",
    }


Table([judge(preset) for preset in mc.PRESETS])

# %% [markdown]
# Read it by column, against your prediction.
#
# - **chat**: a budget of 512 tokens, decode-first, keeps every gap within the promise. The presets
#   with large budgets or prompts first break it for almost everybody. It **loses** the RAG column:
#   long prompts crawl through small steps.
# - **RAG**: prompts first. It **loses** wherever somebody reads along: its chat column says how
#   many requests kept their gaps.
# - **tenants**: only the order `fair` helps the quiet tenant; no policy can, because a policy
#   decides inside a step and the quiet tenant is not in any step yet. It **loses** a part of the
#   chat column (twice the budget of `chat`, longer steps), and the flooding tenant now waits behind
#   itself (notebook 11).
# - **batch**: how far apart are the four figures of its column, compared with those of the others?
#   The next section takes it apart.

# %% [markdown]
# ### Is it the policy, or the budget?
#
# The advice for batch work is usually given as a policy: "prefill first", or "Dynamic SplitFuse".
# **Predict**: with the same budget of 8,192 tokens, by how many percent do decode-first,
# prefill-first and split-fuse differ in the time for the whole batch? And between budgets of 512
# and 8,192 with the same policy?


# %%
def time_for_batch(gpu: str, policy: str, budget: int) -> float:
    """Seconds for all of the batch, on Llama-3-8B."""
    knobs = dict(policy=policy, max_num_batched_tokens=budget)
    return mc.simulate(batch, model="llama-3-8b", gpu=gpu, **knobs).metrics().duration


rows = []
for gpu in ("a100-80g-sxm", "h100-sxm"):
    for policy in ("decode-first", "prefill-first", "split-fuse"):
        small, large = (time_for_batch(gpu, policy, budget) for budget in (512, 8192))
        rows.append(dict(GPU=gpu, policy=policy, small=small, large=large, gain=small / large - 1))
Table([
    {"GPU": r["GPU"], "policy": r["policy"], "budget 512": f"{r['small']:.1f} s",
     "budget 8192": f"{r['large']:.1f} s", "larger budget gains": f"{r['gain']:.0%}"}
    for r in rows
])  # fmt: skip

# %%
for gpu in ("a100-80g-sxm", "h100-sxm"):
    large = [r["large"] for r in rows if r["GPU"] == gpu]
    print(f"{gpu}: at budget 8192 the policies differ by {max(large) / min(large) - 1:.1%}")

# %% [markdown]
# Which of the two numbers is larger: the spread between policies at one budget, or the gain from
# the larger budget? With no reader waiting, whoever is served first, the same tokens go through the
# same matrix products; a large budget means fewer steps, so fewer reads of the weights and less
# overhead. Compare the two GPUs: the faster the arithmetic, the more a small step wastes.
#
# So "batch wants prefill-first" may name the wrong knob. And a large budget has a price: more
# requests are admitted early, and where their answers outgrow the block pool, some are preempted
# and computed again. Llama-2-7B stores four times the bytes per token that Llama-3-8B does (32 KV
# heads against 8). Give it a batch with long answers.
#
# **Predict**: which of the four runs below is preempted most, and which is fastest?

# %%
answers = mc.workloads.poisson(
    1.0, 160, prompt=Lengths(500, p90=1500, maximum=6000), output=Lengths(250, p90=500), seed=4
)
long_answers = [replace(spec, arrival=0.0) for spec in answers]
rows = []
for policy in ("decode-first", "prefill-first"):
    for budget in (512, 8192):
        knobs = dict(policy=policy, max_num_batched_tokens=budget)
        metrics = mc.simulate(long_answers, **knobs, **A100).metrics()
        rows.append(
            {
                **knobs,
                "preemptions": metrics.num_preemptions,
                "tokens computed again": metrics.recomputed_tokens,
                "all done": f"{metrics.duration:.1f} s",
            }
        )
Table(rows)

# %% [markdown]
# Does the large budget still gain anything here? A batch of long answers spends its time decoding,
# and there a budget has nothing to give; a small budget lets requests in slowly enough that early
# ones leave before late ones need their blocks. Prefill-first admits as fast as it can. The batch
# preset **loses** where answers are long and memory is short.

# %% [markdown]
# ## Exercise 3: let the promise choose (15 minutes, medium)
#
# Write `choose_preset(workload, candidates, ttft, itl)`. `candidates` maps names to engine knobs;
# return the name that serves the most requests per second within the promise (`itl=None`: no
# promise about gaps). Simulate on the A100 with Llama-2-7B.


# %%
# Exercise choose-preset (15 minutes, medium)
def choose_preset(workload, candidates: dict, ttft: float, itl: float | None) -> str:
    raise NotImplementedError


# %%
check.choose_preset(choose_preset)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `mc.simulate(workload, model=…, gpu=…, **knobs)` gives a trace, and `trace.goodput(ttft=…, itl=…)`
# the requests per second that kept the promise.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: choose-preset -->
# ```python
# def choose_preset(workload, candidates: dict, ttft: float, itl: float | None) -> str:
#     def goodput(name: str) -> float:
#         knobs = candidates[name]
#         trace = mc.simulate(workload, model="llama-2-7b", gpu="a100-80g-sxm", **knobs)
#         return trace.goodput(ttft=ttft, itl=itl)
#
#     return max(candidates, key=goodput)
# ```
#
# </details>

# %% [markdown]
# ## Recap
#
# 1. Prefill-first with chunks still freezes the decodes. What, then, is the chunk for?
# 2. Why does `alternating` lose to a mixed step, although it computes the same tokens?
# 3. Your service translates documents overnight. What do you set: the policy, the order, or the
#    budget? What do you watch?
#
# <details><summary>Answers</summary>
#
# 1. A chunk only makes it *possible* to serve decodes in between. Whether they are served is the
#    policy's choice, and prefill-first makes it only with what a chunk leaves over.
# 2. Every step reads all weights and pays the overhead of a step. Two steps pay twice what one
#    mixed step pays once, and a decode waits for both.
# 3. The budget: large, because nobody reads along. The policy changes little. Watch preemptions:
#    a batch that does not fit the block pool computes some of its tokens twice.
#
# </details>
