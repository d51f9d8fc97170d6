"""Small traces written by hand, so that what draws is tested without what schedules.

`stall_scene` is the course's scene: decodes under way, and one long prompt that arrives.
"""

from __future__ import annotations

from minichunk.core.trace import (
    BlockEvent,
    LifecycleEvent,
    RequestRecord,
    Skip,
    Span,
    StepRecord,
    Trace,
)

BASE, PER_PREFILL_TOKEN, PER_DECODE = 0.024, 0.00009, 0.0004


def step_time(prefill: int, decodes: int) -> float:
    """Seconds of a step: the weights are read once, prefill tokens are computed."""
    return max(BASE, prefill * PER_PREFILL_TOKEN) + decodes * PER_DECODE


def stall_scene(
    chunk_size: int | None = None,
    num_decodes: int = 10,
    prompt_tokens: int = 8000,
    output_tokens: int = 60,
    names: list[str] | None = None,
    clock: str = "simulated",
) -> Trace:
    """Whole prompts and decodes in turn (chunk_size None), or chunks mixed with every decode."""
    budget = 8192 if chunk_size is None else chunk_size + num_decodes + 14
    policy = "continuous" if chunk_size is None else "decode-first"
    where = {"gpu": "a100-80g-sxm"} if clock == "simulated" else {"device": "NVIDIA A100"}
    trace = Trace(
        meta={
            "clock": clock,
            "policy": policy,
            "order": "fcfs",
            "model": "llama-2-7b",
            "max_num_batched_tokens": budget,
            "chunk_size": chunk_size,
            "block_size": 16,
            "num_blocks": 800,
            **where,
        }
    )
    names = names or [str(i) for i in range(num_decodes + 1)]
    prompts = [64] * num_decodes + [prompt_tokens]
    arrivals = [0.0] * num_decodes + [0.4]
    computed = [0] * len(names)
    chunks: dict[int, list[Span]] = {i: [] for i in range(len(names))}
    open_decode: dict[int, Span] = {}
    held: list[int] = [0] * len(names)
    next_block = 0
    now, admitted = 0.0, set()
    records = [
        RequestRecord(name, arrivals[i], prompts[i], output_tokens) for i, name in enumerate(names)
    ]
    trace.requests = {record.request_id: record for record in records}
    arrived: set[int] = set()
    while any(record.finish_reason is None for record in records):
        step = len(trace.steps)
        for i, record in enumerate(records):
            if i not in arrived and arrivals[i] <= now:
                arrived.add(i)
                trace.events.append(LifecycleEvent(record.request_id, step, arrivals[i], "arrive"))
        live = [i for i in sorted(arrived) if records[i].finish_reason is None]
        prefilling = [i for i in live if computed[i] < prompts[i]]
        decoding = [i for i in live if computed[i] >= prompts[i]]
        batch: list[tuple[int, int]] = []
        if chunk_size is None and prefilling:
            batch = [(i, prompts[i] - computed[i]) for i in prefilling]
            trace.skips += [
                Skip(records[i].request_id, step, step, "policy", 0) for i in decoding[:1]
            ]
        else:
            batch = [(i, 1) for i in decoding]
            left = budget - len(batch)
            for i in prefilling:
                take = min(left, prompts[i] - computed[i], chunk_size or left)
                if take:
                    batch.append((i, take))
                    left -= take
                else:
                    trace.skips.append(Skip(records[i].request_id, step, step, "budget", 0))
        if not batch:
            now = min(arrivals[i] for i in range(len(names)) if i not in arrived)
            continue
        prefill = sum(n for i, n in batch if computed[i] < prompts[i])
        decodes = sum(1 for i, n in batch if computed[i] >= prompts[i])
        end = now + step_time(prefill, decodes)
        scheduled = set()
        for i, n in batch:
            record = records[i]
            scheduled.add(i)
            if i not in admitted:
                admitted.add(i)
                trace.events.append(LifecycleEvent(record.request_id, step, now, "admit"))
            blocks = -(-(computed[i] + n) // 16) - held[i]
            if blocks > 0:
                ids = tuple((next_block + k) % 800 for k in range(blocks))
                trace.block_events.append(BlockEvent(step, "alloc", record.request_id, ids))
                next_block += blocks
                held[i] += blocks
            if computed[i] < prompts[i]:
                span = Span(record.request_id, step, step, "prefill", computed[i], n)
                trace.spans.append(span)
                chunks[i].append(span)
            elif i in open_decode and open_decode[i].last_step == step - 1:
                open_decode[i].last_step = step
                open_decode[i].tokens += 1
            else:
                open_decode[i] = Span(record.request_id, step, step, "decode", computed[i], 1)
                trace.spans.append(open_decode[i])
            computed[i] += n
        used = sum(held[i] for i in live)
        trace.steps.append(
            StepRecord(
                start=now,
                end=end,
                prefill_tokens=prefill,
                decode_tokens=decodes,
                budget=budget,
                free_blocks=800 - used,
                used_blocks=used,
                reserved_blocks=0,
                flops=13e9 * (prefill + decodes),
                bytes=13.5e9 + 5e5 * 64 * (prefill + decodes),
                decode_floor=step_time(0, decodes) if decodes else None,
                scheduling_time=2e-5,
                num_decodes=decodes,
            )
        )
        now = end
        for i, _ in batch:
            record = records[i]
            if computed[i] >= prompts[i]:
                record.token_times.append(now)
                if len(record.token_times) == output_tokens:
                    record.finish_reason, record.finish_time = "length", now
                    trace.events.append(LifecycleEvent(record.request_id, step + 1, now, "finish"))
    return trace


def big_trace(num_requests: int = 300, num_spans: int = 100_000) -> Trace:
    """Very many spans: each request decodes in every other step, so no two steps join."""
    trace = Trace(
        meta={"clock": "simulated", "policy": "decode-first", "order": "fcfs", "model": "big"}
    )
    per_request = num_spans // num_requests
    num_steps = 2 * per_request
    row = StepRecord(0.0, 0.0, 0, 0, 1024, 100, 700, 0, 1e12, 1e10, 0.04, 1e-5, 0)
    half = num_requests // 2
    for step in range(num_steps):
        prefill = 512 * (step % 3 == 0)
        trace.steps.append(
            row._replace(
                start=step * 0.03,
                end=(step + 1) * 0.03,
                prefill_tokens=prefill,
                decode_tokens=half,
                num_decodes=half,
            )
        )
    for i in range(num_requests):
        record = RequestRecord(f"request-{i}", 0.0, 512, per_request)
        name = record.request_id
        trace.requests[name] = record
        trace.events.append(LifecycleEvent(name, 0, 0.0, "arrive"))
        trace.events.append(LifecycleEvent(name, 0, 0.0, "admit"))
        trace.spans.append(Span(name, 0, 0, "prefill", 0, 512))
        record.token_times.append(0.03)
        for run in range(1, per_request):
            step = 2 * run - i % 2
            trace.spans.append(Span(name, step, step, "decode", 511 + run, 1))
            record.token_times.append((step + 1) * 0.03)
        record.finish_reason, record.finish_time = "length", record.token_times[-1]
        trace.events.append(LifecycleEvent(name, num_steps, record.token_times[-1], "finish"))
    return trace
