"""Traces as rows and as files: round trip, damage, consistency, why() and diff_traces()."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minichunk.core import trace_io
from minichunk.core.diff import diff_traces
from minichunk.core.engine import Engine
from minichunk.core.plan import SkipReason
from minichunk.core.trace import LifecycleEvent, Trace, TraceError

from .fake_executor import drain, greedy, make_engine, random_prompt


def busy_engine(rng: random.Random, **knobs: Any) -> Engine:
    """A crowded run: preemptions, prefix hits, two tenants, a cancel and a timeout."""
    knobs = {"num_blocks": 14, "max_num_batched_tokens": 10, "order": "fair", **knobs}
    engine = make_engine(**knobs)
    common = random_prompt(rng, 8)
    for i in range(12):
        engine.add_request(
            common[: rng.choice([0, 4, 8])] + random_prompt(rng, rng.randint(1, 20)),
            greedy(rng.randint(1, 24)),
            tenant=rng.choice("AB"),
            timeout=4.0 if i == 5 else None,
            arrival_time=rng.random() * 10,
        )
    for _ in range(7):
        engine.step()
    engine.cancel("3")
    drain(engine)
    return engine


@pytest.fixture
def trace(rng: random.Random) -> Trace:
    return busy_engine(rng).trace


# Files ------------------------------------------------------------------------------------------


def test_a_saved_trace_is_the_same_when_loaded(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows_per_line in (trace_io.ROWS_PER_LINE, 3):
        monkeypatch.setattr(trace_io, "ROWS_PER_LINE", rows_per_line)
        path = trace.save(tmp_path / "run.jsonl")
        loaded = Trace.load(path)
        assert loaded == trace
        assert [type(row) for row in loaded.steps] == [type(row) for row in trace.steps]
        loaded.validate()
        assert loaded.metrics() == trace.metrics()
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["version"] == 1


def test_an_empty_trace_survives_the_round_trip(tmp_path: Path) -> None:
    assert Trace.load(Trace().save(tmp_path / "empty.jsonl")) == Trace()


def test_a_file_cut_anywhere_is_refused(trace: Trace, tmp_path: Path, rng: random.Random) -> None:
    data = trace.save(tmp_path / "whole.jsonl").read_bytes()
    cut_file = tmp_path / "cut.jsonl"
    line_ends = [i for i, byte in enumerate(data) if byte == 10]
    cuts = {*rng.sample(range(len(data) - 1), 60), *(end + 1 for end in line_ends[:-1])}
    for cut in sorted(cuts):
        cut_file.write_bytes(data[:cut])
        with pytest.raises(TraceError, match=r"empty" if cut == 0 else r"cut\.jsonl, line \d+"):
            Trace.load(cut_file)


DAMAGES: list[tuple[str, Callable[[list[str]], list[str]], str]] = [
    ("version", lambda x: [x[0].replace('"version": 1', '"version": 99'), *x[1:]], "line 1.*99"),
    ("no version", lambda x: ['{"meta": {}}', *x[1:]], "line 1.*version"),
    ("headless", lambda x: x[1:], "line 1"),
    ("garbage", lambda x: [*x[:2], "{]", *x[3:]], "line 3"),
    ("a number", lambda x: [*x[:2], "5", *x[2:]], "line 3"),
    ("a blank line", lambda x: [x[0], "", *x[1:]], "line 2"),
    ("another table", lambda x: [*x, '{"table": "tea", "columns": {}}'], "unknown table 'tea'"),
    ("no columns", lambda x: [*x, '{"table": "steps", "columns": {}}'], "line 9.*start"),
    (
        "ragged columns",
        lambda x: [x[0], x[1].replace('"arrival":[', '"arrival":[0.5,'), *x[2:]],
        "line 2.*different lengths",
    ),
    ("a picture", lambda x: ["\udcff\udcd8 JFIF"], "line 1"),
]


@pytest.mark.parametrize(("damage", "what"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_file_is_refused_with_the_line(
    trace: Trace, tmp_path: Path, damage: Callable[[list[str]], list[str]], what: str
) -> None:
    lines = trace.save(tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8
    path = tmp_path / "damaged.jsonl"
    text = "\n".join(damage(lines)) + "\n"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(TraceError, match=what):
        Trace.load(path)


def test_a_file_without_row_counts_is_read_too(trace: Trace, tmp_path: Path) -> None:
    lines = trace.save(tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    del header["rows"]
    path = tmp_path / "adapter.jsonl"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]), encoding="utf-8")
    assert Trace.load(path) == trace


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace.save(tmp_path / "run.jsonl")
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trace_io.os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            Trace().save(path)
    trace.spans[0].tokens = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not JSON serializable"):
        trace.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("value", ["1e400", "[" * 100_000])
def test_numbers_and_nesting_beyond_bounds_are_refused_with_the_line(
    tmp_path: Path, value: str
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(f'{{"version": 1, "meta": {{}}, "rows": {{"steps": {value}', encoding="utf-8")
    if value == "1e400":
        path.write_text(path.read_text() + "}}", encoding="utf-8")
    with pytest.raises(TraceError, match="line 1: not a line of a trace"):
        Trace.load(path)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes as on POSIX")
def test_saving_follows_links_and_never_replaces_a_pipe_or_device(
    trace: Trace, tmp_path: Path
) -> None:
    real, link, pipe = tmp_path / "real.jsonl", tmp_path / "link.jsonl", tmp_path / "pipe"
    real.touch()
    link.symlink_to(real)
    trace.save(link)
    assert link.is_symlink()
    assert Trace.load(real) == trace
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        Trace().save(pipe)
        assert pipe.is_fifo()
        assert os.read(reader, 100_000).startswith(b'{"version"')
    finally:
        os.close(reader)


def test_a_missing_file_or_folder_is_an_os_error(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nothing.jsonl")
    with pytest.raises(FileNotFoundError):
        trace.save(tmp_path / "nowhere" / "run.jsonl")


# Consistency ------------------------------------------------------------------------------------


def change_step(trace: Trace, **fields: Any) -> None:
    trace.steps[2] = trace.steps[2]._replace(**fields)


def drop(rows: list[Any], kind: str) -> None:
    del rows[next(i for i, row in enumerate(rows) if row.kind == kind)]


def late_token(trace: Trace) -> list[float]:
    return next(r.token_times for r in trace.requests.values() if len(r.token_times) > 1)


CONTRADICTIONS: list[tuple[str, Callable[[Trace], Any], str]] = [
    ("time backwards", lambda t: change_step(t, end=-1.0), "before it starts"),
    ("overlap", lambda t: change_step(t, start=-1.0), "before the last ended"),
    ("tokens", lambda t: change_step(t, prefill_tokens=0), "step 2 has 0 prefill"),
    ("budget", lambda t: [change_step(t, budget=0), t.steps[2].decode_tokens], "budget of 0"),
    ("blocks", lambda t: change_step(t, free_blocks=99), "free and"),
    ("used", lambda t: change_step(t, used_blocks=1, free_blocks=11), "used blocks, its events"),
    ("lost span", lambda t: t.spans.pop(0), "step 0 has|its spans have"),
    ("stranger", lambda t: setattr(t.spans[0], "request_id", "x"), "not in the trace"),
    ("beyond", lambda t: setattr(t.spans[-1], "last_step", 9999), "covers steps"),
    ("moved", lambda t: setattr(t.spans[1], "first_position", 50), "computes position 50"),
    ("never admitted", lambda t: drop(t.events, "admit"), "but it was not running"),
    ("never resumed", lambda t: drop(t.events, "resume"), "but it was not running"),
    ("free twice", lambda t: t.block_events.append(t.block_events[-1]), "does not hold|events"),
    ("never freed", lambda t: drop(t.block_events, "free"), "held already|its events"),
    ("times", lambda t: late_token(t).reverse(), "go backwards"),
    ("early", lambda t: setattr(t.requests["0"], "arrival", 999.0), "before it arrived"),
    ("too many", lambda t: setattr(t.requests["0"], "max_tokens", 0), "max_tokens=0"),
    ("ids", lambda t: t.requests["0"].output_token_ids.append(5), "tokens and"),  # type: ignore[union-attr]
    ("event", lambda t: t.events.append(LifecycleEvent("x", 0, 0.0, "admit")), "unknown request"),
]


@pytest.mark.parametrize(
    ("contradict", "what"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS]
)
def test_validate_finds_a_contradiction(contradict: Callable[[Trace], Any], what: str) -> None:
    trace = busy_engine(random.Random(5), num_blocks=12).trace
    assert {"preempt", "resume", "cancel", "timeout"} <= {event.kind for event in trace.events}
    trace.validate()
    assert trace.steps[2].decode_tokens
    contradict(trace)
    with pytest.raises(TraceError, match=what):
        trace.validate()


def test_consecutive_steps_of_one_kind_are_one_row(rng: random.Random) -> None:
    engine = make_engine(max_num_seqs=1)
    for _ in range(2):
        engine.add_request(random_prompt(rng, 4), greedy(20))
    drain(engine)
    trace = engine.trace
    rows = [(s.request_id, s.kind, s.first_step, s.last_step, s.tokens) for s in trace.spans]
    assert rows == [
        ("0", "prefill", 0, 0, 4),
        ("0", "decode", 1, 19, 19),
        ("1", "prefill", 20, 20, 4),
        ("1", "decode", 21, 39, 19),
    ]
    assert [(s.request_id, s.reason, s.first_step, s.last_step) for s in trace.skips] == [
        ("1", "slots", 0, 19)
    ]


def test_recomputed_tokens_count_each_position_above_the_first_time(rng: random.Random) -> None:
    for prefix_caching in (True, False):
        engine = make_engine(num_blocks=8, prefix_caching=prefix_caching)
        for _ in range(2):
            engine.add_request(random_prompt(rng, 6), greedy(18))
        drain(engine)
        computed = sum(span.tokens for span in engine.trace.spans)
        needed = 2 * (6 + 17)  # the last token of each is never computed
        assert engine.trace.metrics().recomputed_tokens == computed - needed > 0


# Why --------------------------------------------------------------------------------------------


def reasons(engine: Engine, rid: str) -> list[Any]:
    return [engine.trace.why(rid, step).reason for step in range(len(engine.trace.steps))]


def test_why_names_each_reason(rng: random.Random) -> None:
    budget = make_engine(max_num_batched_tokens=4)
    for _ in range(3):
        budget.add_request(random_prompt(rng, 4), greedy(1))
    drain(budget)
    assert reasons(budget, "1") == [SkipReason.BUDGET, None, None]
    assert reasons(budget, "2") == [SkipReason.BEHIND, SkipReason.BUDGET, None]

    blocks = make_engine(num_blocks=3)
    for _ in range(2):
        blocks.add_request(random_prompt(rng, 8), greedy(2))
    drain(blocks)
    assert reasons(blocks, "1") == [SkipReason.BLOCKS, SkipReason.BLOCKS, None, None]

    whole = make_engine(policy="continuous", max_num_batched_tokens=8)
    for _ in range(2):
        whole.add_request(random_prompt(rng, 6), greedy(2))
    drain(whole)
    assert reasons(whole, "1")[0] == SkipReason.WHOLE
    assert reasons(whole, "0")[1] == SkipReason.POLICY  # decodes wait while prompts run


def test_why_tells_who_was_not_there(rng: random.Random) -> None:
    engine = make_engine()
    engine.add_request(random_prompt(rng, 4), greedy(6))
    engine.add_request(random_prompt(rng, 4), greedy(2), arrival_time=2.5)
    drain(engine)
    assert "had not arrived" in str(engine.trace.why("1", 0))
    assert "had ended before (length)" in str(engine.trace.why("1", 5))
    assert engine.trace.why("1", 3).scheduled_tokens == 4
    assert "computed a chunk of 4, positions 0 to 3" in str(engine.trace.why(1, 3))
    assert "decoded one token" in str(engine.trace.why("0", 2))


@pytest.mark.parametrize(("rid", "step"), [("nobody", 0), ("0", 99), ("0", -1)])
def test_why_refuses_the_unknown(trace: Trace, rid: str, step: int) -> None:
    with pytest.raises(ValueError, match=r"no request 'nobody'|is not among the"):
        trace.why(rid, 10**6 if step == 99 else step)


# Diff -------------------------------------------------------------------------------------------


def run(policy: str, order: str = "fcfs", **knobs: Any) -> Trace:
    rng = random.Random(3)
    engine = make_engine(policy=policy, order=order, max_num_batched_tokens=12, **knobs)
    for rid, length, arrival in (("chat", 4, 0.0), ("document", 30, 2.0)):
        engine.add_request(
            random_prompt(rng, length), greedy(8), request_id=rid, arrival_time=arrival
        )
    drain(engine)
    return engine.trace


def test_equal_runs_do_not_differ() -> None:
    assert diff_traces(run("decode-first"), run("decode-first")) is None
    assert diff_traces(run("decode-first"), run("decode-first", order="priority")) is None


def test_the_first_difference_is_found_with_its_reason() -> None:
    difference = diff_traces(run("decode-first"), run("prefill-first"))
    assert difference is not None
    assert difference.step == 2  # the document is there, and both decide differently at once
    assert difference.only_first == {"chat": ("decode", 5, 1), "document": ("prefill", 0, 11)}
    assert difference.only_second == {"document": ("prefill", 0, 12)}
    text = str(difference)
    assert "first differ in step 2" in text
    assert "prefill-first × fcfs: step 2, request chat: the token budget of the step" in text
    assert "request document: 11 tokens (decode-first × fcfs) against 12" in text


def test_runs_of_one_configuration_are_told_apart_and_may_end_early() -> None:
    whole = run("decode-first")
    kept = [span for span in whole.spans if span.first_step < 4]
    short = replace(whole, steps=whole.steps[:4], spans=kept)
    for span in short.spans:
        span.last_step = min(span.last_step, 3)
    difference = diff_traces(run("decode-first"), short)
    assert difference is not None
    assert difference.names == ("decode-first × fcfs (first)", "decode-first × fcfs (second)")
    assert "the run ended after 4 steps" in str(difference)
    assert difference.step == 4


def test_a_trace_shows_itself_in_one_short_line() -> None:
    trace = Trace(meta={"policy": "static", "clock": "simulated"})
    assert repr(trace) == "<Trace of 0 requests, 0 steps: static, simulated clock>"
