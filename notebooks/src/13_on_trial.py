# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 13 · From the paper to your laptop, and a chapter on trial
#
# **Time:** 60 minutes · **Needs:** notebooks 05 to 09, and 11. No GPU. Words: the
# [glossary](glossary.md).
#
# After this notebook you can
#
# 1. redo a published result on the simulator and say what it rests on: fitted, in-sample, or not;
# 2. find the assumption that a ratio such as "2.3 times" hangs on, and vary it;
# 3. give a verdict on a textbook's claims, one by one, from figures that you can run again.

# %%
import itertools
from dataclasses import replace
from statistics import pstdev

from tqdm import tqdm

import minichunk as mc
from minichunk.compare import Table
from minichunk.core.metrics import jain_index
from minichunk.labs import check, design, evidence, fairness, groups
from minichunk.labs.result import is_fast
from minichunk.sim.calibrate import Measurement, fit
from minichunk.sim.cost import CostModel
from minichunk.sim.efficiency import AMPERE
from minichunk.sim.hardware import GPUS
from minichunk.sim.run import num_blocks_for
from minichunk.sim.shapes import MODELS
from minichunk.workloads import Lengths, poisson

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")

# %% [markdown]
# # Part 1: published results, redone
#
# Every GPU figure in this course is simulated. The cost model behind it is calibrated on timings
# of single layers; so whole steps, and whole services, are something that it must *predict*. Three
# papers give us something to hold it against.
#
# ## Sarathi: a decode that rides along
#
# LLaMA-13B on an RTX A6000 (Agrawal et al., 2023, arXiv 2308.16369, Table 2): a decode-only step
# of 4 takes 50 ms, 12.49 ms per token. The same decode riding on a chunk of 1,021 tokens adds 1.2
# ms.
#
# **Predict**: how near does a model come that has never seen this GPU's steps? Within 2%, 20%, a
# factor of 2?

# %%
a6000 = CostModel("llama-2-13b", "a6000")
alone = evidence.milliseconds(a6000, evidence.decodes(4, 1024))
whole = evidence.milliseconds(a6000, evidence.prefill(1024))
riding = (evidence.milliseconds(a6000, evidence.mixed(1021, 3, 1024)) - whole) / 3
Table(
    [
        {"ms": what, "paper": paper, "here": f"{here:.2f}", "here / paper": f"{here / paper:.2f}"}
        for what, paper, here in (
            ("decode-only step of 4", 50.0, alone),
            ("per decode in it", 12.49, alone / 4),
            ("per decode riding along", 1.2, riding),
        )
    ]
)

# %% [markdown]
# The last row is a small difference of two large numbers, and it is also the furthest off. What
# the paper argues needs only its size: is riding along about ten times as cheap as a step alone?
#
# ## Sarathi-Serve's steps: what is fitted, and what is predicted
#
# Yi-34B on two A100 (PCIe), steps from the artifact of Sarathi-Serve (OSDI 2024; figure 2). Its
# steps carry tens of milliseconds that are neither matrix products nor attention: software. Two
# constants of the cost model stand for that, `step_overhead` and `host_time`. If we fit them on
# these very rows, agreement proves little: it is *in-sample*. So we fit them on the short steps
# only, and predict the long ones.
#
# **Predict**: will the long prompts (4,096 tokens and more) come out too fast or too slow?

# %%
PREFILL = {128: 48.1, 512: 105.6, 1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.3,
           16384: 4407.5}  # fmt: skip
DECODES = {1: 46.8, 2: 47.5, 4: 48.8}
short = [(evidence.prefill(n), ms) for n, ms in PREFILL.items() if n <= 1024]
short += [(evidence.decodes(n, 1024), ms) for n, ms in DECODES.items()]
shape, gpu = MODELS["yi-34b"], GPUS["a100-80g-pcie"]
found = fit(
    [Measurement("step", shape, gpu, step, ms / 1e3, 2) for step, ms in short],
    AMPERE, step_overhead=0.01, host_time=0.03,
    step_fields=("step_overhead", "host_time"), held_out=0.0,
)  # fmt: skip
print(f"fitted: {found.step_overhead * 1e3:.1f} ms a step, {found.host_time * 1e3:.1f} ms host")

# %%
untouched = CostModel("yi-34b", "a100-80g-pcie", tensor_parallel=2)
fitted = CostModel("yi-34b", "a100-80g-pcie", tensor_parallel=2, **found.options)
steps = {f"prefill of {n:,}": (evidence.prefill(n), ms, n <= 1024) for n, ms in PREFILL.items()}
steps |= {f"{n} decodes": (evidence.decodes(n, 1024), ms, True) for n, ms in DECODES.items()}
rows = []
for name, (step, paper, seen) in steps.items():
    before, after = (evidence.milliseconds(model, step) for model in (untouched, fitted))
    rows.append({"step": name, "artifact (ms)": paper, "not fitted": f"{before / paper - 1:+.0%}",
                 "fitted": f"{after / paper - 1:+.0%}",
                 "that row is": "in-sample" if seen else "predicted"})  # fmt: skip
Table(rows)

# %% [markdown]
# Read only the rows marked *predicted* as evidence. Read the column "not fitted" as a warning: on
# a service whose software you have not measured, short steps may be off by that much.
#
# ## Sarathi-Serve, Table 4: each half of the idea alone
#
# Yi-34B, 1 request/s. The paper: mixing whole prompts with decodes gives 0.53 s (median TTFT) and
# 0.68 s (P99 gap); chunks without mixing 1.04 and 0.17; both together 0.76 and 0.14.
#
# **Predict**: which of the two *orderings* will survive in the simulator, and which of the six
# numbers?

# %%
CHAT = dict(
    prompt=Lengths(1730, p90=5696, maximum=8000), output=Lengths(415, p90=834, maximum=1024)
)
halves = {
    "mixing only": ("decode-first", 16384, 0.53, 0.68),
    "chunks only": ("alternating", 1024, 1.04, 0.17),
    "both": ("decode-first", 1024, 0.76, 0.14),
}
ablation = poisson(1.0, 40 if is_fast() else 150, seed=1, **CHAT)
rows = []
for name, (policy, budget, ttft, gap) in tqdm(halves.items(), leave=False):
    knobs = dict(policy=policy, max_num_batched_tokens=budget, max_num_seqs=128)
    yi = dict(model="yi-34b", gpu="a100-80g-pcie", tensor_parallel=2, **found.options)
    m = mc.simulate(ablation, **knobs, **yi).metrics()
    rows.append({"": name, "TTFT p50: paper": ttft, "TTFT p50": round(m.ttft.p50, 2),
                 "gap p99: paper": gap, "gap p99": round(m.itl.p99, 2)})  # fmt: skip
Table(rows)

# %% [markdown]
# The lengths are a lognormal through the paper's median and P90, not its data; the software's
# constants are those of another cell. An ordering that survives that is worth more than a number
# that happens to agree.
#
# ## Capacity of Mistral-7B: what the ratio hangs on
#
# The paper's abstract: Sarathi-Serve serves Mistral-7B on one A100 at 2.6 times the load, within a
# promise about the P99 gap. The load of a *capacity search* is the highest that keeps it.
#
# **Predict**: how does the ratio change if each step costs 10 ms of software instead of 1 ms?

# %%
capacities = {}
count, tolerance = (30, 0.6) if is_fast() else (100, 0.15)
for overhead in tqdm((0.001, 0.010) if is_fast() else (0.001, 0.005, 0.010), leave=False):
    for policy, budget in (("continuous", 16384), ("decode-first", 512)):
        capacities[overhead, policy] = mc.capacity(
            dict(p99_itl=0.1), lambda rate: poisson(rate, count, seed=2, **CHAT),
            model="mistral-7b", gpu="a100-80g-pcie", tolerance=tolerance, max_doublings=4,
            max_num_seqs=128, policy=policy, max_num_batched_tokens=budget, step_overhead=overhead,
        ).rate  # fmt: skip

# %%
ratios = [
    capacities[overhead, "decode-first"] / max(rate, 1e-9)
    for (overhead, policy), rate in capacities.items()
    if policy == "continuous"
]
for (overhead, policy), rate in capacities.items():
    print(f"{overhead * 1e3:4.0f} ms a step, {policy:13s} {rate:5.2f} requests/s")
print("ratios:", *(f"{ratio:.1f}" for ratio in ratios), " published: 2.6")

# %% [markdown]
# The direction is safe: chunks carry more load under a promise about gaps. The *size* moves with a
# constant of the software that the paper does not state, and with the workload's tail. Is 2.6
# among them? To pick the constant that gives it would be tuning, not checking. (This search uses
# 100 requests a run; more shift the ratios again. The repository's `benchmarks/published.py` runs
# more.)
#
# ## FastGen's 2.3 times: what is a promise?
#
# DeepSpeed-FastGen (Holmes et al., 2024, arXiv 2401.08671) reports 1.36 against 0.67 queries/s at
# equal latency, up to 2.3 times the effective throughput, on Llama-2-70B with four A100. A request
# counts if its prompt went at 512 tokens/s or more and its answer never fell below 4 tokens/s *in
# an exponential moving average*. How that average begins is not said.
#
# ## Exercise 1: an average and its beginning (15 minutes, medium)
#
# Write `keeps_rate(token_times, limit, start)`. The average a begins at the mean of all gaps
# (`start="mean"`), at the first gap (`"first"`), or at 0 (`"zero"`). Then for each gap g, the first
# included, a becomes a + 2/17 · (g − a). Return whether a never exceeds `limit`. No gap: True.


# %%
# Exercise keeps-rate (15 minutes, medium)
def keeps_rate(token_times, limit: float, start: str) -> bool:
    raise NotImplementedError


# %%
check.keeps_rate(keeps_rate)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `itertools.pairwise(token_times)` gives the pairs. Look at a after *every* gap, not at the end.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: keeps-rate -->
# ```python
# def keeps_rate(token_times, limit: float, start: str) -> bool:
#     gaps = [later - earlier for earlier, later in zip(token_times, token_times[1:])]
#     if not gaps:
#         return True
#     average = {"mean": sum(gaps) / len(gaps), "first": gaps[0], "zero": 0.0}[start]
#     for gap in gaps:
#         average += 2 / 17 * (gap - average)
#         if average > limit:
#             return False
#     return True
# ```
#
# </details>

# %% [markdown]
# **Predict**: the same runs, judged by five readings of that one promise. Between which two numbers
# will the ratio lie?


# %%
def longest(times) -> float:
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def mean_gap(times) -> float:
    return (times[-1] - times[0]) / max(1, len(times) - 1)


READINGS = {
    "average from its mean": lambda times: evidence.keeps_rate(times, 0.25, "mean"),
    "average from the first gap": lambda times: evidence.keeps_rate(times, 0.25, "first"),
    "average from zero": lambda times: evidence.keeps_rate(times, 0.25, "zero"),
    "every single gap": lambda times: longest(times) <= 0.25,
    "mean over the answer": lambda times: mean_gap(times) <= 0.25,
}
fastgen = {
    "whole": dict(policy="continuous", max_num_batched_tokens=4096),
    "split-fuse": dict(policy="split-fuse(context_per_token=inf)", max_num_batched_tokens=768),
}


# %%
def effective(trace: mc.Trace, reading) -> float:
    """Requests per second that kept the promise, as `reading` understands it."""
    good = 0
    for record in trace.requests.values():
        times = record.token_times
        in_time = times and times[0] - record.arrival <= record.prompt_tokens / 512
        good += bool(in_time and reading(times))
    return good / trace.metrics().duration


best = dict.fromkeys(itertools.product(fastgen, READINGS), 0.0)
lengths = dict(prompt=Lengths(2600, p90=3600), output=Lengths(60, p90=83), seed=3)
for rate in tqdm((0.6, 1.0, 1.4) if is_fast() else (0.5, 0.7, 0.9, 1.1, 1.4), leave=False):
    for name, knobs in fastgen.items():
        load = poisson(rate, 40 if is_fast() else 100, **lengths)
        run = mc.simulate(load, model="llama-2-70b", gpu="a100-80g-sxm", tensor_parallel=4, **knobs)
        for reading, keeps in READINGS.items():
            best[name, reading] = max(best[name, reading], effective(run, keeps))

# %%
of_reading = {
    reading: best["split-fuse", reading] / max(best["whole", reading], 1e-9) for reading in READINGS
}
Table([
    {"reading": reading, "whole prompts": f"{best['whole', reading]:.2f}/s",
     "split-fuse": f"{best['split-fuse', reading]:.2f}/s", "ratio": f"{ratio:.1f}"}
    for reading, ratio in of_reading.items()
])  # fmt: skip

# %% [markdown]
# One set of runs, five ratios. Is 2.3 within their range, and would you call it confirmed? A ratio
# that moves so far with an unstated choice neither confirms the paper nor refutes it. Look at which
# column moves: split-fuse keeps its gaps short, so it hardly matters how they are averaged.
#
# ## Exercise 2: what may be said (5 minutes, easy)
#
# Write `judge(values, low, high)`: one value per reading. Return `"holds"` if all lie within
# [low, high], `"does not hold"` if none does, and `"depends"` otherwise.


# %%
# Exercise judge (5 minutes, easy)
def judge(values, low: float, high: float) -> str:
    raise NotImplementedError


# %%
check.judge(judge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Neither the mean nor the best value answers this.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: judge -->
# ```python
# def judge(values, low: float, high: float) -> str:
#     inside = [low <= value <= high for value in values]
#     if all(inside):
#         return "holds"
#     return "depends" if any(inside) else "does not hold"
# ```
#
# </details>

# %%
print("2.6 times (Mistral capacity), 2.0 to 3.5:", evidence.judge(ratios, 2.0, 3.5))
print("2.3 times (FastGen), 1.7 to 2.9:", evidence.judge(list(of_reading.values()), 1.7, 2.9))

# %% [markdown]
# # Part 2: the chapter on trial
#
# A textbook chapter on this subject (Chinese, on continuous batching and chunked prefill) makes
# some twenty claims, several with numbers and none with a model, a GPU or a source. Each cell below
# takes one, in our words, and adds a line to the record. The verdict is computed, so on other
# models, GPUs or loads it may come out otherwise: change a cell and see.
#
# **Predict**: of the claims about numbers (300 ms, 1 to 2 s, 30%, 512 to 2,048), how many hold?

# %%
record = []


def enter(claim: str, here: str, verdict: str) -> Table:
    """Put one claim on the record and show it."""
    record.append({"claim": claim, "simulated or measured here": here, "verdict": verdict})
    return Table(record[-1:])


pairs = itertools.product(("llama-3-8b", "llama-2-13b"), ("a10g", "a100-80g-sxm", "h100-sxm"))
models = {pair: CostModel(*pair) for pair in pairs if pair != ("llama-2-13b", "a10g")}
times = {pair: [evidence.milliseconds(m, evidence.prefill(n)) for n in (8000, 32000)]
         for pair, m in models.items()}  # fmt: skip
text = "; ".join(f"{m} on {g}: {a:.0f}, {b:.0f} ms" for (m, g), (a, b) in times.items())
both = [0.2 <= a / 1e3 <= 0.4 and 1.0 <= b / 1e3 <= 2.0 for a, b in times.values()]
enter("8,000 tokens stop others for 300 ms, 32,000 for 1 to 2 s", text,
      evidence.judge(both, 1, 1))  # fmt: skip

# %% [markdown]
# ### The GPU's two resources
#
# The claims: pure decode leaves compute idle (30%, says a figure); mixing fills compute *and*
# bandwidth.

# %%
cost = CostModel(**A100)


def use(step) -> tuple[float, float]:
    """The share of peak compute and of peak bandwidth in one step."""
    parts = cost.parts(step)
    seconds = sum(part.seconds for part in parts)
    flops, moved = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    return flops / seconds / cost.peak_flops, moved / seconds / cost.peak_bandwidth


pure = {n: use(evidence.decodes(n, 1000)) for n in (1, 10, 60)}
mixes = {(c, n): use(evidence.mixed(c, n, 1000)) for c in (250, 1000) for n in (10, 60)}
idle = [1 - compute for compute, _ in pure.values()]
text = ", ".join(f"{n} decodes: {1 - c:.0%} idle, bandwidth {b:.0%}" for n, (c, b) in pure.items())
enter("pure decode leaves 30% of compute idle", text, evidence.judge(idle, 0.2, 0.4))

# %%
text = ", ".join(f"{c}+{n}: {f:.0%} and {b:.0%}" for (c, n), (f, b) in mixes.items())
enter("mixing fills compute and bandwidth (here: both above 70%)", text,
      evidence.judge([min(pair) for pair in mixes.values()], 0.7, 1.0))  # fmt: skip

# %%
separate = [evidence.decodes(10, 1000), evidence.prefill(1000)]
apart = sum(evidence.milliseconds(cost, step) for step in separate)
together = evidence.milliseconds(cost, evidence.mixed(1000, 10, 1000))
enter("mixing saves time: 1,000 + 10 in one step instead of two",
      f"{together:.1f} ms instead of {apart:.1f} ms",
      evidence.judge([together / apart], 0.0, 0.95))  # fmt: skip

# %% [markdown]
# Compare the two rows about resources: is the idle share anywhere near 30%, and does any mixture
# fill both? A step is long or short, and bytes per second fall as it gets longer. The gain is that
# the weights are read once for both, not that two gauges stand at their end.
#
# ### "A larger effective batch"
#
# The claim: better utilisation lets the same memory hold more requests. Two things can be meant.
# *Memory*: a step's activations grow with its budget, and what they take, blocks cannot have.
# *Concurrency at a promise*: how many requests are in flight at the highest load that keeps it.

# %%
shape = MODELS["llama-2-7b"]


def activation_gb(budget: int) -> float:
    """Live at once in an MLP: gate, up, hidden states and residual, 2 bytes each."""
    return 2 * budget * (2 * shape.ffn_size + 2 * shape.hidden_size) / 1e9


pool = num_blocks_for(cost, 16) * 16 * shape.kv_bytes_per_token / 1e9
freed = activation_gb(8192) - activation_gb(1024)
enter("the same memory holds more requests (by memory alone, 5% or more)",
      f"budget 1,024 instead of 8,192 frees {freed:.2f} GB beside a pool of {pool:.0f} GB "
      f"({freed / pool:.1%})", evidence.judge([freed / pool], 0.05, 1.0))  # fmt: skip

# %%
in_flight = {}
for policy, budget in (("continuous", 16384), ("decode-first", 512)):
    rate = max(capacities[0.001, policy], 0.05)
    knobs = dict(policy=policy, max_num_batched_tokens=budget)
    load = poisson(rate, count, seed=2, **CHAT)
    run = mc.simulate(load, model="mistral-7b", gpu="a100-80g-pcie", **knobs)
    latencies = [request.latency for request in run.metrics().requests.values()]
    in_flight[policy] = sum(latencies) / run.metrics().duration
gain = in_flight["decode-first"] / in_flight["continuous"]
enter("more requests in flight at the same promise",
      ", ".join(f"{name}: {n:.1f}" for name, n in in_flight.items()),
      evidence.judge([gain], 1.1, 1e9))  # fmt: skip

# %% [markdown]
# ### Steadier, and fairer?
#
# The same chat load under whole prompts and under chunks. Steadiness: how far the gaps spread.
# Fairness: each request's latency over its latency alone on that GPU (its slowdown), and Jain's
# index over these; 1 means that all are slowed alike.

# %%
chat = poisson(3.5, 30 if is_fast() else 80, prompt=Lengths(700, p90=3000, maximum=8000),
               output=Lengths(120, p90=300), seed=7)  # fmt: skip
pair = {
    "whole prompts": mc.simulate(chat, policy="continuous", max_num_batched_tokens=8192, **A100),
    "chunks": mc.simulate(chat, policy="decode-first", max_num_batched_tokens=512, **A100),
}
spread = {}
for name, run in pair.items():
    m = run.metrics()
    spread[name] = pstdev([gap for one in m.requests.values() for gap in one.itl]) / m.itl.mean
enter("steadier latency: gaps spread less (deviation over mean)",
      ", ".join(f"{name}: {value:.2f}" for name, value in spread.items()),
      evidence.judge([spread["chunks"] / spread["whole prompts"]], 0, 0.9))  # fmt: skip

# %%
jain, parts = {}, []
for name, run in pair.items():
    slow = list(itertools.chain(*fairness.slowdowns(run, **A100).values()))
    jain[name] = jain_index(slow)
    parts.append(f"{name}: Jain {jain[name]:.3f}, worst slowdown {max(slow):.1f}")
enter("fairer: slowdowns are more alike (Jain's index rises by 0.01 or more)", "; ".join(parts),
      evidence.judge([jain["chunks"] - jain["whole prompts"]], 0.01, 1))  # fmt: skip

# %% [markdown]
# ### What a chunk of 64 costs
#
# The claims: small chunks pay for kernel launches and for scheduling on the CPU. Let us split the
# bill of a prompt of 8,000 tokens alone. Scheduling is *measured* on this machine, in Python; all
# else is the cost model's.

# %%
bill = {}
for chunk in (64, 512, 2048, 8000):
    steps = evidence.in_chunks(8000, chunk)
    sums = dict.fromkeys(("linear", "prefill_attention", "overhead"), 0.0)
    for step in steps:
        for part in cost.parts(step):
            if part.name in sums:
                sums[part.name] += 1e3 * part.seconds
    launches = 1e3 * len(steps) * shape.num_layers * 10 * cost.efficiency.launch
    one = mc.simulate([mc.RequestSpec(0.0, mc.PromptShape(8000), 1)], chunk_size=chunk,
                      max_num_batched_tokens=8192, **A100)  # fmt: skip
    python = 1e3 * sum(step.scheduling_time for step in one.steps)
    bill[chunk] = {"chunk": chunk, "steps": len(steps), "10 launches a layer": launches,
                   "software per step": sums["overhead"], "matrix products": sums["linear"],
                   "attention": sums["prefill_attention"],
                   "scheduling (measured)": python}  # fmt: skip
Table([{key: round(value, 1) for key, value in row.items()} for row in bill.values()])

# %%
extra = {key: bill[64][key] - bill[8000][key] for key in bill[64] if key not in ("chunk", "steps")}
small = extra["10 launches a layer"] + extra["scheduling (measured)"]
extra["matrix products"] -= extra["10 launches a layer"]  # most launches are in there
rest = extra["matrix products"] + extra["attention"]
software = {ms: ms * (bill[64]["steps"] - bill[8000]["steps"]) for ms in (1, 5)}
part = {ms: (small + paid) / (small + paid + rest) for ms, paid in software.items()}
enter("chunks of 64 are slow because of launches and CPU work (more than half of the loss)",
      ", ".join(f"{key} {value:+.0f} ms" for key, value in extra.items())
      + "".join(f"; {share:.0%} with {ms} ms of software a step" for ms, share in part.items()),
      evidence.judge(list(part.values()), 0.5, 1.0))  # fmt: skip

# %% [markdown]
# Which item grew most from 8,000 to 64? A chunk of 64 rows reads *all weights* for few tokens: its
# matrix products are bound by memory. That would remain with no launches and a scheduler that
# costs nothing. The chapter's reason is a property of slow software, and its advice holds without
# it.
#
# ### 512 to 2,048, and the defaults
#
# The claims: a sensible chunk has 512 to 2,048 tokens; the default (2,048, it says of vLLM) is good
# enough nearly always. The three services of notebook 12, decode-first, one budget after another:

# %%
budgets = (128, 512, 2048) if is_fast() else (128, 256, 512, 1024, 2048, 4096)
shares, count = {}, design.num_requests()
for service in tqdm(design.SERVICES, leave=False):
    easy = replace(service, name=f"{service.name}, gaps three times", itl=3 * service.itl)
    for budget in budgets:
        run = service.run(11, count, policy="decode-first", max_num_batched_tokens=budget)
        for promise in (service, easy):
            shares.setdefault(promise.name, {})[budget] = promise.share_kept(run)
Table([
    {"promise": name, **{str(budget): f"{share:.0%}" for budget, share in kept.items()}}
    for name, kept in shares.items()
])  # fmt: skip

# %%
in_range, by_default = [], []
for kept in shares.values():
    best = max(max(kept.values()), 1e-9)
    in_range.append(max(share for budget, share in kept.items() if 512 <= budget <= 2048) / best)
    by_default.append(kept[2048] / best)
enter("the best chunk lies in 512 to 2,048 (it keeps 99% of the best or more)",
      ", ".join(f"{name}: {share:.0%}" for name, share in zip(shares, in_range, strict=True)),
      evidence.judge(in_range, 0.99, 1.0))  # fmt: skip

# %%
enter("a default of 2,048 is nearly always good enough (keeps 90% of the best)",
      ", ".join(f"{name}: {share:.0%}" for name, share in zip(shares, by_default, strict=True)),
      evidence.judge(by_default, 0.9, 1.0))  # fmt: skip

# %% [markdown]
# Read the table twice: once by machine, and once by promise. A budget is a time on a machine, so
# what is sensible moves with both; "512 to 2,048" without a GPU and a promise is a habit of one
# class of GPUs.
#
# ### Dynamic SplitFuse against a static chunk
#
# The claim: adapting the chunk to the decodes gives more throughput than a static chunk. Static:
# one prompt chunk of 512 beside all decodes. Dynamic: decodes and prompts together weigh 512.


# %%
def static_chunk(view, chunk=512):
    """All decodes, and beside them one chunk's worth of prompts, however many decodes there are."""
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        chunk -= yield request, min(chunk, request.num_uncomputed_tokens)
        if chunk < 1:
            return


static = dict(policy=static_chunk, max_num_batched_tokens=8192)
dynamic = dict(policy="split-fuse(target=512)", max_num_batched_tokens=8192)
throughput, gaps = {}, {}
for name, prompt, output in (("short contexts", 500, 200), ("long contexts", 6000, 100)):
    users = mc.workloads.closed_loop(24, 2, prompt=prompt, output=output)
    m, s = (mc.simulate(users, model="llama-3-8b", gpu="a100-80g-sxm", **k).metrics()
            for k in (dynamic, static))  # fmt: skip
    throughput[name] = m.total_throughput / s.total_throughput
    gaps[name] = m.itl.p99 / s.itl.p99
enter("Dynamic SplitFuse has more throughput than a static chunk (2% or more)",
      ", ".join(f"{name}: throughput × {throughput[name]:.2f}, P99 gap × {gaps[name]:.2f}"
                for name in gaps),
      evidence.judge(list(throughput.values()), 1.02, 1e9))  # fmt: skip

# %% [markdown]
# Look at both figures: a chunk that shrinks when decodes are many is a trade, throughput against
# gaps. Notebook 09 shows when either side wins.
#
# ## Exercise 3: do long prompts get long answers? (10 minutes, medium)
#
# The chapter would reserve memory by that rule. Write `rank_correlation(xs, ys)`, Spearman's: the
# ordinary correlation of the *ranks*, where equal values share their mean rank. Lengths are skewed,
# so a correlation of the values would be about a few giants.


# %%
# Exercise rank-correlation (10 minutes, medium)
def rank_correlation(xs, ys) -> float:
    raise NotImplementedError


# %%
check.rank_correlation(rank_correlation)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Collect the places of each value in the sorted list; its rank is the mean of its places.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: rank-correlation -->
# ```python
# from statistics import correlation, mean
#
#
# def rank_correlation(xs, ys) -> float:
#     def ranks(values):
#         places = {}
#         for place, value in enumerate(sorted(values)):
#             places.setdefault(value, []).append(place)
#         return [mean(places[value]) for value in values]
#
#     return correlation(ranks(xs), ranks(ys))
# ```
#
# </details>

# %% [markdown]
# The files are not part of this package. Put
# Azure's (`AzureLLMInferenceTrace_conv.csv` and `…_code.csv`, Azure/AzurePublicDataset, CC-BY 4.0)
# and the ShareGPT lengths of microsoft/sarathi-serve into a folder and name it in the variable
# `MINICHUNK_TRACES` before you start Jupyter. Without them the record shows what we found in them,
# and says so.

# %%
FOUND = {"Azure 2023, conversation": 0.073, "Azure 2023, code": -0.021, "ShareGPT lengths": 0.051}
real = {
    name: evidence.rank_correlation(*zip(*lengths, strict=True))
    for name, lengths in evidence.real_lengths().items()
}
source = "your files" if real else "no files here; as the authors computed from theirs"
shown = real or FOUND
enter("long prompts predict long outputs (rank correlation 0.3 or more)",
      f"{', '.join(f'{name} {value:+.2f}' for name, value in shown.items())} ({source})",
      evidence.judge(list(shown.values()), 0.3, 1.0))  # fmt: skip

# %% [markdown]
# ### Which way for which business?
#
# The claims: chat wants decode-first, RAG prefill-first, batch work throughput, tenants fairness.
# Each is tried at *equal budgets*, so that the policy is all that differs.

# %%
kept = {
    policy: mc.simulate(chat, policy=policy, max_num_batched_tokens=512, **A100).goodput(
        ttft=1.5, itl=0.080
    )
    for policy in ("decode-first", "prefill-first")
}
enter("chat wants decode-first (goodput, budget 512)",
      ", ".join(f"{name}: {value:.2f}/s" for name, value in kept.items()),
      evidence.judge([kept["decode-first"] / max(kept["prefill-first"], 1e-9)], 1.05, 1e12)
)  # fmt: skip

# %%
rag = poisson(2.0, 30 if is_fast() else 60, prompt=Lengths(4000, p90=7000, maximum=12000),
              output=Lengths(40, p90=100), seed=2)  # fmt: skip
first = {
    (policy, budget): mc.simulate(rag, policy=policy, max_num_batched_tokens=budget, **A100)
    .metrics()
    .ttft.p50
    for policy in ("decode-first", "prefill-first")
    for budget in (512, 4096)
}
gains = [first["prefill-first", b] / first["decode-first", b] for b in (512, 4096)]
enter("RAG wants prefill-first (median TTFT at least 5% shorter)",
      ", ".join(f"{name} at {b}: {value:.2f} s" for (name, b), value in first.items()),
      evidence.judge(gains, 0, 0.95))  # fmt: skip

# %%
pile = [replace(spec, arrival=0.0) for spec in chat]
done = {
    policy: mc.simulate(pile, policy=policy, max_num_batched_tokens=8192, **A100).metrics().duration
    for policy in ("split-fuse", "prefill-first", "decode-first")
}
enter("for batch throughput the policy matters (5% or more, budget 8,192)",
      ", ".join(f"{name}: {value:.1f} s" for name, value in done.items()),
      evidence.judge([max(done.values()) / min(done.values())], 1.05, 1e9))  # fmt: skip

# %%
flood = poisson(20, 30 if is_fast() else 60, prompt=Lengths(1500, p90=3000), output=150, seed=4)
tenants = mc.workloads.multi_tenant(
    {"flood": flood, "quiet": poisson(1, 5, prompt=300, output=100, seed=5)}
)
waits = {}
for order in ("fcfs", "fair"):
    run = mc.simulate(tenants, order=order, max_num_batched_tokens=512, **A100)
    waits[order] = max(request.ttft for request in groups.split(run)["quiet"])
enter("many tenants want a fair order (the quiet one's worst TTFT halves)",
      ", ".join(f"{name}: {value:.2f} s" for name, value in waits.items()),
      evidence.judge([waits["fair"] / waits["fcfs"]], 0, 0.5))  # fmt: skip

# %% [markdown]
# ### The record

# %%
Table(record)

# %%
verdicts = [row["verdict"] for row in record]
for verdict in ("holds", "depends", "does not hold"):
    print(f"{verdict}: {verdicts.count(verdict)} of {len(verdicts)}")

# %% [markdown]
# Compare with your prediction. Where the chapter describes a *mechanism*, how does it fare? Where
# it gives a *number*? Bear in mind what this court is: a simulator whose own errors you saw in part
# 1, one load per claim, and thresholds that we chose. A verdict near a threshold is worth little.
# The claims that no simulation can settle (that commercial services use priorities, that the
# schedulers of the future adapt) are not on the record.
#
# ## Recap
#
# 1. What is wrong with fitting two constants to a table and then reporting agreement with it?
# 2. A paper says "2.3 times under an SLO". Which two questions do you ask first?
# 3. The chapter says that mixing fills compute and bandwidth. What does it do instead?
#
# <details><summary>Answers</summary>
#
# 1. The agreement is in-sample. Fit on some rows, report the others.
# 2. How exactly is the promise read, and what was the load? Then: what was the baseline's budget?
# 3. It reads the weights once for both kinds of tokens. Compute rises; bandwidth, per second,
#    falls, because the step gets longer.
#
# </details>
