# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 06 · Chunked prefill: eight times a thousand
#
# **Time:** 50 minutes · **Needs:** notebooks 04 and 05. No GPU.
#
# After this notebook you can
#
# 1. write the scheduler that cuts a prompt into chunks and mixes them with everybody's decodes;
# 2. say what a chunk costs when decodes ride along, and what the chunks cost the prompt itself;
# 3. explain why the tokens stay the same, and check it on a real model.

# %%
import torch

import minichunk as mc
from minichunk.compare import Table
from minichunk.labs import check
from minichunk.labs.result import is_fast
from minichunk.sim.cost import CostModel, StepBreakdown
from minichunk.sim.counter import StepLoad
from minichunk.viz import figures

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")

# %% [markdown]
# ## The idea
#
# Notebook 05 ended with ten answers that stood still while a prompt of 8,000 tokens had a step to
# itself. Nothing forces the prompt into one step. Keys and values of its first 1,000 tokens can be
# computed now and the next 1,000 in the next step: attention finds the earlier ones in the KV
# cache.
#
# So: every step, first give each decoding request its token; then give the prompt as many tokens
# as the budget of the step still allows. That is *chunked prefill* with *stall-free batching*
# (Sarathi-Serve, Agrawal et al., OSDI 2024).
#
# **Predict** for ten decodes and 8 × 1,000 tokens on the simulated A100, where the whole prompt
# stopped everybody for more than half a second:
#
# - the longest gap between two tokens of the ten answers, in milliseconds;
# - how much later the newcomer's first token comes than with the whole prompt in one step.
#
# ## Exercise 1: the scheduler (10 minutes, medium)
#
# The whole of it is two loops of a policy. `view.decoding` are the requests that decode;
# `view.prefilling` are the unfinished prompts and then the queue. The mechanism clips each offer
# to `chunk_size` and to what is left of the budget, so you may offer all that a prompt still
# needs.


# %%
# Exercise decode-first-policy (10 minutes, medium)
def my_decode_first(view):
    raise NotImplementedError


# %%
check.decode_first_policy(my_decode_first)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Start from your continuous batcher of notebook 04. Which loop comes first now? What became of the
# condition between them, and of `whole=True`?
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: decode-first-policy -->
# ```python
# def my_decode_first(view):
#     for request in view.decoding:
#         yield request, 1
#     for request in view.prefilling:
#         yield request, request.num_uncomputed_tokens
# ```
# </details>

# %% [markdown]
# ## Side by side
#
# The same workload under both schedulers; the engine's own policy does the chunking. Each has an
# empty block pool and the same prompts; only the schedule differs.

# %%
scene = mc.workloads.stall_scene(num_decodes=10, prompt_tokens=8000, decode_output_tokens=100)
both = mc.compare(
    scene,
    {
        "whole prompts": dict(policy="continuous", max_num_batched_tokens=8192),
        "chunked": dict(policy="decode-first", chunk_size=1000, max_num_batched_tokens=1024),
    },
    **A100,
)
for name, trace in both.traces.items():
    print(f"{name}: the newcomer's first token after {trace.metrics().requests['10'].ttft:.3f} s")
both.table()

# %%
both.timeline()

# %% [markdown]
# One time axis, one scrubber: move the cursor into the long prompt and compare the lanes of the
# ten. Above they wait; below they go on, a token per step, while the eight chunks go by.
#
# Compare with your two numbers. The longest gap is a fraction of what it was, and the newcomer
# paid for it with a first token that comes a little later.
#
# And look at the column `stalls`: there are *more* of them. A stall is a gap above 50 ms and above
# two floors, and eight steps of this length each make ten. Chunks of 1,000 turned one long silence
# into a short stutter. How small a chunk must be for no stall at all is the subject of notebook
# 07.
#
# ## Exercise 2: where the cuts are (10 minutes, easy)
#
# Write `chunk_bounds(prompt_tokens, chunk_size, budget, num_decodes)`: the list of (start, stop)
# positions of the prompt's chunks under this policy, when `num_decodes` requests decode in every
# step.


# %%
# Exercise chunk-bounds (10 minutes, easy)
def chunk_bounds(prompt_tokens, chunk_size, budget, num_decodes):
    raise NotImplementedError


# %%
check.chunk_bounds(chunk_bounds)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The decodes take their tokens out of the budget first. Two limits remain; the smaller one counts.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: chunk-bounds -->
# ```python
# def chunk_bounds(prompt_tokens, chunk_size, budget, num_decodes):
#     size = min(chunk_size, budget - num_decodes)
#     return [
#         (start, min(start + size, prompt_tokens)) for start in range(0, prompt_tokens, size)
#     ]
# ```
# </details>

# %% [markdown]
# ## Eight steps, one by one
#
# **Predict**: all eight chunks have 1,000 tokens. Do their steps take the same time?

# %%
chunked = both.traces["chunked"]
spans = [s for s in chunked.spans if s.request_id == "10" and s.kind == "prefill"]
rows = []
for span in spans:
    step = chunked.steps[span.first_step]
    rows.append(
        {
            "positions": f"{span.first_position}–{span.first_position + span.tokens - 1}",
            "decodes": step.num_decodes,
            "step (ms)": round(step.duration * 1e3, 1),
            "decode floor": round(step.decode_floor * 1e3, 1),
            "interference": round((step.duration - step.decode_floor) * 1e3, 1),
        }
    )
Table(rows)

# %% [markdown]
# Each chunk attends to all chunks before it, so the last one has the most to do. When you promise
# a longest gap, it is the last chunk that must keep the promise.
#
# For the ten, what was *waiting* in notebook 05 is *interference* here: they are in every step,
# but the step is longer than a decode needs.
#
# ## Why the decodes ride almost for free
#
# Three steps: ten decodes alone, a chunk of 1,000 alone, both in one.
#
# **Predict**: if the first takes *d* and the second *c* milliseconds, how long is the third? And
# how much of the GPU's peak operations and of its peak bandwidth does each step use?

# %%
cost_model = CostModel(**A100)


def step_of(chunk: int, decodes: int, start: int = 4000, context: int = 230) -> StepBreakdown:
    pairs, end = chunk * (start + (chunk + 1) / 2), (start + chunk if chunk else 0)
    load = StepLoad(chunk + decodes, decodes, chunk, pairs, end, decodes, decodes * context)
    parts = tuple(cost_model.parts(load))
    return StepBreakdown(parts, cost_model.peak_flops, cost_model.peak_bandwidth)


steps = {"decodes": step_of(0, 10), "chunk": step_of(1000, 0), "mixed": step_of(1000, 10)}


# %%
def milliseconds(step: StepBreakdown, kind: str) -> float:
    return round(1e3 * sum(part.seconds for part in step.parts if part.name == kind), 1)


kinds = ("linear", "elementwise", "prefill_attention", "decode_attention", "lm_head", "overhead")
Table(
    [
        {
            "step": name,
            "ms": round(step.seconds * 1e3, 1),
            "of peak FLOP/s": f"{step.compute_utilisation:.0%}",
            "of peak bandwidth": f"{step.bandwidth_utilisation:.0%}",
            **{kind: milliseconds(step, kind) for kind in kinds},
        }
        for name, step in steps.items()
    ]
)

# %%
alone = steps["decodes"].seconds + steps["chunk"].seconds
print(f"one after the other {alone * 1e3:.1f} ms, mixed {steps['mixed'].seconds * 1e3:.1f} ms")
extra = steps["mixed"].seconds - steps["chunk"].seconds
print(f"ten decodes added {extra * 1e3:.1f} ms to the chunk; alone they take "
      f"{steps['decodes'].seconds * 1e3:.1f} ms")  # fmt: skip

# %% [markdown]
# The column `linear` says why. Alone, the decodes spend most of their time reading weights. The
# chunk reads the same weights anyway, and ten more rows in its matrix products hardly show. What
# the decodes still pay for themselves is mostly reading their own keys and values.
#
# A textbook chapter claims that pure decode leaves about 30% of the compute idle, and that a mixed
# step fills compute and bandwidth both. Hold that against the two utilisation columns: how much
# does the decode step leave idle? Does the mixed step come near the peak of the bandwidth? What
# mixing saves is not idle bandwidth but a second reading of the weights.
#
# Chunks alone would not do. `alternating` cuts the same chunks, but a step holds either chunks or
# decodes. **Predict**: will its longest gap lie between those of the other two? And its newcomer's
# first token?

# %%
three = mc.compare(
    scene,
    {
        "whole prompts": dict(policy="continuous", max_num_batched_tokens=8192),
        "alternating": dict(policy="alternating", chunk_size=1000, max_num_batched_tokens=1024),
        "chunked and mixed": dict(
            policy="decode-first", chunk_size=1000, max_num_batched_tokens=1024
        ),
    },
    **A100,
)
three.table()

# %% [markdown]
# Look at its newcomer: the latest of the three. Every decode step in between reads all the weights
# once more, only for ten tokens. (Sarathi-Serve takes its two ideas apart in the same way: OSDI
# 2024, Table 4.)
#
# ## Why the tokens stay the same
#
# A chunk's query at position *p* must see exactly the keys at positions 0 … *p*, as it would in
# one piece: the whole prefix from the cache, and of its own chunk what is not after it. Nothing
# that a later chunk brings can change it, which is what *causal* means.
#
# ## Exercise 3: the mask (10 minutes, medium)
#
# Write `chunk_mask(start, num_tokens)` for a chunk of positions [start, start + num_tokens): a
# bool tensor of shape [num_tokens, start + num_tokens], True where the query (row) may see the
# key.


# %%
# Exercise chunk-mask (10 minutes, medium)
def chunk_mask(start: int, num_tokens: int) -> torch.Tensor:
    raise NotImplementedError


# %%
check.chunk_mask(chunk_mask)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Row *i* is the query at position `start + i`, column *j* the key at position *j*. Compare two
# `torch.arange`s.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: chunk-mask -->
# ```python
# def chunk_mask(start: int, num_tokens: int) -> torch.Tensor:
#     keys = torch.arange(start + num_tokens)
#     queries = torch.arange(start, start + num_tokens)
#     return keys[None, :] <= queries[:, None]
# ```
# </details>

# %% [markdown]
# With the mask, attention chunk by chunk is attention in one piece, row for row:

# %%
n, chunk = 24, 8
query, key, value = (torch.randn(1, n, 16, dtype=torch.float64) for _ in range(3))
attend = torch.nn.functional.scaled_dot_product_attention
whole = attend(query, key, value, is_causal=True)
try:
    pieces = [
        attend(
            query[:, start : start + chunk],
            key[:, : start + chunk],
            value[:, : start + chunk],
            attn_mask=chunk_mask(start, chunk),
        )
        for start in range(0, n, chunk)
    ]
    print("largest difference:", f"{(torch.cat(pieces, 1) - whole).abs().max():.1e}")
except NotImplementedError:
    print("Write chunk_mask above, then run this cell again.")

# %% [markdown]
# ## On a real model
#
# SmolLM2-135M on this machine, in float32. First its pace: how long is a decode step of four here?
# The long prompt then arrives after eight such steps.

# %%
llm = mc.LLM("smollm2-135m", dtype="float32", quiet=True)
prompt_tokens, answer = (32, 10) if is_fast() else (512, 30)
four = [mc.RequestSpec(0.0, mc.PromptShape(8), 8)] * 4
pace = mc.compare(four, {"pace": {}}, llm=llm).traces["pace"].metrics().itl.p50
small = mc.workloads.stall_scene(
    4, prompt_tokens, decode_prompt_tokens=8, decode_output_tokens=answer,
    prompt_output_tokens=3, prompt_arrival=8 * pace,
)  # fmt: skip
print(f"a decode step takes about {pace * 1e3:.0f} ms; the prompt has {prompt_tokens} tokens")

# %% [markdown]
# **Predict**: cut into eight chunks, will the longest gap shrink as much as on the A100? Think of
# what a small matrix product costs on a CPU, per token.

# %%
eighth = prompt_tokens // 8
real = mc.compare(
    small,
    {
        "whole prompts": dict(policy="continuous", max_num_batched_tokens=1024),
        "chunked": dict(
            policy="decode-first", chunk_size=eighth, max_num_batched_tokens=eighth + 4
        ),
    },
    llm=llm,
)
print("first position where an answer differs:", real.same_tokens)
real.table()

# %%
real.timeline()

# %% [markdown]
# `None` stands for "the same tokens, to the last": the schedule decides when a token comes, not
# which. (In exact arithmetic this is a theorem. In float32 or bfloat16 a product of another shape
# may round differently, and where two tokens score almost the same, another one may win. Try
# `dtype="bfloat16"` with longer answers.)
#
# Now the columns `ITL max` and `TTFT max`, and the same two of the A100's table: where did chunking
# shorten the gap by more, and where did it cost the newcomer more? A small matrix product is dearer
# per token than a large one; how much dearer on a CPU, the end of notebook 07 measures.
#
# ## What readers get out of it
#
# The mix of questions and documents from notebook 05 once more. **Predict**: the 99th percentile
# of the gaps, whole and chunked; and what it costs in tokens per second.

# %%
mix = mc.workloads.poisson(
    1.5, 25 if is_fast() else 100, seed=3,
    prompt=mc.workloads.Lengths(1500, p90=6000, maximum=16000),
    output=mc.workloads.Lengths(150, p90=400),
)  # fmt: skip
busy = mc.compare(
    mix,
    {
        "whole prompts": dict(policy="continuous", max_num_batched_tokens=8192),
        "chunked": dict(policy="decode-first", chunk_size=1000, max_num_batched_tokens=1024),
    },
    **A100,
)
busy.table()

# %%
figures.itl_figure(busy.traces)

# %% [markdown]
# Read the figure at the right end: the gaps of half a second and more are gone. Read it in the
# middle, too: with chunking, *more* gaps lie somewhat above the floor. The same prefill work is
# spread over many steps instead of a few. That is the trade, and it is a good one as long as the
# small gaps stay below what a reader notices.
#
# ## Recap
#
# 1. Why is the last chunk's step the longest?
# 2. Ten decodes alone take a whole decode step; why do they add so little to a chunk?
# 3. Chunking made the number of stalls go up in the scene above. Why is it better all the same?
#
# <details><summary>Answers</summary>
#
# 1. Its queries attend to all chunks before it.
# 2. Reading the weights is most of what a decode step does, and the chunk reads them anyway.
# 3. Stalls are counted per gap above a threshold. One silence of hundreds of milliseconds became
#    eight gaps near the threshold: the longest one is what a reader notices.
# </details>
