# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11 · Fairness: many tenants, one GPU
#
# **Time:** 50 minutes · **Needs:** notebook 10 (orders). No GPU.
#
# After this notebook you can
#
# 1. protect quiet tenants from one that floods the queue, with virtual token counters, and write
#    them yourself;
# 2. measure fairness three ways (service, waiting, slowdown) and say why they disagree;
# 3. say what a fair order does *not* do: free a slot, weigh real seconds, or make everybody happy.

# %%
import inspect
from statistics import mean

import matplotlib.pyplot as plt

import minichunk as mc
from minichunk.compare import Table
from minichunk.core.metrics import jain_index as jain
from minichunk.labs import check, groups
from minichunk.labs.fairness import at, contested, service, slowdowns, widest_gap
from minichunk.labs.result import is_fast
from minichunk.viz.figures import fairness_figure
from minichunk.workloads import Lengths, multi_tenant, poisson

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm", max_num_batched_tokens=1024)
scale = 0.25 if is_fast() else 1.0

# %% [markdown]
# ## A flood
#
# Ann and Bob each ask a short question about once a second. A third tenant sends 20 requests per
# second, with longer prompts, far more than the GPU can take.
#
# **Predict**: how long does Ann wait for her first token, in the middle, if the queue is first
# come, first served? And if the tenant that was served least goes first? Does the flood have to
# wait much longer then?

# %%
flood = poisson(
    20,
    int(160 * scale),
    prompt=Lengths(1200, p90=2400, maximum=4000),
    output=Lengths(120, p90=240),
    seed=4,
)
question = dict(prompt=Lengths(300, p90=600), output=100)
ann = poisson(1, int(20 * scale), **question, seed=5)
bob = poisson(1, int(20 * scale), **question, seed=6)
three = multi_tenant({"ann": ann, "bob": bob, "flood": flood})

flooded = {
    order: mc.simulate(three, order=order, max_num_seqs=32, **A100) for order in ("fcfs", "fair")
}
Table([row for order, trace in flooded.items() for row in groups.rows(trace, order=order)])

# %% [markdown]
# Compare Ann's two rows, then the two rows of the flood. Under first come, first served everybody
# stands in the flood's queue. Under `fair` the flood stands in its own. What the quiet tenants gain
# costs the flood little, because they ask for little.

# %%
fairness_figure(flooded["fair"])

# %% [markdown]
# The lines are tokens served. They are not parallel, and need not be: fairness does not mean that
# all get the same, only that nobody is kept below an equal share *while asking for more*. Ann and
# Bob ask for less than their share and get all of it at once; the flood gets the rest.

# %% [markdown]
# ## Virtual token counters
#
# The order is that of VTC (Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024).
# Each tenant has a counter of what it was served; the tenant with the least counter goes next.

# %%
print(inspect.getsource(mc.orders.Fair))

# %% [markdown]
# Three decisions are in these lines.
#
# - **What is counted**: a prompt token 1, an output token 2, as in the paper: outputs are dearer.
# - **When**: a prompt when it is admitted, an output token when it appears. Nobody knows the length
#   of an answer beforehand, and nobody needs to.
# - **The lift** (`group_joins`): a tenant that had nobody waiting is lifted to the least counter of
#   those who wait. Otherwise idling would save up credit.
#
# How uneven can it get? Two tenants now ask for everything at once: one *reads* (long prompts,
# short answers), one *talks* (short prompts, long answers).
#
# **Predict**: the widest difference in weighted tokens between them, while both wait: under first
# come, first served, and under `fair`. Prompts are about 1,500 and 400 tokens.

# %%
reads = poisson(100, int(100 * scale), prompt=Lengths(1500, p90=3000), output=40, seed=8)
talks = poisson(100, int(160 * scale), prompt=Lengths(400, p90=1000), output=100, seed=7)
backlog = multi_tenant({"reads": reads, "talks": talks})
pair = {
    order: mc.simulate(backlog, order=order, max_num_seqs=32, **A100) for order in ("fcfs", "fair")
}
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
for ax, (order, trace) in zip(axes, pair.items(), strict=True):
    for tenant, curve in service(trace).items():
        ax.plot(*zip(*curve, strict=True), label=tenant)
    ax.axvspan(*contested(trace), alpha=0.1)
    ax.set(title=order, xlabel="time (s)")
axes[0].set_ylabel("weighted tokens served")
_ = axes[0].legend()

# %% [markdown]
# The shaded part is when both wait. There the two lines run together under `fair`.

# %%
longest = max(record.prompt_tokens for record in pair["fair"].requests.values())
pool_tokens = pair["fair"].meta["num_blocks"] * pair["fair"].meta["block_size"]
for order, trace in pair.items():
    print(f"{order}: widest gap {widest_gap(trace):,.0f} weighted tokens")
print(f"bound of the paper: 2 x max(1 x {longest:,}, 2 x {pool_tokens:,} tokens in the pool)")
print(f"                  = {2 * max(longest, 2 * pool_tokens):,}")

# %% [markdown]
# The paper proves that two tenants who both wait never drift further apart than 2 · max(w_p ·
# longest prompt, w_q · tokens that fit into memory), and that no order which keeps the GPU busy
# without preempting can promise less than half of it. How near does this run come to the bound? A
# bound covers the worst case, a pool full of one tenant's endless answers. Compare the gap with
# the longest prompt instead.

# %% [markdown]
# ## Exercise 1: write the counters (20 minutes, hard)
#
# Write the counters yourself, as an order that schedules like `fair`.
#
# Subclass `mc.Order`. `group(request)` says whose queue a request joins; the group with the least
# `group_key(group)` goes next. `charge(request, prompt_tokens, output_tokens)` is called when
# tokens are served. `group_joins(group, next_group)` is called when a request arrives whose group
# had nobody waiting: lift its counter to that of `next_group`, the group that would go next, or,
# if that is None (nobody waits), to that of the tenant whose prompt was admitted last. A counter
# never falls.


# %%
# Exercise token-counters (20 minutes, hard)
class TokenCounters(mc.Order):
    def __init__(self) -> None:
        self.counters: dict[str, float] = {}

    def group(self, request) -> str:
        raise NotImplementedError

    def group_key(self, group: str) -> float:
        raise NotImplementedError

    def charge(self, request, prompt_tokens: int, output_tokens: int) -> None:
        raise NotImplementedError

    def group_joins(self, group: str, next_group: str | None) -> None:
        raise NotImplementedError


# %%
check.token_counters(TokenCounters)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `charge` is called with `prompt_tokens > 0` exactly when a prompt is admitted: remember that
# tenant. A tenant without a counter has 0. The lift is a maximum.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: token-counters -->
# ```python
# class TokenCounters(mc.Order):
#     def __init__(self) -> None:
#         self.counters: dict[str, float] = {}
#         self.last_served = ""
#
#     def group(self, request) -> str:
#         return request.tenant
#
#     def group_key(self, group: str) -> float:
#         return self.counters.get(group, 0.0)
#
#     def charge(self, request, prompt_tokens: int, output_tokens: int) -> None:
#         tenant = request.tenant
#         self.counters[tenant] = self.group_key(tenant) + prompt_tokens + 2 * output_tokens
#         if prompt_tokens:
#             self.last_served = tenant
#
#     def group_joins(self, group: str, next_group: str | None) -> None:
#         floor = self.group_key(self.last_served if next_group is None else next_group)
#         self.counters[group] = max(self.group_key(group), floor)
# ```
#
# </details>

# %% [markdown]
# ## Why the lift?
#
# One tenant has worked steadily for 12 seconds when another, silent until then, sends 90 requests.
#
# **Predict**: without the lift, how long does the steady tenant have to wait once the other
# appears?


# %%
class NoLift(mc.orders.Fair):
    """Idling saves up credit."""

    def group_joins(self, group: str, next_group: str | None) -> None:
        pass


steady = poisson(6, int(90 * scale), prompt=Lengths(800, p90=1600), output=120, seed=9)
burst = poisson(30, int(90 * scale), prompt=Lengths(800, p90=1600), output=120, seed=10)
late = mc.workloads.Workload(
    "late", tuple(mc.RequestSpec(s.arrival + 12, s.prompt, s.output_tokens) for s in burst)
)
two = multi_tenant({"steady": steady, "late": late})
lifts = {"fair": "fair", "fair, no lift": NoLift()}
runs = {
    name: mc.simulate(two, order=order, max_num_seqs=32, **A100) for name, order in lifts.items()
}
Table([row for name, trace in runs.items() for row in groups.rows(trace, order=name)])

# %% [markdown]
# See the steady tenant's longest TTFT. Without the lift, the newcomer's counter starts at 0 and it
# owns the queue until it has caught up on 12 seconds of somebody else's work.

# %% [markdown]
# ## Shares
#
# Equal is not always fair: one tenant may have paid for three times as much.
#
# ## Exercise 2: tenants with shares (10 minutes, medium)
#
# Write an order that serves tenants in proportion to their shares:
# `WeightedFair({"gold": 3, "iron": 1})`. Start from `mc.orders.Fair`; while both wait, gold must be
# served three weighted tokens for each one of iron's.


# %%
# Exercise weighted-fair (10 minutes, medium)
class WeightedFair(mc.orders.Fair):
    def __init__(self, shares: dict[str, float]) -> None:
        super().__init__()
        self.shares = shares

    def charge(self, request, prompt_tokens: int, output_tokens: int) -> None:
        raise NotImplementedError


# %%
check.weighted_fair(WeightedFair)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Equal counters are what `fair` aims at. What must a gold token add to the counter so that counters
# are equal when gold has been served three times as much?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: weighted-fair -->
# ```python
# class WeightedFair(mc.orders.Fair):
#     def __init__(self, shares: dict[str, float]) -> None:
#         super().__init__()
#         self.shares = shares
#
#     def charge(self, request, prompt_tokens: int, output_tokens: int) -> None:
#         share = self.shares[request.tenant]
#         super().charge(request, prompt_tokens / share, output_tokens / share)
# ```
#
# </details>

# %% [markdown]
# ## What a fair order does not do
#
# ### It does not free slots
#
# A tenant starts 32 answers of 2,000 tokens on 16 slots. Ann asks a short question every two
# seconds.
#
# **Predict**: how long does Ann wait under `fair`?

# %%
long_answers = mc.workloads.Workload(
    "hog", (mc.RequestSpec(0.0, mc.PromptShape(200), int(2000 * scale)),) * 32
)
hogged = multi_tenant({"hog": long_answers, "ann": poisson(0.5, 8, prompt=300, output=50, seed=5)})
rows = []
for order in ("fcfs", "fair"):
    trace = mc.simulate(hogged, order=order, max_num_seqs=16, **A100)
    rows += groups.rows(trace, order=order)
Table(rows)

# %% [markdown]
# Better than behind all 32, but still a long time: a slot becomes free only when an answer ends,
# and `fair` preempts nobody (`may_preempt` is False, as in the paper). An order decides who is
# *next*; when nothing ends, nobody is next. More slots help, as far as there is memory; so does a
# limit on the slots of one tenant, which is a different mechanism.

# %% [markdown]
# ### It does not weigh real seconds
#
# The weights 1 and 2 are a choice. What do the tokens cost on this GPU? An estimate from the trace:
# the time of decode-only steps per token, and the time that prompt tokens add to a mixed step.
#
# **Predict**: how many times as dear as a prompt token is an output token, here?


# %%
def seconds_per_token(trace: mc.Trace) -> tuple[float, float]:
    """Of a prompt token in a mixed step, and of an output token in a decode-only step."""
    mixed = [s for s in trace.steps if s.prefill_tokens > 100 and s.decode_tokens]
    alone = [s for s in trace.steps if s.decode_tokens and not s.prefill_tokens]
    added = sum(s.duration - s.decode_floor for s in mixed) / sum(s.prefill_tokens for s in mixed)
    return added, sum(s.duration for s in alone) / sum(s.decode_tokens for s in alone)


prompt_cost, output_cost = seconds_per_token(pair["fair"])
print(f"prompt token {prompt_cost * 1e6:.0f} µs, output token {output_cost * 1e6:.0f} µs")
print(f"an output token costs {output_cost / prompt_cost:.1f} prompt tokens")
rows = []
for weight in (2.0, round(output_cost / prompt_cost, 1)):
    order = f"fair(output_weight={weight})"
    trace = mc.simulate(backlog, order=order, max_num_seqs=32, **A100)
    rows += groups.rows(trace, order=order)
Table(rows)

# %% [markdown]
# Which of the two tenants waits longer now? With the paper's weights the talker is served more
# GPU time than the reader; with weights in proportion to time, the reader is helped. Neither is
# wrong: a service that bills tokens is fair in tokens, one that bills seconds in seconds.

# %% [markdown]
# ### It does not make everybody equally happy
#
# One number for fairness is Jain's index: 1 when all shares are equal, 1/n when one has everything.
#
# ## Exercise 3: Jain's index (5 minutes, easy)
#
# Write it: the square of the sum, over n times the sum of the squares.


# %%
# Exercise jain-index (5 minutes, easy)
def jain_index(shares: list) -> float:
    raise NotImplementedError


# %%
check.jain_index(jain_index)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `sum(shares)` and `sum(share * share for share in shares)`; n is `len(shares)`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: jain-index -->
# ```python
# def jain_index(shares: list) -> float:
#     return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
# ```
#
# </details>

# %% [markdown]
# But an index of *what*? Take the flood again, and three quantities: weighted tokens served until
# the flood's last admission, mean waiting, and slowdown, the latency of a request divided by its
# latency alone on the GPU.
#
# **Predict**: for each of the three, is the index higher under fcfs or under `fair`?


# %%
rows = []
for order, trace in flooded.items():
    served = [at(curve, contested(trace)[1]) for curve in service(trace).values()]
    waits = [mean(r.queue_time for r in members) for members in groups.split(trace).values()]
    slow = [mean(values) for values in slowdowns(trace, **A100).values()]
    indices = {"service": jain(served), "waiting": jain(waits), "slowdown": jain(slow)}
    rows.append({"order": order, **{name: f"{value:.2f}" for name, value in indices.items()}})
Table(rows)

# %% [markdown]
# Do the three columns agree? In our run `fair` has the better index of service, and fcfs those of
# waiting and of slowdown: in the flood's queue everybody waits equally long, and equal misery is
# perfectly fair in the eyes of an index. What `fair` promises is something else, and no index over
# all tenants shows it: *nobody's service depends on how much the others ask for*. Look at the
# worst-off quiet tenant instead, as the first table did.

# %% [markdown]
# ## Is chunking fairer?
#
# A textbook chapter lists fairness among the gains of chunked prefill: long prompts no longer
# freeze others, new requests no longer starve. Test it with slowdowns: short questions at 4 per
# second, and a prompt of 8,000 tokens every few seconds.
#
# **Predict**: does the mean slowdown of the short ones fall, and who pays?

# %%
shorts = poisson(4, int(60 * scale), prompt=Lengths(200, p90=400), output=100, seed=1)
longs = poisson(0.4, max(2, int(8 * scale)), prompt=8000, output=50, seed=2)
mixture = multi_tenant({"short": shorts, "long": longs})


def slowdown_row(name: str, **knobs) -> dict:
    trace = mc.simulate(mixture, **{**A100, **knobs})
    slow = slowdowns(trace, **A100)
    return {
        "schedule": name,
        "short: mean slowdown": f"{mean(slow['short']):.2f}",
        "short: worst": f"{max(slow['short']):.2f}",
        "long: mean": f"{mean(slow['long']):.2f}",
        "Jain index of all": f"{jain(slow['short'] + slow['long']):.3f}",
        "longest gap": f"{trace.metrics().itl.max * 1e3:.0f} ms",
    }


# %%
Table(
    [
        slowdown_row("whole prompts", policy="continuous"),
        slowdown_row("chunks of 512", policy="decode-first", chunk_size=512),
    ]
)

# %% [markdown]
# Compare the size of the effects. Slowdown is about *completion*: a stall of half a second matters
# little in an answer of three seconds, so slowdowns move little. The longest gap is what changes.
# Chunking is fair to *streams*; among tenants it takes an order.

# %% [markdown]
# ## Recap
#
# 1. A tenant was idle for an hour. Why does `fair` not give it an hour's credit?
# 2. `fair` bounds the difference in service of two tenants who both wait. Why can Ann still wait
#    for half a minute?
# 3. Your fairness index falls after you switch from fcfs to `fair`. Is that a reason to switch
#    back?
#
# <details><summary>Answers</summary>
#
# 1. With credit it would own the GPU on its return, and everybody who had worked meanwhile would
#    starve. The lift makes it an equal from now on.
# 2. The bound is about tokens between tenants that are being served or could be. No order frees a
#    slot; running answers end when they end.
# 3. Not by itself: an index over unequal demands rewards making everybody wait alike. Ask what
#    happens to a tenant who asks for less than its share.
#
# </details>
#
# One cost of `fair` is left out here: jumping from tenant to tenant visits their cached prefixes in
# turn and can push them out of a small pool. Cao et al. (*Locality-aware Fair Scheduling in LLM
# Serving*, arXiv 2501.14312) report up to 2.87 times the throughput of VTC with an order that minds
# both.
