# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 04 · Batching: static, then continuous
#
# **Time:** 45 minutes · **Needs:** notebook 01 (why decode is bound by memory). No GPU.
#
# After this notebook you can
#
# 1. say why a batch makes decode cheap, and put a number on it;
# 2. count the steps and the idle slots of a static batch, and see what continuous batching does
#    with them;
# 3. write a scheduling policy as a generator, and prove step by step that it schedules as
#    intended.

# %%
import inspect

import matplotlib.pyplot as plt

import minichunk as mc
from minichunk.compare import Table
from minichunk.labs import check
from minichunk.labs.result import is_fast
from minichunk.sim.cost import CostModel
from minichunk.sim.counter import StepLoad

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")

# %% [markdown]
# ## Why batch at all
#
# A decode step computes one token per request. Before it can, it reads every weight of the model
# from memory, and it reads them once *per step*, however many requests share the step.

# %%
cost_model = CostModel(**A100)


def decode_step(batch: int, context: int = 500) -> float:
    """Seconds of one step in which `batch` requests decode one token each."""
    load = StepLoad(batch, batch, num_decodes=batch, decode_context=batch * context)
    return sum(part.seconds for part in cost_model.parts(load))


print(f"Llama-2-7B on an A100, one request: {decode_step(1) * 1e3:.1f} ms per decode step")

# %% [markdown]
# **Predict** before you run the next cell: how many milliseconds does a step take that decodes 32
# requests at once, each with a context of 500 tokens? Write the number down.

# %%
batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
Table(
    [
        {
            "batch": b,
            "ms per step": round(decode_step(b) * 1e3, 1),
            "tokens/s": round(b / decode_step(b)),
            "times a batch of 1": round(decode_step(b) / decode_step(1), 2),
        }
        for b in batches
    ]
)

# %% [markdown]
# Compare the row of 32 with your prediction. If you multiplied by 32, you priced a decode like a
# prefill. The step grows only by what each request brings itself: its own keys and values to read,
# and a row in each matrix product. The weights are shared.
#
# So a server wants many requests in each step. The question of this notebook is how they get into
# the batch, and when they leave it.

# %% [markdown]
# ## Static batching
#
# The oldest answer: collect a batch, run it until its *last* request has finished, then collect
# the next one. In minichunk a scheduling policy is a generator that *offers* tokens to requests;
# the mechanism answers each offer with what it could grant. Here is the whole of static batching:

# %%
print(inspect.getsource(mc.policies.static.function))

# %% [markdown]
# `view` shows the policy one step: `view.decoding` are the running requests whose prompts are
# done, `view.unfinished` the running ones whose prompts are not, and `view.prefilling` continues
# after these with the queue, admitting whom you offer tokens. `view.state` is the policy's memory.
#
# Twelve short prompts arrive at once and four slots are free (`max_num_seqs=4`). The answers have
# very different lengths, as answers do.

# %%
output_lengths = [4, 30, 6, 12, 25, 3, 8, 20, 5, 10, 28, 7]
twelve = [mc.RequestSpec(0.0, mc.PromptShape(100), length) for length in output_lengths]
print(f"{len(twelve)} requests, {sum(output_lengths)} output tokens, 4 slots")

# %% [markdown]
# **Predict**: how many steps does static batching need? Count: the first step of a batch computes
# its prompts and yields the first token of each; every further step yields one more token of each
# request that still needs one.

# %%
static = mc.simulate(twelve, policy="static", max_num_seqs=4, **A100)
print(f"{len(static.steps)} steps, {static.metrics().duration * 1e3:.0f} ms")
static.timeline()

# %% [markdown]
# Read the timeline: one lane per request, prompts in one colour, decodes in the other. In each
# batch the long answer keeps going while the three lanes beside it are empty, and the requests of
# the next batch wait although slots stand idle.
#
# ## Exercise 1: count the steps (10 minutes, easy)
#
# Write `static_steps(output_lengths, slots)`: the number of steps that static batching takes for
# requests that all arrive at time 0, in this order, with prompts so short that the prompts of one
# batch fit into one step.


# %%
# Exercise static-steps (10 minutes, easy)
def static_steps(output_lengths: list[int], slots: int) -> int:
    raise NotImplementedError


# %%
check.static_steps(static_steps)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Cut the list into pieces of `slots` requests. How long does one piece take? Its prompt step gives
# one token to each, so do not count that step twice.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: static-steps -->
# ```python
# def static_steps(output_lengths: list[int], slots: int) -> int:
#     batches = (output_lengths[i : i + slots] for i in range(0, len(output_lengths), slots))
#     return sum(max(batch) for batch in batches)
# ```
# </details>

# %% [markdown]
# ## Continuous batching
#
# Orca (Yu et al., OSDI 2022) decides anew *in every step* who is in the batch: a request leaves
# the moment it finishes, and its slot goes to the next in the queue. The paper calls it
# iteration-level scheduling; the field calls it continuous batching.
#
# **Predict**: the same twelve requests, four slots. How many steps now? A lower bound is the
# number of output tokens over four slots. Will it be reached?

# %%
both = mc.compare(
    twelve, {"static": dict(policy="static"), "continuous": dict(policy="continuous")},
    max_num_seqs=4, **A100,
)  # fmt: skip
print(f"lower bound: {sum(output_lengths) / 4:.0f} steps")
both.table()

# %%
both.timeline()

# %% [markdown]
# Move the cursor over both panes: at the same moment the upper one has empty slots and the lower
# one does not. Two things keep it from the lower bound. At the end the queue is empty and the last
# long answers run alone. And look at a step that computes a prompt: what do the decoding requests
# do in that step? Ask the trace.

# %%
continuous = both.traces["continuous"]
step = next(n for n, s in enumerate(continuous.steps) if n > 0 and s.prefill_tokens)
for request_id in ("1", "4"):
    print(continuous.why(request_id, step))

# %% [markdown]
# In this policy prefill and decode never share a step: whole prompts go first, and everybody who
# decodes waits for them. With prompts of 100 tokens that costs little. Keep it in mind.
#
# ## Exercise 2: the idle share (10 minutes, medium)
#
# A *slot-step* is one slot in one step. With 4 slots and 50 steps there are 200 of them. Write
# `idle_share(trace, slots)`: the share of slot-steps in which the slot computed nothing. A trace's
# `spans` say who was in which steps: a prefill chunk is a span of one step, a run of decode steps
# is a span from `first_step` to `last_step`, both included.

# %%
continuous.spans[:6]


# %%
# Exercise idle-share (10 minutes, medium)
def idle_share(trace: mc.Trace, slots: int) -> float:
    raise NotImplementedError


# %%
check.idle_share(idle_share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Count the busy slot-steps first: each span is busy for `last_step - first_step + 1` steps,
# whatever its number of tokens. There are `len(trace.steps)` steps.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: idle-share -->
# ```python
# def idle_share(trace: mc.Trace, slots: int) -> float:
#     busy = sum(span.last_step - span.first_step + 1 for span in trace.spans)
#     return 1 - busy / (slots * len(trace.steps))
# ```
# </details>

# %%
try:
    for name, trace in both.traces.items():
        print(f"{name}: {idle_share(trace, 4):.0%} of the slot-steps idle")
except NotImplementedError:
    print("Write idle_share above, then run this cell again.")

# %% [markdown]
# ## Write it yourself
#
# You have seen what continuous batching does, and how a policy is written. The rules once more:
#
# - the policy is a generator, called anew for every step;
# - `granted = yield request, n` offers `n` tokens and learns how many were granted;
# - `yield mc.Offer(request, n, whole=True)` offers all or nothing: the whole prompt or no token;
# - `request.num_uncomputed_tokens` is what a request still needs to be up to date: the rest of its
#   prompt, or 1 when it decodes.
#
# ## Exercise 3: a continuous batcher (15 minutes, medium)
#
# Write the policy: offer every unfinished or waiting prompt *whole*. Only if none of them was
# granted anything, give each decoding request its token.


# %%
# Exercise continuous-policy (15 minutes, medium)
def my_continuous(view):
    raise NotImplementedError


# %%
check.continuous_policy(my_continuous)

# %% [markdown]
# The check runs your policy and the engine's on workloads drawn anew and compares them step by
# step (`mc.diff_traces`). If they part, you see the first step that differs, the reason, and both
# timelines.
#
# <details><summary>Hint</summary>
#
# Two loops. The first goes over `view.prefilling` and adds up what was granted; the second goes
# over `view.decoding`, and runs only if the sum is 0.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: continuous-policy -->
# ```python
# def my_continuous(view):
#     granted = 0
#     for request in view.prefilling:
#         granted += yield mc.Offer(request, request.num_uncomputed_tokens, whole=True)
#     if not granted:
#         for request in view.decoding:
#             yield request, 1
# ```
# </details>

# %% [markdown]
# ## What users feel
#
# Steps are the scheduler's unit; users feel seconds. Now requests arrive one by one (a Poisson
# process), with prompts and answers of chat-like lengths, and the rate rises.
#
# **Predict**: at 2 requests per second the server is far from busy under either policy. Will the
# median time to first token (TTFT) differ much between them?

# %%
Lengths, n = mc.workloads.Lengths, 20 if is_fast() else 80
loads = [
    mc.workloads.poisson(rate, n, prompt=Lengths(200, p90=600), output=Lengths(80, p90=300), seed=1)
    for rate in (1, 2, 4, 8, 16)
]
rows = mc.sweep(
    {"policy": ["static", "continuous"], "workload": loads},
    max_num_seqs=32, max_num_batched_tokens=2048, **A100,
)  # fmt: skip
keys = ("ttft_p50", "ttft_p99", "itl_p50", "itl_max", "throughput")
Table(
    [
        {"policy": r["policy"], "load": r["workload"].name, **{k: round(r[k], 3) for k in keys}}
        for r in rows
    ]
)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for policy in ("static", "continuous"):
    mine = [row for row in rows if row["policy"] == policy]
    rates = [1, 2, 4, 8, 16]
    axes[0].plot(rates, [row["ttft_p50"] for row in mine], "o-", label=policy)
    axes[1].plot(rates, [row["throughput"] for row in mine], "o-", label=policy)
axes[0].set(ylabel="median TTFT (s)", yscale="log", xlabel="requests per second")
axes[1].set(ylabel="output tokens per second", xlabel="requests per second")
axes[1].legend()
plt.show()

# %% [markdown]
# Static batching makes a newcomer wait for strangers to finish, even on an almost idle server:
# look at the leftmost points. Throughput parts later, where idle slots begin to hurt.
#
# One column should worry you under either policy. `itl_max` is the longest gap between two tokens
# of one answer, in seconds. The median gap is one decode step, but somewhere in the run somebody's
# answer stood still for many of them: in a static batch while the prompts of its own batch were
# computed, in a continuous one whenever a newcomer's prompt was. Neither mixes prompts and decodes
# in one step. The next notebook is about that gap.

# %% [markdown]
# ## The same scheduler on a real model
#
# Nothing above depended on the GPU being simulated: the engine, the scheduler and the trace are
# the same for a real model. Here SmolLM2-135M answers on this machine, and the clock is the wall
# clock.
#
# **Predict**: two slots, and the output lengths below. Which of the two schedules is
# faster, and by how much? You can compute it from the steps.

# %%
llm = mc.LLM("smollm2-135m", quiet=True)
lengths = [2, 5, 2, 4] if is_fast() else [3, 24, 4, 20, 3, 18]
few = [mc.RequestSpec(0.0, mc.PromptShape(16), length) for length in lengths]
measured = mc.compare(
    few, {"static": dict(policy="static"), "continuous": dict(policy="continuous")},
    llm=llm, max_num_seqs=2,
)  # fmt: skip
measured.table()

# %%
measured.timeline()

# %% [markdown]
# Compare the columns `steps` and `time` with your prediction. A wall clock is never as even as a
# simulated one: where a lane changes its colour though nobody's prompt is computed, a step took
# longer than the others. But the order of the two schedules, and roughly their ratio, follows from
# the steps.
#
# ## Recap
#
# 1. Why does a decode step for 32 requests cost much less than 32 steps for one?
# 2. When does static batching waste nothing?
# 3. In the continuous policy of this notebook, what do decoding requests do while a prompt is
#    computed?
#
# <details><summary>Answers</summary>
#
# 1. The weights are read from memory once per step and shared; each request adds only its own keys
#    and values and one row per matrix product.
# 2. When all answers of a batch are equally long and the queue never runs dry between batches.
# 3. They wait. The step belongs to the prompt alone, however long it is.
# </details>
