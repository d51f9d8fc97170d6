# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 02 · Paged KV: contiguous in logic only
#
# **Time:** 45 minutes · **Needs:** notebook 01 (what decode reads). No GPU.
#
# After this notebook you can
#
# 1. compute how many tokens of keys and values fit beside a model, and what reserving room for the
#    longest answer wastes;
# 2. turn a position into a slot through a block table, and say why a chunk's keys may lie anywhere;
# 3. say which part of a prompt another request can share, and prove it with reference counts.

# %%
import inspect
import random

import torch
from torch.nn.functional import scaled_dot_product_attention

import minichunk as mc
from minichunk.compare import Table
from minichunk.core.kv_cache import BlockTable, chain_hash
from minichunk.kernels.attention import AttentionMetadata, paged_attention
from minichunk.labs import check
from minichunk.labs.paging import pool_picture, small_engine
from minichunk.labs.result import is_fast
from minichunk.sim.hardware import GPUS
from minichunk.sim.shapes import MODELS

# %% [markdown]
# ## What has to be kept
#
# Every token that was computed leaves a key and a value in every layer, because all later tokens
# attend to them. They are kept until the request ends.
#
# **Predict**: how large are the keys and values of *one* token of Llama-2-7B (32 layers, 4,096
# elements each for key and value, 2 bytes per element)? And how many tokens fit into an A100's 80
# GiB, when 90% of it may be used and the weights are there, too?

# %%
gpu = GPUS["a100-80g-sxm"]
rows = []
for slug in ("llama-2-7b", "llama-3-8b", "qwen2.5-7b", "smollm2-135m"):
    shape = MODELS[slug]
    room = 0.9 * gpu.memory_bytes - shape.weight_bytes
    rows.append(
        {
            "model": slug,
            "KiB per token": shape.kv_bytes_per_token / 1024,
            "KV heads": shape.num_kv_heads,
            "tokens beside the weights": f"{room / shape.kv_bytes_per_token:,.0f}",
        }
    )
Table(rows)

# %% [markdown]
# ## One contiguous piece per request?
#
# The plain way: give each request a tensor of `max_model_len` positions when it starts, since
# nobody knows how long its answer will be.
#
# **Predict**: with a limit of 4,096 tokens and requests whose final lengths look like those below,
# which share of the reserved memory is ever used?

# %%
rng = random.Random(0)
lengths = mc.workloads.Lengths(400, p90=1600, maximum=4096)
final = [lengths.draw(rng) for _ in range(2000)]
used = sum(final)
Table(
    [
        {"each request gets": "4,096 positions", "used": f"{used / (4096 * len(final)):.1%}"},
        *(
            {
                "each request gets": f"blocks of {size}",
                "used": f"{used / sum(-(-n // size) * size for n in final):.1%}",
            }
            for size in (1024, 256, 64, 16, 1)
        ),
    ]
)

# %% [markdown]
# The rest of the first row is memory in which no request can decode, and notebook 01 showed what
# decode needs: many requests in a step. (Kwon et al., *PagedAttention*, SOSP 2023, section 1,
# measured the systems of their time: 20.4% to 38.2% of the KV memory held token states.)
#
# PagedAttention takes the operating system's answer. Memory is cut into **blocks** of `block_size`
# positions. A request takes a block when it needs one, wherever it lies, and its **block table**
# lists its blocks in the order of its positions. At most the last block is partly empty: on
# average half a block per request. A block is 16 positions by default here; with 1 the
# table would be as long as the text.
#
# ## From position to slot
#
# The cache of a layer is a tensor `[num_blocks, block_size, num_kv_heads, head_dim]`. Seen as a
# row of slots, block *b* owns the slots from `b * block_size` on. The whole address translation:

# %%
print(inspect.getsource(BlockTable.slot))

# %% [markdown]
# **Predict**: the block table is (7, 2, 5) and the block size 4. In which slot does position 6 lie?

# %%
table = BlockTable((7, 2, 5))
print({position: table.slot(position, block_size=4) for position in range(12)})

# %% [markdown]
# ## Exercise 1: the slots of a chunk (10 minutes, easy)
#
# A step computes a chunk: `num_tokens` positions from `start` on. Write
# `slot_mapping(block_table, block_size, start, num_tokens)`: the list of their slots, in the order
# of the positions. This is what the engine hands to the kernel that writes keys and values.


# %%
# Exercise slot-mapping (10 minutes, easy)
def slot_mapping(block_table, block_size: int, start: int, num_tokens: int) -> list[int]:
    raise NotImplementedError


# %%
check.slot_mapping(slot_mapping)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each position: which entry of the table (`//`), and which place within the block (`%`)?
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: slot-mapping -->
# ```python
# def slot_mapping(block_table, block_size: int, start: int, num_tokens: int) -> list[int]:
#     return [
#         block_table[position // block_size] * block_size + position % block_size
#         for position in range(start, start + num_tokens)
#     ]
# ```
# </details>

# %% [markdown]
# ## Two prompts, cut into chunks, in one pool
#
# Two requests of 22 and 14 tokens. A chunk has at most 6 tokens, a block 4 positions. In each step
# both get a chunk, and each takes blocks only for what the step computes.
#
# **Predict**: which blocks will the first request have in the end: 0 to 5?

# %%
engine = small_engine(block_size=4, chunk_size=6, num_blocks=14)
for name, prompt_tokens in (("a", 22), ("b", 14)):
    prompt = [len(engine.requests) * 1000 + i for i in range(prompt_tokens)]
    engine.add_request(prompt, mc.SamplingParams(max_tokens=4, ignore_eos=True), request_id=name)
rows, requests = [], {name: engine.requests[name] for name in ("a", "b")}
for step in range(4):
    engine.step()
    row = {"step": step, "free": engine.trace.steps[-1].free_blocks}
    for name, request in requests.items():
        row[f"{name}: computed"] = request.num_computed_tokens
        row[f"{name}: block table"] = str(request.table.blocks)
    rows.append(row)
Table(rows)

# %%
owners = {
    name: [request.table.slot(p, 4) for p in range(request.num_computed_tokens)]
    for name, request in requests.items()
}
pool_picture(owners, block_size=4, num_blocks=14)

# %% [markdown]
# The numbers in the picture are positions. Each request's positions are contiguous *in logic*:
# walk through its table and they count up. In memory they are not, and nobody ever moves them
# together. A chunk boundary (6, 12, 18) is no block boundary either: the next chunk goes on in the
# half-filled block. Nothing about a chunk survives its step except computed positions.
#
# ## Exercise 2: the blocks a chunk takes (10 minutes, easy)
#
# Write `new_blocks(start, num_tokens, block_size)`: how many blocks must be taken from the pool for
# a chunk of positions `start` to `start + num_tokens`, when everything before `start` has its
# blocks already. A decode is a chunk of one token: how often does it take a block?


# %%
# Exercise new-blocks (10 minutes, easy)
def new_blocks(start: int, num_tokens: int, block_size: int) -> int:
    raise NotImplementedError


# %%
check.new_blocks(new_blocks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many blocks do `start` positions need, and how many `start + num_tokens`? `-(-a // b)` rounds
# up.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: new-blocks -->
# ```python
# def new_blocks(start: int, num_tokens: int, block_size: int) -> int:
#     def blocks(num_positions):
#         return -(-num_positions // block_size)
#
#     return blocks(start + num_tokens) - blocks(start)
# ```
# </details>

# %% [markdown]
# ## Does attention mind?
#
# Softmax is a weighted average, and an average does not ask where its terms lie; only *which* keys
# a query sees must be right. Below, 50 positions of keys and values are written into random blocks
# chunk by chunk, and every other slot is filled with NaN. Then the last 10 queries attend through
# the block table.
#
# **Predict**: how much will the result differ from attention over contiguous tensors, in double
# precision?

# %%
heads, dim, n, block_size, chunk = 2, 8, 50, 4, 7
q, k, v = (torch.randn(n, heads, dim, dtype=torch.float64) for _ in range(3))
k_cache = torch.full((40, block_size, heads, dim), torch.nan, dtype=torch.float64)
v_cache = k_cache.clone()
scattered = BlockTable(tuple(random.sample(range(40), 13)))
for start in range(0, n, chunk):
    positions = range(start, min(start + chunk, n))
    slots = torch.tensor([scattered.slot(position, block_size) for position in positions])
    k_cache.view(-1, heads, dim)[slots] = k[start : start + chunk]
    v_cache.view(-1, heads, dim)[slots] = v[start : start + chunk]

# %%
metadata = AttentionMetadata.build([0, 10], [n], [scattered.blocks], block_size)
paged = paged_attention(q[-10:], k_cache, v_cache, metadata, dim**-0.5)
contiguous = scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True
).transpose(0, 1)[-10:]
print(f"blocks {scattered.blocks}")
print(f"largest difference: {(paged - contiguous).abs().max():.1e}")

# %% [markdown]
# Only rounding is left, and no NaN came in. So a block table is all that chunked prefill needs
# from memory: each chunk writes its keys and values where there is room, and the next one, and
# every decode, finds them through the table. A textbook chapter on this subject says the same.
# Notebook 03 does the look-up inside a kernel.
#
# ## Sharing a prefix
#
# If two prompts begin with the same tokens (a system prompt, a document with several questions),
# their keys and values there are the same: under a causal mask they depend on nothing that comes
# later. Then two tables can name the *same* block. Who may share what is decided by a hash:

# %%
print(inspect.getsource(chain_hash))

# %% [markdown]
# A block's hash covers its own tokens and, through its parent, all before it. Only full and
# computed blocks are published. One more rule: a request never starts with *all* of its tokens
# from the cache, because the last one must be computed: its output gives the first new token.
#
# **Predict**: blocks of 16. The first prompt has 40 tokens. The second has the same 40, and the
# third the same 32 only. How many tokens does each find in the cache?

# %%
engine = small_engine(block_size=16)
document = list(range(40))
keep_running = mc.SamplingParams(max_tokens=100, ignore_eos=True)
for name, prompt in (("first", document), ("same 40", document), ("same 32", document[:32])):
    engine.add_request(prompt, keep_running, request_id=name)
    engine.step()
pool = engine.scheduler.pool
for event in engine.trace.events:
    if event.kind == "admit":
        blocks = engine.requests[event.request_id].table.blocks
        holders = [pool.ref_counts[block] for block in blocks]
        print(f"{event.request_id:8} hit {event.tokens:2} tokens; {blocks=}, {holders=}")

# %% [markdown]
# Compare: 32 of 40, because the third block is not full; and 16 of 32, because of the last rule.
# The reference counts say how many tables hold each block. A block returns to the free queue when
# its count falls to zero, and even then it keeps its hash until somebody needs the room: a prefix
# outlives the request that computed it.
#
# ## Exercise 3: how much is hit? (15 minutes, medium)
#
# Write `prefix_hits(computed, prompt, block_size)`: how many of the prompt's tokens can be taken
# from the cache. `computed` is a list of prompts that were computed before (their blocks are all
# still there), each a list of token ids.


# %%
# Exercise prefix-hits (15 minutes, medium)
def prefix_hits(computed, prompt, block_size: int) -> int:
    raise NotImplementedError


# %%
check.prefix_hits(prefix_hits)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Instead of hashes, collect every prefix of whole blocks of every computed prompt in a set of
# tuples. Then see how far the new prompt gets, one block at a time; at most
# `(len(prompt) - 1) // block_size` blocks.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: prefix-hits -->
# ```python
# def prefix_hits(computed, prompt, block_size: int) -> int:
#     known = {
#         tuple(tokens[:stop])
#         for tokens in computed
#         for stop in range(block_size, len(tokens) + 1, block_size)
#     }
#     hits, most = 0, (len(prompt) - 1) // block_size
#     while hits < most and tuple(prompt[: (hits + 1) * block_size]) in known:
#         hits += 1
#     return hits * block_size
# ```
# </details>

# %% [markdown]
# ## What sharing buys
#
# Users ask questions of 100 tokens about one document of 4,000. In the workload below only lengths
# matter; `prefix_ids` say which pieces of 16 tokens two prompts have in common.
#
# **Predict**: by which factor does the prefix cache shorten the median TTFT? And which user gains
# nothing?

# %%
document = tuple(range(250))  # 250 pieces of 16 tokens
asked = [
    mc.RequestSpec(0.5 * i, mc.PromptShape(4100, document), 50)
    for i in range(8 if is_fast() else 30)
]
both = mc.compare(
    asked, {"no sharing": dict(prefix_caching=False), "shared prefix": dict(prefix_caching=True)},
    model="llama-2-7b", gpu="a100-80g-sxm",
)  # fmt: skip
Table(
    [
        {
            "run": name,
            "first user's TTFT (ms)": round(trace.metrics().requests["0"].ttft * 1e3),
            "median TTFT (ms)": round(trace.metrics().ttft.p50 * 1e3),
            "most blocks in use": max(step.used_blocks for step in trace.steps),
        }
        for name, trace in both.traces.items()
    ]
)

# %%
both.timeline()

# %% [markdown]
# Sharing saves twice: computing (after the first user, only the question is left of each prompt)
# and memory (look at the blocks).
#
# ## Recap
#
# 1. With blocks of 16, how many positions does a request waste on average, and how many at most?
# 2. A chunk ends in the middle of a block. What has to be done before the next chunk?
# 3. Two prompts agree in tokens 16 to 31 but differ in token 3. May they share a block of 16?
#
# <details><summary>Answers</summary>
#
# 1. About half a block, at most 15.
# 2. Nothing. The next chunk writes on in the same block, and the table grows when it is full.
# 3. No: keys and values of a position depend on all tokens before it, which is why the hash covers
#    the whole prefix.
# </details>
