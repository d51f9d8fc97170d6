# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 05 · The stall: ten decodes meet 8,000 tokens
#
# **Time:** 45 minutes · **Needs:** notebook 04 (continuous batching). No GPU.
#
# After this notebook you can
#
# 1. predict from a model's size and a GPU's datasheet how long a long prompt stops everybody else;
# 2. read a gap between two tokens as decode floor + interference + waiting, and name the culprit;
# 3. show the stall on a real model on your own machine, and say which figure hides it.

# %%
import matplotlib.pyplot as plt

import minichunk as mc
from minichunk.compare import Table
from minichunk.core.stalls import gaps
from minichunk.labs import check
from minichunk.labs.result import is_fast
from minichunk.sim.counter import StepCounter, StepLoad
from minichunk.sim.hardware import GPUS
from minichunk.sim.shapes import MODELS

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")

# %% [markdown]
# ## The scene
#
# Ten users are reading: their answers stream, one token of each per step. Then somebody pastes a
# document of 8,000 tokens. Continuous batching, as you wrote it in notebook 04, gives the whole
# prompt a step of its own.
#
# **Predict**: for how many milliseconds do the ten answers stand still, with Llama-2-7B on an
# A100? (A decode step of ten takes about a hundredth of a second.) Write the number down.

# %%
scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000)
trace = mc.simulate(scene, policy="continuous", max_num_batched_tokens=8192, **A100)
metrics = trace.metrics()
print(f"median gap between two tokens: {metrics.itl.p50 * 1e3:6.1f} ms")
print(f"longest gap:                   {metrics.itl.max * 1e3:6.1f} ms")
trace.timeline(view=(0.0, 1.2))

# %% [markdown]
# Ten lanes stop at the same moment and go on at the same moment. Between them lies one step, and
# in it one prompt. Compare with your number.
#
# Nobody did anything wrong: the policy let the newcomer in at once, and the GPU was busy all the
# time. The engine worked; ten readers saw it hang.

# %% [markdown]
# ## Where the time goes
#
# A prefill of thousands of tokens is bound by computing, not by memory (notebook 01). So its
# length is its number of floating-point operations over what the GPU does per second. There are
# two terms:
#
# - every token passes through every matrix of every layer: 2 operations per weight and token;
# - in attention, the token at position *i* meets *i* + 1 keys. Each such pair costs 2 operations
#   per element of the query for the score and 2 for the weighted sum of values, in every layer.
#
# ## Exercise 1: count them (10 minutes, easy)
#
# Write `prefill_flops(shape, prompt_tokens)`. The shape has `linear_params` (weights in the
# matrices of all layers), `num_layers` and `query_size` (elements of one token's query, all
# heads).

# %%
shape = MODELS["llama-2-7b"]
print(f"{shape.linear_params:,} linear weights, {shape.num_layers} layers, {shape.query_size=}")


# %%
# Exercise prefill-flops (10 minutes, easy)
def prefill_flops(shape, prompt_tokens: int) -> float:
    raise NotImplementedError


# %%
check.prefill_flops(prefill_flops)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The number of query-key pairs under the causal mask is 1 + 2 + … + n.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: prefill-flops -->
# ```python
# def prefill_flops(shape, prompt_tokens: int) -> float:
#     pairs = prompt_tokens * (prompt_tokens + 1) / 2
#     linear = 2 * shape.linear_params * prompt_tokens
#     attention = 4 * shape.query_size * pairs * shape.num_layers
#     return linear + attention
# ```
# </details>

# %% [markdown]
# ## Bound and simulation, GPU by GPU
#
# The engine's own counter gives the same operations. Divided by the peak rate of the datasheet
# they are a bound that no software can beat; the simulated stall lies above it, because kernels
# reach only a part of the peak. (Whether the keys and values of 32,000 tokens fit into a GPU's
# memory is left aside here: `num_blocks` says that they do.)
#
# A textbook chapter on this subject says that a prompt of 8,000 tokens stops the others for 300
# ms, and one of 32,000 for one to two seconds. It names neither model nor GPU.
#
# **Predict**: for a model of 7 billion parameters, on which of the GPUs below can these two
# numbers be true?

# %%
counter = StepCounter("llama-2-7b")
rows = []
for gpu in ("a10g", "l4", "a100-80g-sxm", "h100-sxm", "mi300x"):
    row = {"gpu": gpu}
    for n in (8000, 32000):
        parts = counter.count(StepLoad(n, 1, n, n * (n + 1) / 2, n))
        bound = sum(part.flops for part in parts) / GPUS[gpu].peak_flops
        knobs = dict(policy="continuous", max_num_seqs=11, num_blocks=2400)
        run = mc.simulate(mc.workloads.stall_scene(10, n), model="llama-2-7b", gpu=gpu, **knobs)
        row[f"{n:,}: bound"] = f"{bound * 1e3:.0f} ms"
        row[f"{n:,}: stall"] = f"{run.metrics().itl.max * 1e3:.0f} ms"
    rows.append(row)
Table(rows)

# %% [markdown]
# Compare with your prediction, and look at the A100's bound for 8,000 tokens: does 300 ms lie
# above it? A number without a model and a GPU beside it says only "some hundreds of milliseconds",
# and that much holds.
#
# Four times the prompt costs more than four times the time. **Predict** the ratio for the A100
# from the table, then look at the curve: the dashed line is what proportion alone would give.

# %%
lengths = [1000, 2000, 4000, 8000, 16000, 32000]
stalls = []
for n in lengths:
    run = mc.simulate(mc.workloads.stall_scene(10, n), policy="continuous", **A100)
    stalls.append(run.metrics().itl.max)
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(lengths, stalls, "o-", label="longest gap")
axis.plot(lengths, [stalls[0] * n / lengths[0] for n in lengths], "k--", label="in proportion")
axis.set(xlabel="prompt tokens", ylabel="seconds", title="the stall bends upwards")
axis.legend()
plt.show()

# %% [markdown]
# ## Anatomy of a gap
#
# The trace keeps every token's time, so every gap can be taken apart:
#
# **gap = decode floor + interference + waiting**
#
# - the **floor** is what a step with only these decodes would have cost. It cannot be scheduled
#   away;
# - **interference** is what prompt chunks *in the token's own step* added to that step;
# - **waiting** is the time in which the request was in no step at all.
#
# **Predict**: in the scene above, is the long gap interference or waiting?

# %%
of_request_0 = [gap for gap in gaps(trace) if gap.request_id == "0"]
long = max(range(len(of_request_0)), key=lambda i: of_request_0[i].gap)
Table(
    [
        {
            "token": gap.token_index,
            "gap (ms)": round(gap.gap * 1e3, 1),
            "floor": round((gap.gap - gap.interference - gap.waiting) * 1e3, 1),
            "interference": round(gap.interference * 1e3, 1),
            "waiting": round(gap.waiting * 1e3, 1),
        }
        for gap in of_request_0[long - 2 : long + 3]
    ]
)

# %% [markdown]
# All of it is waiting: under this policy a prompt never shares a step with a decode. The next
# notebook mixes them, and then the same time appears as interference, in smaller pieces.
#
# A **stall** is a gap that is long for the hardware (above `stall_factor` = 2 floors) *and* long
# for a reader (above `stall_slo` = 50 ms). Each carries its causes, the longest first.

# %%
for stall in trace.stalls()[:3]:
    print(stall.describe())
print(f"… {len(trace.stalls())} stalls in all")

# %% [markdown]
# ## Exercise 2: find them (10 minutes, easy)
#
# Write `find_stalls(token_times, floor, factor, slo)` for one request: a list of
# `(index of the token after the gap, gap in seconds)`, in order of time.


# %%
# Exercise find-stalls (10 minutes, easy)
def find_stalls(token_times, floor, factor=2.0, slo=0.050):
    raise NotImplementedError


# %%
check.find_stalls(find_stalls)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Both conditions must hold. `zip(token_times, token_times[1:])` gives the pairs.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: find-stalls -->
# ```python
# def find_stalls(token_times, floor, factor=2.0, slo=0.050):
#     pairs = zip(token_times, token_times[1:])
#     found = [(index, later - earlier) for index, (earlier, later) in enumerate(pairs, start=1)]
#     return [(index, gap) for index, gap in found if gap > factor * floor and gap > slo]
# ```
# </details>

# %% [markdown]
# ## Exercise 3: split a gap (15 minutes, medium)
#
# Write `split_gap(start, end, steps, floor)` for the gap between a token at time `start` and the
# next one at `end`. It returns `(floor, interference, waiting)` in seconds, and the three add up
# to the gap. `steps` are the trace's steps; each has `start`, `end` and `duration`, and a token's
# time is the `end` of the step that made it.
#
# One detail: the part called floor cannot be longer than the step itself.


# %%
# Exercise split-gap (15 minutes, medium)
def split_gap(start, end, steps, floor):
    raise NotImplementedError


# %%
check.split_gap(split_gap)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Find the step that ended at `end`: it is the token's own. What of the gap lies inside that step
# is floor and interference; what lies before it is waiting.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: split-gap -->
# ```python
# def split_gap(start, end, steps, floor):
#     own = next(step for step in steps if step.end == end)
#     inside = min(own.duration, end - start)
#     base = min(floor, inside)
#     return base, inside - base, (end - start) - inside
# ```
# </details>

# %% [markdown]
# ## On a real model
#
# The same scene in small, on this machine and on the wall clock: SmolLM2-135M streams four answers
# when a long prompt arrives. Nothing here is simulated. The loop below is all there is to serving:
# add requests, call `step()` until none is left.

# %%
llm = mc.LLM("smollm2-135m", quiet=True)
size = (
    dict(decode_steps=6, prompt_tokens=192)
    if is_fast()
    else dict(decode_steps=12, prompt_tokens=768)
)


# %%
def serve(policy: str, decode_steps: int, prompt_tokens: int, **knobs) -> mc.Trace:
    """Four answers stream; after some steps a long prompt comes, and all run to their end."""
    engine = llm.new_engine(policy=policy, max_num_batched_tokens=1024, **knobs)
    greedy = dict(temperature=0.0, ignore_eos=True)
    for user in range(4):
        prompt = [100 * user + i for i in range(8)]
        engine.add_request(prompt, mc.SamplingParams(max_tokens=2 * decode_steps, **greedy))
    for _ in range(decode_steps):
        engine.step()
    long_prompt = [1000 + i for i in range(prompt_tokens)]
    engine.add_request(long_prompt, mc.SamplingParams(max_tokens=2, **greedy))
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


# %% [markdown]
# **Predict**: a decode step here takes tens of milliseconds, on a fast machine less, on a slow one
# more. How many of them does the long prompt cost the four readers?

# %%
serve("continuous", **size)  # once to warm up: the first use of a shape is slow
real = serve("continuous", **size)
floor = real.metrics().itl.p50
longest = real.metrics().itl.max
print(f"median gap {floor * 1e3:.0f} ms, longest gap {longest * 1e3:.0f} ms")
for stall in real.stalls():
    if stall.gap == longest:
        print(stall.describe())
real.timeline()

# %% [markdown]
# On a CPU the picture is the A100's: four lanes stop together and go on together. (A fast GPU
# computes this prompt for a model this small in a few steps' time: the stall is there, but short.)
# The clock is another one; the scheduler is the same, to the line of code.
#
# One thing is new. No prompt ever shares a step with these decodes, and yet some of their steps may
# be marked as interference, or even as a stall. On a wall clock the floor is an estimate, from the
# run's own decode steps, and a step takes longer when the machine has something else to do. In the
# picture that looks like a chunk; `describe()` tells the two apart, as only one names a prompt.
#
# ## Which figure shows it?
#
# Back to the simulated A100, with many users. Most prompts are short questions; some are long
# documents, as in retrieval-augmented generation.
#
# **Predict**: the median gap is one decode step. Will the stalls show in the 95th percentile of
# all gaps? In the 99th? In TPOT, the mean gap of each request?

# %%
mix = mc.workloads.poisson(
    1.5, 25 if is_fast() else 100, seed=3,
    prompt=mc.workloads.Lengths(1500, p90=6000, maximum=16000),
    output=mc.workloads.Lengths(150, p90=400),
)  # fmt: skip
busy = mc.simulate(mix, policy="continuous", max_num_batched_tokens=8192, **A100).metrics()
for name, spread in (("ITL", busy.itl), ("TPOT", busy.tpot)):
    values = ((q, getattr(spread, q)) for q in ("p50", "p95", "p99", "max"))
    print(f"{name:5}", "  ".join(f"{q} {seconds * 1e3:7.1f} ms" for q, seconds in values))
hit = sum((one.max_itl or 0) > 0.2 for one in busy.requests.values())
print(f"{hit} of {busy.num_requests} readers saw their answer stop for more than 200 ms")

# %% [markdown]
# A stall is rare among *gaps* and common among *readers*: an answer of hundreds of tokens has
# hundreds of gaps, and one of them is enough. The median cannot show it and a mean dilutes it.
# Look at the longest gap of each answer, or at a high percentile of ITL.
#
# ## Recap
#
# 1. Why is the stall at 32,000 tokens more than four times the one at 8,000?
# 2. Under a policy that never mixes, which of the three parts of a gap is always near zero?
# 3. A dashboard shows only the mean TPOT. What does it miss?
#
# <details><summary>Answers</summary>
#
# 1. Matrix products grow with the length, attention with its square.
# 2. Interference: no prompt chunk is ever in a decode's own step, so the time appears as waiting.
# 3. The rare long gap. Hundreds of short ones average it away, yet each reader may meet one.
# </details>
