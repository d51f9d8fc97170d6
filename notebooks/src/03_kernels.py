# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 03 · Triton kernels: from a loop to unified paged attention
#
# **Time:** 60 minutes · **Needs:** notebook 02 (block tables), softmax attention. No GPU.
#
# After this notebook you can
#
# 1. read and write a Triton kernel: programs, tiles, pointers, masks;
# 2. compute attention over any number of keys in tiles, through a block table;
# 3. say how one launch serves chunks and decodes together, and read in the machine code what the
#    compiler made of it.
#
# The kernels below run in Triton's interpreter: on the CPU, in numpy, slowly, with every line open
# to `print`. The variable must be set before Triton is imported for the first time. (With a GPU,
# leave this cell out, restart, and create the tensors on `"cuda"`.)

# %%
# %env TRITON_INTERPRET=1

# %%
import inspect
import json
import math
import os
import random
import subprocess
import sys

import torch
import triton
import triton.language as tl

from minichunk.compare import Table
from minichunk.kernels import attention
from minichunk.kernels.attention import AttentionMetadata, paged_attention
from minichunk.labs import check
from minichunk.labs.result import is_fast

# %% [markdown]
# ## The loop
#
# One query against all keys, in plain Python: a score for each key, the softmax of the scores, and
# the average of the values with these weights.

# %%
torch.manual_seed(0)
num_queries, num_keys, DIM = 3, 50, 16
q, k, v = (torch.randn(n, DIM) for n in (num_queries, num_keys, num_keys))


def attend_in_python(query: torch.Tensor) -> torch.Tensor:
    """Attention of one query [DIM], already scaled, over all keys."""
    scores = [float(query @ key) for key in k]
    weights = [math.exp(score - max(scores)) for score in scores]
    return sum(weight * value for weight, value in zip(weights, v, strict=True)) / sum(weights)


expected = torch.stack([attend_in_python(query) for query in q])

# %% [markdown]
# ## A first kernel
#
# A GPU does not run one loop; it runs many **programs** of the same code side by side. In Triton a
# program works on **tiles**: small arrays whose lengths are powers of two, known when the kernel is
# compiled (`tl.constexpr`). `tl.program_id(0)` says which of the programs it is. Memory is reached
# through pointers: a tile of addresses goes in, a tile of numbers comes out. `mask` keeps a lane
# from touching what does not exist.
#
# Here each program takes one query, and all keys as one tile.


# %%
@triton.jit
def attend_at_once(out_ptr, q_ptr, k_ptr, v_ptr, num_keys, DIM: tl.constexpr, KEYS: tl.constexpr):
    query = tl.program_id(0)
    key, dim = tl.arange(0, KEYS), tl.arange(0, DIM)
    exists = key < num_keys
    address = key[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + query * DIM + dim)
    k = tl.load(k_ptr + address, mask=exists[:, None], other=0.0)
    v = tl.load(v_ptr + address, mask=exists[:, None], other=0.0)
    score = tl.where(exists, tl.sum(k * q[None, :], axis=1), float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    average = tl.sum(weight[:, None] * v, axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + query * DIM + dim, average)


# %% [markdown]
# **Predict**: `attend_at_once[(3,)](…)` starts three programs. With 50 keys, how long must the tile
# of keys be, and what do the surplus lanes contribute to the average?

# %%
out = torch.empty_like(q)
attend_at_once[(num_queries,)](out, q, k, v, num_keys, DIM, triton.next_power_of_2(num_keys))
print(f"tile of {triton.next_power_of_2(num_keys)} keys")
print(f"largest difference from the loop: {(out - expected).abs().max():.1e}")

# %% [markdown]
# The surplus lanes have score −∞, hence weight 0. It works, but a tile lives in the registers of
# one multiprocessor. With a context of 30,000 keys of 128 elements it would need
# 32,768 × 128 × 2 numbers, and a multiprocessor of NVIDIA's has 65,536 registers (CUDA C++
# Programming Guide, technical specifications per compute capability). The softmax seems to need
# all scores before it can weigh the first value. It does not.
#
# ## The online softmax
#
# Keep three things while keys go by: the largest score so far, the sum of the exponentials
# relative to it (`total`), and the sum of values weighed the same way (`acc`). When a larger score
# turns up, everything so far was measured against the wrong maximum; both sums are then multiplied
# by `exp(old maximum − new maximum)`. (Milakov and Gimelshein, 2018; used for attention in
# FlashAttention, Dao et al., 2022, section 3.1.)
#
# ## Exercise 1: one tile more (15 minutes, medium)
#
# Write `online_softmax(state, scores, values)`. The state is `(acc, maximum, total)` of the keys
# so far; `scores` [n] and `values` [n, dim] are those of the next tile. Return the new state. At
# the start the maximum is −10³⁰ and both sums are 0; after any tile, `acc / total` is the attention
# over all keys so far.


# %%
# Exercise online-softmax (15 minutes, medium)
def online_softmax(state, scores, values):
    raise NotImplementedError


# %%
check.online_softmax(online_softmax)

# %% [markdown]
# <details><summary>Hint</summary>
#
# First the new maximum, of the old one and the tile's scores. Then the factor that rescales both
# old sums, then the tile's own weights.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: online-softmax -->
# ```python
# def online_softmax(state, scores, values):
#     acc, maximum, total = state
#     new_maximum = torch.maximum(maximum, scores.max())
#     rescale = torch.exp(maximum - new_maximum)
#     weights = torch.exp(scores - new_maximum)
#     return acc * rescale + weights @ values, new_maximum, total * rescale + weights.sum()
# ```
# </details>

# %% [markdown]
# ## In tiles
#
# The same in a kernel: a loop over tiles of keys. Whatever the number of keys, a program now needs
# room for one tile.


# %%
@triton.jit
def attend_in_tiles(out_ptr, q_ptr, k_ptr, v_ptr, num_keys, DIM: tl.constexpr, KEYS: tl.constexpr):
    query, dim = tl.program_id(0), tl.arange(0, DIM)
    q = tl.load(q_ptr + query * DIM + dim)
    acc, maximum, total = tl.zeros([DIM], tl.float32), -1.0e30, 0.0
    for start in range(0, num_keys, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < num_keys
        address = key[:, None] * DIM + dim[None, :]
        k = tl.load(k_ptr + address, mask=exists[:, None], other=0.0)
        v = tl.load(v_ptr + address, mask=exists[:, None], other=0.0)
        score = tl.where(exists, tl.sum(k * q[None, :], axis=1), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, axis=0))
        rescale, weight = tl.exp(maximum - new_maximum), tl.exp(score - new_maximum)
        acc = acc * rescale + tl.sum(weight[:, None] * v, axis=0)
        total = total * rescale + tl.sum(weight, axis=0)
        maximum = new_maximum
    tl.store(out_ptr + query * DIM + dim, acc / total)


# %%
for keys in (8, 16, 32):
    out = torch.empty_like(q)
    attend_in_tiles[(num_queries,)](out, q, k, v, num_keys, DIM, keys)
    print(f"tiles of {keys:2}: largest difference {(out - expected).abs().max():.1e}")

# %% [markdown]
# ## Through a block table
#
# In `attend_in_tiles` one line knows where the keys lie: `address`. If they lie in the blocks of a
# paged cache, only that line changes: first load each key's block from the table, then compute
# its slot.
#
# **Predict**: a tile of 8 keys and blocks of 4. How many different blocks can the tile touch? And
# what must not be loaded for the keys of the last tile that do not exist: the table's entry, the
# slot, or both?
#
# ## Exercise 2: a kernel that gathers (15 minutes, medium)
#
# Write the kernel `gather_keys`: program *i* copies the keys at positions `i * TILE_KEYS` to
# `(i + 1) * TILE_KEYS` (below `num_keys`) from the cache to the same rows of `out`. `k_cache` is
# `[num_slots, DIM]`, with block *b* at the slots from `b * BLOCK_SIZE` on; all slots of others
# hold NaN. Rows of `out` from `num_keys` on must not be touched.


# %%
# Exercise gather-keys (15 minutes, medium)
@triton.jit
def gather_keys(
    out_ptr, k_cache_ptr, block_table_ptr, num_keys,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    raise NotImplementedError


# %%
check.gather_keys(gather_keys)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=exists, other=0)` is a tile of blocks,
# one per key; the slot follows as in notebook 02. Load and store with `mask=exists[:, None]`.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: gather-keys -->
# ```python
# @triton.jit
# def gather_keys(
#     out_ptr, k_cache_ptr, block_table_ptr, num_keys,
#     DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
# ):
#     key = tl.program_id(0) * TILE_KEYS + tl.arange(0, TILE_KEYS)
#     dim = tl.arange(0, DIM)
#     exists = key < num_keys
#     block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=exists, other=0)
#     slot = block * BLOCK_SIZE + key % BLOCK_SIZE
#     k = tl.load(k_cache_ptr + slot[:, None] * DIM + dim[None, :], mask=exists[:, None])
#     tl.store(out_ptr + key[:, None] * DIM + dim[None, :], k, mask=exists[:, None])
# ```
# </details>

# %% [markdown]
# ## The package's loop body
#
# You now know every part of the function below, which minichunk's engine calls on a GPU for each
# tile of keys (on a CPU it has other kernels, which compute the same). What it adds to yours:
#
# - a tile has many **rows**, each a pair of token and query head, so that a key once loaded serves
#   them all, and the sums over `dim` become matrix products (`dot`), which tensor cores compute;
# - the **causal mask**: with `IS_MASKED` a key later than a row's `position` gets score −∞. Only
#   the last tiles need it;
# - exponentials to base 2, the ones that GPUs have an instruction for.

# %%
print(inspect.getsource(attention._attend_to_keys.fn))

# %% [markdown]
# Find the two loads that follow each other: the block from the table, then the key from the block.
# Between them nothing can be computed. We shall see what the compiler makes of that.
#
# ## One launch for everybody
#
# A step mixes chunks and decodes: their tokens lie end to end, and `cu_seqlens_q` says where each
# sequence begins. Each program takes a tile of `TILE_TOKENS` tokens *of one sequence*. But the
# grid of a launch is just a number of programs, and the host does not want to compute for each of
# them which sequence it serves. How does a program find out?
#
# ## Exercise 3: whose tile is it? (15 minutes, medium)
#
# Write `tile_of_program(tile, cu_seqlens_q, tile_tokens)`: the pair (sequence, first token of the
# tile, counted within the sequence's tokens of this step), or `None` if this tile has nothing to
# do. Tiles are numbered from 0 to `num_tokens // tile_tokens + num_seqs - 1`; that is enough for
# every sequence to have a last tile that is not full. Every token must be covered exactly once.


# %%
# Exercise tile-of-program (15 minutes, medium)
def tile_of_program(tile: int, cu_seqlens_q: list[int], tile_tokens: int):
    raise NotImplementedError


# %%
check.tile_of_program(tile_of_program)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Let sequence *s* begin at tile `cu_seqlens_q[s] // tile_tokens + s`. Each sequence then has at
# least as many tiles as it needs before the next one begins. The tile belongs to the last sequence
# that begins at or before it.
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: tile-of-program -->
# ```python
# def tile_of_program(tile: int, cu_seqlens_q: list[int], tile_tokens: int):
#     starts = [begin // tile_tokens + s for s, begin in enumerate(cu_seqlens_q[:-1])]
#     seq = max(s for s, start in enumerate(starts) if start <= tile)
#     first = (tile - starts[seq]) * tile_tokens
#     length = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]
#     return (seq, first) if first < length else None
# ```
# </details>

# %% [markdown]
# The kernel searches by halving, because a step may have hundreds of sequences:

# %%
print(inspect.getsource(attention._sequence_of_tile.fn))

# %% [markdown]
# ## A mixed step
#
# Four sequences in one launch: a chunk in the middle of a prompt, two decodes, and a whole short
# prompt. Blocks are scattered; slots that belong to nobody hold NaN.
#
# **Predict**: will the kernel (in float32) agree with the reference in float64 to about 3, 7 or 15
# digits? And can a NaN get in?

# %%
new, before = [7, 1, 1, 12], [9, 29, 4, 0]  # tokens of this step; tokens computed before
num_heads, num_kv_heads, dim, block_size = 6, 2, 32, 4
seq_lens = [n + b for n, b in zip(new, before, strict=True)]
cu_seqlens_q = [sum(new[:i]) for i in range(len(new) + 1)]
free = random.sample(range(40), 40)
block_tables = [[free.pop() for _ in range(-(-n // block_size))] for n in seq_lens]

k_cache = torch.full((40, block_size, num_kv_heads, dim), torch.nan)
v_cache = k_cache.clone()
for table, length in zip(block_tables, seq_lens, strict=True):
    for position in range(length):
        place = table[position // block_size], position % block_size
        k_cache[place], v_cache[place] = torch.randn(2, num_kv_heads, dim)
q = torch.randn(cu_seqlens_q[-1], num_heads, dim)

# %%
metadata = AttentionMetadata.build(cu_seqlens_q, seq_lens, block_tables, block_size)
kernel = paged_attention(q, k_cache, v_cache, metadata, dim**-0.5, backend="triton")
doubles = (x.double() for x in (q, k_cache, v_cache))
reference = paged_attention(*doubles, metadata, dim**-0.5, backend="torch")
print(f"largest difference: {(kernel - reference).abs().max():.1e}")
print(f"any NaN in the output: {bool(kernel.isnan().any())}")

# %% [markdown]
# One launch, four sequences, two kinds of work, and the kernel asks of none whether it is prefill
# or decode: a decode is a sequence with one new token. That is what lets a scheduler mix freely.
#
# ## What the compiler made of it
#
# The interpreter says whether a kernel is right, not whether it is good. But Triton's compiler can
# translate it for a GPU that is not here. The cell does so in a second process (in this one kernels
# are interpreted) through the real launcher, and reads the result: shared memory, registers, and
# the instructions.
#
# **Predict**: in float16 with 128 elements per head, the A100's tile for chunks has 128 rows and 32
# keys. How many bytes are the keys and the values of *one* tile? The compiler keeps several tiles
# in shared memory at once; how many do you think, out of the 163 KiB that a program may have?

# %%
COMPILE = """
import json, re, sys
from collections import Counter
from dataclasses import asdict, replace
from minichunk.kernels.ahead_of_time import Case, compile_case, machine_code
from minichunk.kernels.tiles import SHARED_MEMORY

class Staged(Case):  # the same kernel, with another number of pipeline stages
    def tile(self, target):
        return replace(super().tile(target), num_stages=stages or super().tile(target).num_stages)

for operation, target, stages in json.loads(sys.argv[1]):
    case = Staged(operation, "float16", head_dim=128)
    report, tile = compile_case(case, target)[0], case.tile(target)
    code = machine_code(case, target)["attention_kernel"]
    opcodes = Counter(re.findall(r"^\\s*(?:@!?%\\w+ )?([a-z][\\w.:]*)\\s", code, re.MULTILINE))
    row = {**asdict(report), **asdict(tile), "limit": SHARED_MEMORY[target], "opcodes": opcodes}
    print(json.dumps(row), flush=True)
"""


def compile_for(cases: list[tuple[str, str, int]]) -> list[dict]:
    """Compile (operation, GPU, pipeline stages; 0: as the package launches it) elsewhere."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(cases)]
    reports = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            reports.append(json.loads(line))
            print(f"compiled {len(reports)} of {len(cases)}", file=sys.stderr, flush=True)
    return reports


# %%
targets = ["sm_80"] if is_fast() else ["sm_80", "sm_90"]  # A100; H100
kinds = ["attention decode"] if is_fast() else ["attention chunk", "attention decode"]
reports = compile_for([(kind, target, 0) for kind in kinds for target in targets])
Table(
    [
        {
            "kernel": report["case"]["operation"],
            "GPU": report["target"],
            "rows × keys": f"{report['rows']} × {report['keys']}",
            "K, V of a tile (KiB)": 2 * report["keys"] * 128 * 2 / 1024,
            "shared memory (KiB)": round(report["shared"] / 1024, 1),
            "allowed (KiB)": report["limit"] // 1024,
            "registers": report["registers"],
            "spilled": report["spilled"],
            "matrix products": ", ".join(report["tensor_core"]),
            "16-byte loads": report["wide_loads"],
        }
        for report in reports
    ]
)

# %% [markdown]
# Read a row from left to right:
#
# - **shared memory** over the size of a tile's keys and values: how many tiles are kept (queries
#   take some room, too);
# - **registers** per thread: a program that needs more than there are *spills* the rest to slow
#   memory, so the next column should be 0;
# - **matrix products**: the two `dot`s became tensor-core instructions, whose names differ by
#   generation: `mma.sync` on an A100; on an H100 `wgmma`, if the tile has enough rows for it;
# - **16-byte loads**: keys come in the widest pieces that a thread can load.
#
# Now the instructions themselves (PTX, NVIDIA's portable assembly), counted by kind.
#
# **Predict**: which lines of `_attend_to_keys` do you expect to meet again in the table below?

# %%
KINDS = {
    "cp.async.cg.shared.global": "copy to shared memory, behind the program's back",
    "ld.global": "load from memory into registers",
    "ldmatrix": "operands of a matrix product from shared memory",
    "mma.sync": "matrix product on tensor cores (one warp)",
    "wgmma.mma_async": "matrix product on tensor cores (four warps)",
    "ex2.approx": "2 to the power of x",
    "shfl.sync": "exchange between the threads of a warp",
    "st.global": "store to memory",
}
rows = []
for kind, meaning in KINDS.items():
    row = {"instruction": kind, "what it does": meaning}
    for report in reports:
        name = f"{report['case']['operation'].split()[1]}, {report['target']}"
        row[name] = sum(n for op, n in report["opcodes"].items() if op.startswith(kind))
    rows.append(row)
Table(rows)

# %% [markdown]
# `ex2` is `tl.exp2`, the matrix products are the two calls of `dot`, the exchanges between threads
# belong to `tl.max` and `tl.sum` along a row, and most loads of keys and values do not pass through
# registers at all. (A thread holds several elements of a tile, and the loop is there twice, with
# mask and without: each line of the source has become many instructions.)
#
# ## Stages: two loads behind each other
#
# Memory answers late: long after it is asked. So the compiler pipelines the loop: while one tile is
# computed, copies for later ones are under way. `num_stages` says how far ahead it may work. Each
# key takes *two* loads, the table's entry and then the key, and each wants a stage.
#
# **Predict**: with 1, 3 and 5 stages, how many copies of keys and values are in flight while a tile
# is computed? And the shared memory: does it grow?

# %%
staged = compile_for(
    [("attention decode", "sm_80", n) for n in ((1, 5) if is_fast() else (1, 3, 5))]
)
Table(
    [
        {
            "stages": report["num_stages"],
            "copies in flight": report["in_flight"],
            "shared memory (KiB)": round(report["shared"] / 1024, 1),
            "registers": report["registers"],
        }
        for report in staged
    ]
)

# %% [markdown]
# With how many stages does the column of copies leave 0? That is the price of the block table in a
# kernel: not the look-up itself, but one more load that has to be on its way early enough. What
# this is worth in microseconds only a GPU can say (`python -m benchmarks.kernels` measures it).
#
# ## Recap
#
# 1. Why can attention be computed over a million keys with room for 32?
# 2. Which part of the kernel knows that the cache is paged?
# 3. A step has one chunk of 500 tokens and 100 decodes; tiles hold 16 tokens. How many programs per
#    KV head are launched, and how many have nothing to do?
#
# <details><summary>Answers</summary>
#
# 1. The online softmax keeps a maximum and two sums, and rescales them when the maximum grows.
# 2. The address computation: block from the table, slot from block and offset. The arithmetic is
#    the same.
# 3. 600 // 16 + 101 = 138 are launched; 32 serve the chunk and 100 the decodes, 6 find nothing to
#    do.
# </details>
