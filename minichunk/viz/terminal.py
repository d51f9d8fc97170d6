"""The timeline in a terminal: the stall seen without a browser, as `minichunk demo` prints it.

One line per request, one character per slice of time, and a bar of tokens per step below. Every
kind of work has a character of its own, so that the picture needs no colour and copies as text.
"""

from __future__ import annotations

import os
import sys
import textwrap
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from minichunk.core.stalls import find_stalls, gaps
from minichunk.core.trace import Trace
from minichunk.viz.columns import Traces, as_named, duration, headline, policy_line

UNICODE = {"queued": "·", "decode": "▄", "prefill": "█", "interference": "▒", "stall": "╳",
           "preempted": "~", "idle": " "}  # fmt: skip
ASCII = {"queued": ".", "decode": "-", "prefill": "#", "interference": "+", "stall": "X",
         "preempted": "~", "idle": " "}  # fmt: skip
# In one slice of time the rarer, worse thing is shown: a short stall must not vanish.
RANK = ("idle", "queued", "decode", "interference", "preempted", "prefill", "stall")
COLOURS = {"queued": "90", "decode": "32", "prefill": "34", "interference": "33", "stall": "1;31",
           "preempted": "35"}  # fmt: skip
BARS_UNICODE, BARS_ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
MAX_NAME = 16


@dataclass(frozen=True)
class _Style:
    width: int
    characters: Mapping[str, str]
    bars: str
    colour: bool


def render(
    traces: Traces,
    width: int = 80,
    *,
    ascii: bool = False,
    colour: bool = False,
    max_lanes: int = 24,
) -> str:
    """The timeline as text, no line wider than `width` columns (at least 40).

    Several traces share one time axis. `ascii` avoids every character beyond ASCII, `colour` adds
    ANSI colours. Beyond `max_lanes` requests, those that stall longest are shown.
    """
    if width < 40:
        raise ValueError(f"width={width} is too narrow for a timeline: give it at least 40 columns")
    named = as_named(traces)
    characters = ASCII if ascii else UNICODE
    style = _Style(width, characters, BARS_ASCII if ascii else BARS_UNICODE, colour)
    start = min((_start(trace) for trace in named.values()), default=0.0)
    end = max((_end(trace) for trace in named.values()), default=start)
    label = min(
        MAX_NAME,
        max(
            [6]
            + [_columns(request_id) for trace in named.values() for request_id in trace.requests]
        ),
    )
    lines: list[str] = []
    for name, trace in named.items():
        lines += _pane(name, trace, start, end, label, max_lanes, style)
    lines.append(_axis(start, end, label, style))
    lines += _legend(style)
    text = "\n".join(lines)
    if ascii:
        text = text.translate({ord("·"): "|", ord("×"): "x", ord("µ"): "u"})
        text = text.encode("ascii", "replace").decode()
    return text


def terminal_supports_unicode() -> bool:
    """Whether standard output can print the picture; else use `ascii=True`."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "".join(UNICODE.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return os.environ.get("TERM") != "dumb"


def _start(trace: Trace) -> float:
    return min(
        [record.arrival for record in trace.requests.values()]
        + [step.start for step in trace.steps[:1]],
        default=0.0,
    )


def _end(trace: Trace) -> float:
    return trace.steps[-1].end if trace.steps else _start(trace)


def _pane(
    name: str, trace: Trace, start: float, end: float, label: int, max_lanes: int, style: _Style
) -> list[str]:
    stalls = find_stalls(trace)
    lines = [
        _cut(f"{name}: {headline(trace.meta)}", style.width),
        _cut(f"  {policy_line(trace.meta)}", style.width),
        *textwrap.wrap(
            _cut(stall_line(trace), 10 * style.width),
            style.width,
            initial_indent="  ",
            subsequent_indent="  ",
        ),
    ]
    worst: dict[str, float] = dict.fromkeys(trace.requests, 0.0)
    for stall in stalls:
        worst[stall.request_id] = max(worst[stall.request_id], stall.gap)
    shown = set(sorted(worst, key=lambda request_id: -worst[request_id])[:max_lanes])
    lanes = _lanes(trace, start, end, style.width - label - 1)
    for request_id, lane in lanes.items():
        if request_id in shown:
            padded = _pad(_cut(request_id, label), label)
            lines.append(f"{padded} {_paint(lane, style)}".rstrip())
    if len(lanes) > len(shown):
        lines.append(_cut(f"  and {len(lanes) - len(shown)} more requests", style.width))
    lines.append(_budget(trace, start, end, label, style).rstrip())
    lines.append("")
    return lines


def stall_line(trace: Trace) -> str:
    """How many stalls, and the longest in words."""
    stalls = find_stalls(trace)
    if not stalls:
        itl = trace.metrics().itl.max
        return "no stalls" + (f"; longest gap {duration(itl)}" if itl else "")
    longest = max(stalls, key=lambda stall: stall.gap)
    count = f"{len(stalls)} stall{'s' if len(stalls) > 1 else ''}"
    return f"{count}; the longest: {longest.describe()}"


def _lanes(trace: Trace, start: float, end: float, width: int) -> dict[str, list[int]]:
    """For each request, the rank of what is shown in each slice of time."""
    scale = width / max(end - start, 1e-12)
    lanes = {request_id: [0] * width for request_id in trace.requests}

    def mark(request_id: str, kind: str, begin: float, stop: float) -> None:
        rank, lane = RANK.index(kind), lanes[request_id]
        first = min(width - 1, max(0, int((begin - start) * scale)))
        last = min(width, max(first + 1, round((stop - start) * scale)))
        for i in range(first, last):
            lane[i] = max(lane[i], rank)

    waiting = {r.request_id: ("queued", r.arrival) for r in trace.requests.values()}
    for event in trace.events:
        if event.kind == "preempt":
            waiting[event.request_id] = ("preempted", event.time)
        elif event.kind != "arrive" and event.request_id in waiting:
            kind, since = waiting.pop(event.request_id)
            if event.time > since:
                mark(event.request_id, kind, since, event.time)
    for request_id, (kind, since) in waiting.items():
        if end > since:
            mark(request_id, kind, since, end)
    for span in trace.spans:
        mark(
            span.request_id, span.kind,
            trace.steps[span.first_step].start, trace.steps[span.last_step].end,
        )  # fmt: skip
    for gap in gaps(trace):
        if gap.floor is not None and gap.interference > 0.25 * gap.floor:
            mark(gap.request_id, "interference", gap.start, gap.end - gap.floor)
    for stall in find_stalls(trace):
        mark(stall.request_id, "stall", stall.start, stall.end - (stall.floor or 0.0))
    for stall in find_stalls(trace):
        # The token that ends a stall stays visible, or eight short ones would look like a long one.
        first, last = (int((t - start) * scale) for t in (stall.start, stall.end))
        if last - first >= 2:
            lanes[stall.request_id][min(width, last) - 1] = RANK.index("decode")
    return lanes


def _paint(lane: list[int], style: _Style) -> str:
    if not style.colour:
        return "".join(style.characters[RANK[rank]] for rank in lane)
    parts = []
    for i, rank in enumerate(lane):
        kind = RANK[rank]
        if i == 0 or lane[i - 1] != rank:
            parts.append(f"\x1b[0;{COLOURS.get(kind, '0')}m")
        parts.append(style.characters[kind])
    return "".join(parts) + "\x1b[0m"


def _budget(trace: Trace, start: float, end: float, label: int, style: _Style) -> str:
    """Tokens per step against the fullest step or the budget, whichever is more."""
    width = style.width - label - 1
    most = max((max(s.budget, s.prefill_tokens + s.decode_tokens) for s in trace.steps), default=1)
    scale = width / max(end - start, 1e-12)
    cells = [0] * width
    levels = len(style.bars) - 1
    for step in trace.steps:
        tokens = step.prefill_tokens + step.decode_tokens
        level = max(1, round(levels * tokens / most)) if tokens else 0
        first = min(width - 1, max(0, int((step.start - start) * scale)))
        for i in range(first, min(width, max(first + 1, round((step.end - start) * scale)))):
            cells[i] = max(cells[i], level)
    return f"{_pad('tokens', label)} {''.join(style.bars[level] for level in cells)}"


def _axis(start: float, end: float, label: int, style: _Style) -> str:
    width = style.width - label - 1
    length = end - start
    if start > length:  # begins so late that the three times would read alike: told from there
        middle, right = f"+{duration(length / 2)}", f"+{duration(length)}"
    else:
        middle, right = duration(start + length / 2), duration(end)
    left = duration(start)
    gap = max(1, (width - len(left) - len(middle) - len(right)) // 2)
    text = f"{left}{' ' * gap}{middle}"
    return " " * (label + 1) + text + right.rjust(max(1, width - len(text)))


def _legend(style: _Style) -> list[str]:
    entries = [
        f"{style.characters[kind]} {kind}"
        for kind in ("prefill", "decode", "interference", "stall", "queued", "preempted")
    ]
    lines = [""]
    for entry in entries:
        joined = f"{lines[-1]}   {entry}" if lines[-1] else entry
        if len(joined) > style.width:
            lines.append(entry)
        else:
            lines[-1] = joined
    return lines


def _columns(text: str) -> int:
    """Terminal columns: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _pad(text: str, width: int) -> str:
    return " " * max(0, width - _columns(text)) + text


def _cut(text: str, width: int) -> str:
    """At most `width` columns; control characters, which could move the cursor, become spaces."""
    text = "".join(" " if unicodedata.category(c).startswith("C") else c for c in text)
    if _columns(text) <= width:
        return text
    while text and _columns(text) > width - 3:
        text = text[:-1]
    return text + "..."
