# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 10 · Who goes first, and who should be gone
#
# **Time:** 55 minutes · **Needs:** notebook 08 (policies); 02 (blocks) helps. No GPU; the last part
# loads a real model of 135 million parameters.
#
# After this notebook you can
#
# 1. set priorities with ageing, and say what they cost those who wait and those who are preempted;
# 2. test whether a predicted answer length helps, with predictors that are right, noisy and wrong,
#    and reserve blocks by it;
# 3. end requests that nobody waits for, and measure what they had cost everybody else.

# %%
import inspect
import math
import random
from statistics import mean

import matplotlib.pyplot as plt
from tqdm import tqdm

import minichunk as mc
from minichunk.compare import Table
from minichunk.labs import check, groups
from minichunk.labs.result import is_fast
from minichunk.sim.cost import CostModel
from minichunk.sim.run import simulated_engine
from minichunk.workloads import Lengths

A100 = dict(model="llama-2-7b", gpu="a100-80g-sxm")
scale = 0.25 if is_fast() else 1.0

# %% [markdown]
# ## An order is a key
#
# A policy shares the budget of a step; an *order* says who stands in front. Any policy goes with
# any order. An order is a small class with a sort key, smallest first. Here is `priority`:

# %%
print(inspect.getsource(mc.orders.Priority))

# %% [markdown]
# The key is asked once, when a request arrives, and kept. That keeps the queue cheap: with 100,000
# requests waiting, a step still costs the logarithm of that. But waiting should make a request more
# urgent, and a constant key cannot change with time.
#
# **Predict**: how can a key that never changes express that a request becomes more urgent while it
# waits?
#
# ## Exercise 1: a key that ages (10 minutes, medium)
#
# Write `aged_key(priority, arrival, ageing_seconds)`. Lower priority values go first;
# `ageing_seconds` of waiting are worth one level. At any moment the order must be that of priority
# − waited / ageing_seconds; among equals in that and in priority, the one that came first.
# `ageing_seconds` may be infinite.


# %%
# Exercise aged-key (10 minutes, medium)
def aged_key(priority: int, arrival: float, ageing_seconds: float):
    raise NotImplementedError


# %%
check.aged_key(aged_key)

# %% [markdown]
# <details><summary>Hint</summary>
#
# At time t a request has waited t − arrival. Write the urgency of two requests at time t and
# subtract one from the other: what happens to t?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: aged-key -->
# ```python
# def aged_key(priority: int, arrival: float, ageing_seconds: float):
#     return (priority + arrival / ageing_seconds, arrival)
# ```
#
# Everybody ages at the same rate, so *differences* in urgency never change: t cancels.
#
# </details>

# %% [markdown]
# ## Priorities, and who pays
#
# Paying users (priority 0) send 5 requests per second, free users (priority 1) send 2. Together
# they are a little more than 24 slots can serve.
#
# **Predict**: under first come, first served both groups wait equally long. With strict priorities,
# by what factor does each group's median TTFT change? And what happens to a free answer that is
# already streaming?

# %%
lengths = dict(prompt=Lengths(600, p90=2000, maximum=4000), output=Lengths(150, p90=300))
paid = mc.workloads.poisson(5, int(100 * scale), **lengths, seed=1, tenant="paid", priority=0)
free = mc.workloads.poisson(2, int(40 * scale), **lengths, seed=2, tenant="free", priority=1)
users = mc.workloads.merge(paid, free)
traces = {
    order: mc.simulate(users, order=order, max_num_batched_tokens=512, max_num_seqs=24, **A100)
    for order in ("fcfs", "priority(ageing_seconds=inf)", "priority(ageing_seconds=3)")
}
Table([row for order, trace in traces.items() for row in groups.rows(trace, order=order)])

# %% [markdown]
# Look at three columns.
#
# - **TTFT**: paying users gain what free users lose. No order makes work; the sum is served either
#   way.
# - **longest gap**: a waiting paying user may take the *slot* of a free user whose answer is
#   streaming. The free reader's text stops, for seconds. The request's blocks are freed; what the
#   prefix cache no longer holds when it returns must be computed again.
# - With `ageing_seconds=3` three seconds of waiting are worth one level. Compare both rows of
#   "paid": what does mercy cost?

# %%
strict = traces["priority(ageing_seconds=inf)"]
stops = sorted(strict.stalls(), key=lambda stall: stall.gap, reverse=True)
for stall in stops[:3]:
    cause = stall.causes[0]
    print(f"request {stall.request_id}: no token for {stall.gap:.2f} s, mostly {cause.kind}")
preempted = sum(event.kind == "preempt" for event in strict.events)
print(f"{preempted} preemptions, {strict.metrics().recomputed_tokens} tokens computed again")

# %% [markdown]
# When is preemption the wrong tool? When answers are long and slots few, the preempted lose seconds
# so that others gain tenths. An engine can let priorities rule the *queue* only. In minichunk that
# is one method.
#
# **Predict**: does "patient" cost paying users much of their TTFT? And what does it give the free
# users: an earlier first token, or only streams that do not stop?


# %%
class PatientPriority(mc.orders.Priority):
    """Priorities in the queue; nobody who is streaming is stopped."""

    def may_preempt(self, asker, victim) -> bool:
        return False


patient = mc.simulate(
    users, order=PatientPriority(math.inf), max_num_batched_tokens=512, max_num_seqs=24, **A100
)
Table(groups.rows(patient, order="patient") + groups.rows(strict, order="strict"))

# %% [markdown]
# Compare both rows of "paid", then the columns `longest gap` and `latency p50` of "free".

# %% [markdown]
# ## Prediction: short answers first
#
# Serving the shortest job first minimises the mean time to completion, if one knows which is the
# shortest. Nobody knows how long an answer will be. A textbook chapter suggests that long prompts
# usually lead to long answers, so that the prompt can predict the answer. Test it where you control
# the truth: three workloads with the same lengths, in which prompt and answer are correlated
# positively, not at all, and negatively.


# %%
def correlated(rho: float, count: int, rate: float = 20.0) -> list[mc.RequestSpec]:
    """Lognormal prompts and answers whose logarithms correlate with coefficient `rho`."""
    rng, now, specs = random.Random(3), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        a, b = rng.gauss(0, 1), rng.gauss(0, 1)
        b = rho * a + math.sqrt(1 - rho * rho) * b
        prompt = min(4000, max(16, round(500 * math.exp(0.8 * a))))
        answer = min(1000, max(4, round(120 * math.exp(b))))
        specs.append(mc.RequestSpec(now, mc.PromptShape(prompt), answer))
    return specs


# %% [markdown]
# The order `shortest` takes a predictor: the truth (`oracle`), the truth with noise
# (`noisy-oracle`), or half the prompt's length (`prompt-length`).
#
# **Predict**: in which of the three workloads is `prompt-length` better than first come, first
# served? In which is it worse? (Mind that it also serves short *prompts* first.)

# %%
ORDERS = {
    "fcfs": "fcfs",
    "oracle": "shortest",
    "noisy oracle": "shortest(predictor='noisy-oracle')",
    "prompt length": "shortest(predictor='prompt-length')",
}


def latencies(workload: list, order: str) -> tuple[float, float]:
    """Mean and longest time from arrival to last token, in seconds."""
    knobs = dict(order=order, max_num_batched_tokens=1024, max_num_seqs=32)
    requests = mc.simulate(workload, **knobs, **A100).metrics().requests.values()
    return mean(r.latency for r in requests), max(r.latency for r in requests)


# %%
rows = []
for rho in tqdm((0.8, 0.0, -0.8)):
    workload = correlated(rho, int(200 * scale))
    found = {name: latencies(workload, order) for name, order in ORDERS.items()}
    cells = {name: f"{middle:.1f} s (max {most:.0f})" for name, (middle, most) in found.items()}
    rows.append({"correlation": rho, **cells})
Table(rows)

# %% [markdown]
# The cells are mean latencies, with the longest in brackets. Read three things:
#
# - How much of the oracle's gain does a noisy oracle keep? Its noise is a factor of e^0.5 either
#   way.
# - Where prompts and answers correlate, is the prompt nearly as good as the truth? Where they do
#   not, why does it help nevertheless? (A short prompt is short work, too.) And where they
#   correlate negatively, what does trusting it cost?
# - The longest latency: whose is it under `oracle`? Shortest-first starves the long.
#
# So measure the correlation in *your* traffic before you use it. Given a file of published request
# lengths, such as the Azure trace or ShareGPT lengths, `mc.workloads.load("file.csv")` reads it,
# and notebook 13 computes the coefficient.

# %% [markdown]
# ## Exercise 2: predict from the past (15 minutes, medium)
#
# Write a class with `predict(request) -> float` and `learn(request)`. `learn` is called once for
# each request that has ended (`len(request.output_token_ids)` is its answer's length); `predict`
# may look at `request.tenant` and `request.num_prompt_tokens`. Three services use the engine;
# nobody tells you what they do, and `request.params.max_tokens` is 4,096 for all. The check asks
# for an error of at most three quarters of what the better of two simple predictors reaches.


# %%
# Exercise length-predictor (15 minutes, medium)
class LengthPredictor:
    def predict(self, request) -> float:
        raise NotImplementedError

    def learn(self, request) -> None:
        raise NotImplementedError


# %%
check.length_predictor(LengthPredictor)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Keep a running mean for each pair of tenant and *size class* of the prompt; powers of two make
# good classes (`int.bit_length()`). Until a class has been seen, fall back on any number.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: length-predictor -->
# ```python
# class LengthPredictor:
#     def __init__(self) -> None:
#         self.seen: dict = {}
#
#     def key(self, request):
#         return request.tenant, (request.num_prompt_tokens**2).bit_length()
#
#     def predict(self, request) -> float:
#         count, total = self.seen.get(self.key(request), (0, 0))
#         return total / count if count else 128.0
#
#     def learn(self, request) -> None:
#         count, total = self.seen.get(self.key(request), (0, 0))
#         self.seen[self.key(request)] = (count + 1, total + len(request.output_token_ids))
# ```
#
# Squaring the length before `bit_length` makes two classes per doubling.
#
# </details>

# %% [markdown]
# ## Reserving what was predicted
#
# A second use of a prediction: *planning memory*. Admission looks at the prompt only; answers grow
# later, and when the pool is full somebody is preempted and computed again. With `reserve=True` the
# order also reserves blocks for the predicted answer.
#
# **Predict**: with reservations, what happens to the number of preemptions, to the longest gap, and
# to the time until all are done?

# %%
writers = mc.workloads.poisson(
    8, int(120 * scale), prompt=Lengths(300, p90=800), output=Lengths(300, p90=800), seed=5
)


def memory_row(name: str, order: str) -> dict:
    m = mc.simulate(writers, order=order, num_blocks=800, **A100).metrics()
    return {
        "order": name,
        "preemptions": m.num_preemptions,
        "computed again": m.recomputed_tokens,
        "longest gap": f"{m.itl.max:.2f} s",
        "mean latency": f"{mean(r.latency for r in m.requests.values()):.1f} s",
        "all done": f"{m.duration:.1f} s",
    }


# %%
RESERVING = {
    "fcfs": "fcfs",
    "shortest, true": "shortest",
    "shortest, true, reserved": "shortest(reserve=True)",
    "shortest, by prompt, reserved": "shortest(predictor='prompt-length', reserve=True)",
}
Table([memory_row(name, order) for name, order in RESERVING.items()])

# %% [markdown]
# Reservation is not free, and the table says for whom. With a true prediction nobody is preempted
# and no stream stops; but blocks that are reserved and not yet filled serve nobody, fewer requests
# run at once, and all are done later. Optimism with recomputation has the better throughput here;
# caution has the smoother streams. With a wrong prediction you can pay both ways.

# %% [markdown]
# ## Zombies
#
# A user closes the tab. If the server does not notice, the request keeps its slot and its blocks
# and computes tokens for nobody: a zombie. Here every client gives up 8 seconds after asking,
# unless the answer is complete by then; the load is more than the server can take.
#
# **Predict**: if nobody notices that clients have gone, which share of the tokens is computed for
# nobody? And how many more clients are served in time if the server notices at once?

# %%
crowd = mc.workloads.poisson(9, int(270 * scale), **lengths, seed=5)
PATIENCE = 8.0


def serve(timeout=None, queue_timeout=None, **knobs) -> mc.Trace:
    """The crowd on a simulated A100; timeouts are given with each request."""
    config = mc.EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, **knobs)
    engine = simulated_engine(CostModel(**A100), config)
    for spec in crowd:
        params = mc.SamplingParams(max_tokens=spec.output_tokens)
        limits = dict(timeout=timeout, queue_timeout=queue_timeout)
        engine.add_request(spec.prompt, params, arrival_time=spec.arrival, **limits)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace


# %%
def account(name: str, trace: mc.Trace) -> dict:
    """Who was served in time, and which tokens came after the client had left."""
    requests = list(trace.requests.values())
    delays = [t - r.arrival for r in requests for t in r.token_times]
    ends = [r.finish_time - r.arrival for r in requests if r.finish_reason == "length"]
    return {
        "server": name,
        "served in time": f"{sum(end <= PATIENCE for end in ends)} of {len(requests)}",
        "tokens for nobody": f"{sum(d > PATIENCE for d in delays) / len(delays):.0%}",
        "TTFT p50": f"{trace.metrics().ttft.p50:.2f} s",
        "busy for": f"{trace.metrics().duration:.1f} s",
    }


# %%
ignorant = serve()
attentive = serve(timeout=PATIENCE)
Table(
    [
        account("never notices", ignorant),
        account("notices at once", attentive),
        account("gives up on those who queue for 3 s", serve(queue_timeout=3.0)),
        account("turns away when 20 are waiting", serve(max_queued_requests=20)),
    ]
)

# %% [markdown]
# The first two rows serve the same crowd with the same scheduler. What differs is only whether a
# request ends when its client does. The other two do not watch clients at all: they refuse those
# who would wait too long. Compare them: refusing early is the cheap half of the cure, since a
# request that was never started has wasted nothing.
#
# How the pool looks from inside, in used blocks:

# %%
figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for name, trace in (("never notices", ignorant), ("notices at once", attentive)):
    ax.plot([s.end for s in trace.steps], [s.used_blocks for s in trace.steps], label=name)
ax.set(xlabel="time (s)", ylabel="used blocks")
_ = ax.legend()

# %% [markdown]
# ## Exercise 3: an attentive server (15 minutes, medium)
#
# `serve_until_they_leave(engine, leaves_at)`: drive the engine until nothing is unfinished.
# `leaves_at` maps some request ids to the time at which their client leaves. Cancel each of these
# at the first moment between two steps at which `engine.clock.now()` has reached its time, whether
# it streams, waits or is not there yet; `engine.cancel(id)` is False for one that has ended. Never
# cancel early, and nobody else.


# %%
# Exercise serve-until-they-leave (15 minutes, medium)
def serve_until_they_leave(engine, leaves_at: dict) -> None:
    raise NotImplementedError


# %%
check.serve_until_they_leave(serve_until_they_leave)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Do not look at token events to find out who has left: a request that waits in the queue has none.
# Before each step, go through `leaves_at`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution: serve-until-they-leave -->
# ```python
# def serve_until_they_leave(engine, leaves_at: dict) -> None:
#     while engine.has_unfinished_requests():
#         now = engine.clock.now()
#         for request_id, leaves in leaves_at.items():
#             if now >= leaves:
#                 engine.cancel(request_id)
#         engine.step()
# ```
#
# </details>

# %% [markdown]
# ## On a real model
#
# The same engine on real weights. `llm.stream` is a generator; a reader who stops early closes it,
# and closing it cancels the request. **Predict**: how many blocks of 16 tokens are in use
# after the sixteenth token, and after the reader has left?

# %%
llm = mc.LLM("smollm2-135m", max_num_batched_tokens=64, quiet=True)
stream = llm.stream("Once upon a time", mc.SamplingParams(max_tokens=200, temperature=0.0))
print("".join(next(stream).text for _ in range(16)), "…")
pool = llm.engine.scheduler.pool
print(f"while it streams: {pool.num_used} blocks used")
stream.close()
print(f"after the reader has left: {pool.num_used} blocks used")
print("the request ended with:", next(iter(llm.trace.requests.values())).finish_reason)

# %% [markdown]
# After `cancel` returns, no token of the request appears and its blocks are free, even if a step
# was running. A server has to do one thing more: *notice*. With HTTP that means to look at the
# connection while nothing is being sent, as in your loop above.

# %% [markdown]
# ## Recap
#
# 1. Why can a key that never changes still let waiting requests become more urgent?
# 2. Shortest-first with an oracle lowers the mean latency. Who pays, and which knob of `shortest`
#    softens that?
# 3. A request times out in the queue after 3 s, another after 8 s while it streams. Which of the
#    two has wasted more, and of what?
#
# <details><summary>Answers</summary>
#
# 1. All requests age at the same rate, so the difference between two of them is constant; only the
#    differences decide.
# 2. Those with long answers: they wait until nobody shorter does. `ageing_seconds` lets them come
#    forward with time.
# 3. The one that streamed: its prefill and its tokens were computed, and its blocks and slot were
#    kept from others. The one in the queue has cost nothing but its own wait.
#
# </details>
