"""What `minichunk demo` shows: one table, a timeline, whether tokens are the same, and files.

Everything is computed from the traces. Where two runs differ in bfloat16 it is said where, and how
close the two candidates were, because "the tokens differ" alone would teach the wrong lesson.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from minichunk.commands import file_name
from minichunk.compare import Comparison
from minichunk.console import milliseconds, side_by_side
from minichunk.core.metrics import Spread
from minichunk.core.stalls import STALL_FACTOR, STALL_SLO
from minichunk.core.trace import Trace
from minichunk.core.trace_io import write_whole
from minichunk.demo import DOCUMENT, Scene, longest_chat_gap, median_run

if TYPE_CHECKING:
    from minichunk.llm import LLM

MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}


def introduce(llm: LLM, scene: Scene, runs: Mapping[str, Mapping[str, Any]]) -> None:
    meta = llm.trace.meta
    say(
        f"{meta['model']} ({meta['dtype']}, {meta['backend']} backend) on {meta['device']}: "
        f"{len(scene.chats)} chats are decoding when a document of {len(scene.document):,} tokens "
        f"arrives; under {' and under '.join(runs)}."
    )


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error: a bar in a terminal, plain lines in a log.

    Drawn between runs only, because it must not disturb what it shows.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: print(what, file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)
        steps = itertools.count()

        def show(what: str) -> None:
            progress.update(task, description=what, completed=next(steps), refresh=True)

        yield show


def summarise(
    llm: LLM,
    scene: Scene,
    runs: Mapping[str, Mapping[str, Any]],
    traces: Mapping[str, Sequence[Trace]],
    float32: Mapping[str, Trace] | None,
) -> dict[str, Any]:
    """All figures of the demo, ready for JSON. Times in seconds."""
    shown = {name: median_run(repeats) for name, repeats in traces.items()}
    meta = llm.trace.meta
    gaps = {name: longest_chat_gap(trace) for name, trace in shown.items()}
    first, *others = gaps
    return {
        "model": {
            key: meta[key] for key in ("model", "model_origin", "device", "dtype", "backend")
        },
        "scene": {
            "chats": len(scene.chats),
            "chat_prompt_tokens": [len(chat) for chat in scene.chats],
            "chat_output_tokens": scene.chat_output_tokens,
            "document_tokens": len(scene.document),
            "document_output_tokens": scene.document_output_tokens,
            "decoded_before_arrival": scene.decoded_before,
        },
        "runs": {
            name: {
                "knobs": dict(runs[name]),
                **run_figures(trace),
                "longest_chat_gaps": [longest_chat_gap(repeat) for repeat in traces[name]],
            }
            for name, trace in shown.items()
        },
        "longest_gap_ratios": {name: gaps[first] / gaps[name] for name in others},
        "tokens": compare_tokens(llm, scene, shown),
        "float32": None if float32 is None else recheck_figures(float32),
    }


def run_figures(trace: Trace) -> dict[str, Any]:
    """One run. Gaps are those of the chats alone; the stall is the longest that a chat had."""
    metrics = trace.metrics()
    chats = {name: figures for name, figures in metrics.requests.items() if name != DOCUMENT}
    itl = Spread.of(gap for figures in chats.values() for gap in figures.itl)
    stalls = [stall for stall in trace.stalls() if stall.request_id != DOCUMENT]
    longest = max(stalls, key=lambda stall: stall.gap, default=None)
    first_token = trace.requests[DOCUMENT].token_times[0]
    return {
        "document_ttft": metrics.requests[DOCUMENT].ttft,
        "chat_itl": {"p50": itl.p50, "p99": itl.p99, "max": itl.max},
        "stalls": len(stalls),
        "longest_stall": longest.gap if longest else None,
        "longest_stall_cause": longest.describe() if longest else "no stall",
        "tokens_per_second": metrics.throughput,
        "steps": metrics.num_steps,
        "seconds": metrics.duration,
        "chats_outlive_the_prefill": all(
            trace.requests[name].token_times[-1] > first_token for name in chats
        ),
    }


# The tokens --------------------------------------------------------------------------------------


def compare_tokens(llm: LLM, scene: Scene, traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Whether each run gave the first run's tokens, and where and by how little it did not."""
    first, *others = traces
    result: dict[str, Any] = {"requests": len(scene.chats) + 1, "outputs": scene.num_output_tokens}
    for other in others:
        same = Comparison({first: traces[first], other: traces[other]}).same_tokens
        differing = {name: place for name, place in same.items() if place is not None}
        result[other] = {
            "same_requests": len(same) - len(differing),
            "first_difference": explain(llm, scene, traces[first], traces[other], differing),
        }
    return result


def explain(
    llm: LLM, scene: Scene, a: Trace, b: Trace, differing: Mapping[str, int]
) -> dict[str, Any] | None:
    """The earliest difference: both tokens, their logits, and what the dtype can resolve there."""
    if not differing:
        return None
    name, place = min(differing.items(), key=lambda item: item[1])
    one, two = a.requests[name].output_token_ids, b.requests[name].output_token_ids
    if one is None or two is None or place >= min(len(one), len(two)):
        return {"request": name, "position": place}
    prompt = scene.document if name == DOCUMENT else scene.chats[int(name.split()[1]) - 1]
    gap = llm.logit_gap([*prompt, *one[:place]], one[place], two[place])
    decode = llm.tokenizer.decode if llm.tokenizer else str
    return {
        "request": name,
        "position": place,
        "token_ids": [one[place], two[place]],
        "tokens": [decode([one[place]]), decode([two[place]])],
        "logits": [gap.logit_a, gap.logit_b],
        "gap": gap.gap,
        "spacing": spacing_at(max(abs(gap.logit_a), abs(gap.logit_b)), llm.trace.meta["dtype"]),
    }


def spacing_at(value: float, dtype: str) -> float:
    """The distance between neighbouring numbers of a dtype near `value` (which is not 0)."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - MANTISSA_BITS[dtype])


def recheck_figures(traces: Mapping[str, Trace]) -> dict[str, Any]:
    first = next(iter(traces.values()))
    same = Comparison(dict(traces)).same_tokens
    return {
        "requests": len(same),
        "outputs": sum(len(r.token_times) for r in first.requests.values()),
        "document_tokens": first.requests[DOCUMENT].prompt_tokens,
        "differences": {name: place for name, place in same.items() if place is not None},
    }


def token_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say about tokens, in whole sentences."""
    tokens, dtype = figures["tokens"], figures["model"]["dtype"]
    first = next(iter(figures["runs"]))
    for name in list(figures["runs"])[1:]:
        count, difference = tokens[name]["same_requests"], tokens[name]["first_difference"]
        pair = f"{first} and {name}"
        if difference is None:
            yield (
                f"Tokens ({dtype}): identical under {pair}, all {tokens['outputs']} of "
                f"{tokens['requests']} requests."
            )
            continue
        text = (
            f"Tokens ({dtype}): {count} of {tokens['requests']} requests are identical under "
            f"{pair}. The first to differ is {difference['request']}, at output token "
            f"{difference['position'] + 1}"
        )
        if "gap" in difference:
            text += f": {near_tie(difference, dtype)}"
        yield text + "."
    float32 = figures["float32"]
    if float32 is not None:
        what = (
            f"{float32['outputs']} tokens of {float32['requests']} requests, "
            f"a document of {float32['document_tokens']} tokens"
        )
        differences = float32["differences"]
        if not differences:
            yield f"Tokens (float32, a short version: {what}): exactly the same in every run."
        else:
            yield f"Tokens (float32, a short version: {what}): DIFFERENT in {differences}."
    elif dtype != "float32" and len(figures["runs"]) > 1:
        yield "Tokens (float32): not re-checked, the model is large."


def near_tie(difference: Mapping[str, Any], dtype: str) -> str:
    """What made two runs part, in figures: rounding can only decide between near neighbours."""
    one, two = map(repr, difference["tokens"])
    gap, spacing = abs(difference["gap"]), difference["spacing"]
    apart = f"are {gap:.3g} apart" if gap else "are equal"
    return (
        f"{one} or {two}, whose logits {apart} at {difference['logits'][0]:.3g}, where {dtype} "
        f"has one number every {spacing:.3g}; from there the two texts go their own ways"
    )


# Showing and writing -----------------------------------------------------------------------------


def table_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "run": name,
            "document: time to first token": milliseconds(run["document_ttft"]),
            "chats: gap between tokens, p50": milliseconds(run["chat_itl"]["p50"]),
            "chats: p99": milliseconds(run["chat_itl"]["p99"]),
            "chats: longest gap": milliseconds(run["chat_itl"]["max"]),
            "chats: stalls": str(run["stalls"]),
            "output tokens per second": f"{run['tokens_per_second']:.0f}",
        }
        for name, run in figures["runs"].items()
    ]


def stall_lines(figures: Mapping[str, Any]) -> list[str]:
    """What a stall is; and that more of them can be the better outcome, where that happened."""
    lines = [f"A stall is a gap above {STALL_FACTOR:g} decode steps and {STALL_SLO * 1e3:g} ms."]
    first = next(iter(figures["runs"]))
    before = figures["runs"][first]["stalls"]
    for name, ratio in figures["longest_gap_ratios"].items():
        after = figures["runs"][name]["stalls"]
        if ratio > 1 and after > before:
            lines.append(
                f"{name} has more of them ({after} against {before}), but its longest is shorter: "
                "the prompt's work is spread over more steps."
            )
    return lines


def show(figures: Mapping[str, Any], traces: Mapping[str, Sequence[Trace]]) -> None:
    """The table, the sentences and the timeline, on standard output."""
    from minichunk.viz.terminal import render, terminal_supports_unicode

    console = Console()
    console.print(side_by_side(table_rows(figures)))
    repeats = len(next(iter(traces.values())))
    if repeats > 1:
        say(f"(of {repeats} runs each, taken in turn, the one with the median longest gap)")
    for name, run in figures["runs"].items():
        say(f"{name}: {run['longest_stall_cause']}.")
        if not run["chats_outlive_the_prefill"]:
            say(f"{name}: some chats ended before the document's first token.")
    first = next(iter(figures["runs"]))
    for name, ratio in figures["longest_gap_ratios"].items():
        say(f"The longest gap is {ratio:.1f} times as long under {first} as under {name}.")
    for line in [*stall_lines(figures), *token_lines(figures)]:
        say(line)
    shown = {name: median_run(repeats) for name, repeats in traces.items()}
    width = max(40, min(console.width, 120))
    unicode = terminal_supports_unicode()
    print(render(shown, width, ascii=not unicode, colour=console.is_terminal))


def write(
    out: Path,
    figures: Mapping[str, Any],
    traces: Mapping[str, Sequence[Trace]],
    json_file: str | None,
) -> list[str]:
    """The timeline as page and picture, the traces and the figures; returns the file names."""
    from minichunk.viz.figures import timeline_figure, to_png
    from minichunk.viz.html import to_html

    shown = {name: median_run(repeats) for name, repeats in traces.items()}
    files = ["timeline.html", "timeline.png"]
    to_html(shown, out / files[0])
    write_whole(out / files[1], to_png(timeline_figure(shown)))
    for name, trace in shown.items():
        files.append(f"{file_name(name)}.jsonl")
        trace.save(out / files[-1])
    if json_file:
        write_whole(Path(json_file), json.dumps(figures, indent=2) + "\n")
    return files


def finish(out: Path, files: Sequence[str], seconds: float) -> None:
    say(f"\nIn {out}: {', '.join(files)}. Open {out / files[0]} in a browser. ({seconds:.0f} s)")


def say(line: str) -> None:
    """A line of prose, wrapped by the terminal and not by us: figures must stay greppable."""
    print(line, file=sys.stdout, flush=True)
