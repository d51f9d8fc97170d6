"""`minichunk demo`: ten chats are decoding when a long document arrives.

Each policy serves the very same scene on the same model and on the wall clock. The document is
added when every chat has decoded a few tokens, and the chats go on beyond its prefill, so that what
it does to them is measured and not staged. `demo_report` shows what came out.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minichunk.core.engine import Engine
from minichunk.core.policies import resolve_policy
from minichunk.core.request import SamplingParams
from minichunk.core.trace import Trace

if TYPE_CHECKING:
    from minichunk.llm import LLM

DOCUMENT = "document"
BUILT_IN_TOKENS = 2200
DECODED_BEFORE = 8  # tokens that each chat has when the document arrives
DOCUMENT_OUTPUT_TOKENS = 16
QUESTIONS = (
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Tell me a story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three ideas for a rainy Sunday.",
    "Who wrote Don Quixote, and what is it about?",
    "How does a bicycle stay upright?",
    "Write a short poem about the sea.",
    "What should I see in Lisbon in one day?",
    "Explain photosynthesis to a child.",
)
FLOAT32_BYTES = 4 * 2**30  # the re-check is left out for models larger than this in float32


@dataclass(frozen=True)
class Scene:
    """Token ids of the chats' prompts and of the document, and how long the answers are.

    Greedy, and without end-of-text, so that every run does the same work.
    """

    chats: tuple[tuple[int, ...], ...]
    document: tuple[int, ...]
    chat_output_tokens: int
    document_output_tokens: int = DOCUMENT_OUTPUT_TOKENS
    decoded_before: int = DECODED_BEFORE

    @property
    def num_output_tokens(self) -> int:
        return len(self.chats) * self.chat_output_tokens + self.document_output_tokens

    def num_blocks(self, block_size: int = 16) -> int:
        """A pool in which nobody is ever preempted: this demo is about time, not about memory."""
        lengths = [len(chat) + self.chat_output_tokens for chat in self.chats]
        lengths.append(len(self.document) + self.document_output_tokens)
        return sum(-(-length // block_size) for length in lengths)


def chat_name(index: int) -> str:
    return f"chat {index + 1}"


def make_scene(
    llm: LLM, chunk_size: int, document: str | None = None, prompt_tokens: int | None = None
) -> Scene:
    """Chats that ask `QUESTIONS`, and a document: the given text, else minichunk's own policies.

    `prompt_tokens` cuts the document (None: the built-in one to `BUILT_IN_TOKENS`). Raises
    ValueError for one that the model cannot take.
    """
    if document is None:
        from minichunk.core import policies

        document = Path(policies.__file__).read_text(encoding="utf-8")
        prompt_tokens = prompt_tokens or BUILT_IN_TOKENS
    question = "Explain this in one sentence:\n\n"
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError(f"{llm.model_name} has no tokenizer, and the demo needs one")
    if prompt_tokens is not None:
        room = max(1, prompt_tokens - len(_ask(llm, question)))
        document = str(tokenizer.decode(tokenizer.encode(document)[:room]))
    token_ids = _ask(llm, question + document)
    limit = llm.config.max_model_len or 0
    if len(token_ids) + DOCUMENT_OUTPUT_TOKENS > limit:
        raise ValueError(
            f"the document has {len(token_ids)} tokens and {llm.model_name} takes {limit}, the "
            f"answer included: pass --prompt-tokens {limit - 2 * DOCUMENT_OUTPUT_TOKENS} or less"
        )
    num_chunks = -(-len(token_ids) // chunk_size)
    return Scene(
        chats=tuple(tuple(_ask(llm, question)) for question in QUESTIONS),
        document=tuple(token_ids),
        # A policy that gives prompts every other step needs two steps for each chunk.
        chat_output_tokens=DECODED_BEFORE + 2 * num_chunks + 24,
    )


def _ask(llm: LLM, text: str) -> list[int]:
    if getattr(llm.tokenizer, "chat_template", None):
        return llm.encode_chat([{"role": "user", "content": text}])
    return llm.encode(text)


def knobs_for(policy: str, chunk_size: int, num_chats: int = len(QUESTIONS)) -> dict[str, Any]:
    """A policy's engine knobs: chunks and a budget of one chunk with room for every decode.

    `continuous` takes whole prompts, so it keeps the default budget.
    """
    if resolve_policy(policy).name == "continuous":
        return {"policy": policy}
    budget = chunk_size + -(-num_chats // 16) * 16
    return {"policy": policy, "chunk_size": chunk_size, "max_num_batched_tokens": budget}


def run_name(policy: str, knobs: Mapping[str, Any]) -> str:
    return f"{policy}, chunks of {knobs['chunk_size']}" if "chunk_size" in knobs else policy


def serve(engine: Engine, scene: Scene) -> Trace:
    """Run the scene. The document arrives between two steps, once all chats are decoding."""
    greedy = SamplingParams(scene.chat_output_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(scene.chats):
        engine.add_request(prompt, greedy, request_id=chat_name(index))
    records = engine.trace.requests
    waiting = True
    while engine.has_unfinished_requests() or waiting:
        if waiting and all(len(r.token_times) >= scene.decoded_before for r in records.values()):
            answer = replace(greedy, max_tokens=scene.document_output_tokens)
            engine.add_request(scene.document, answer, request_id=DOCUMENT)
            waiting = False
        engine.step()
    return engine.trace


def measure(
    llm: LLM,
    scene: Scene,
    runs: Mapping[str, Mapping[str, Any]],
    repeats: int,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, list[Trace]]:
    """`repeats` traces per run, taken in turn (A, B, A, B, …), after one warm-up of each.

    In turn, because a machine gets hotter and busier with time, and that should hit all alike.
    """
    pool = {"num_blocks": scene.num_blocks(), "max_num_seqs": len(scene.chats) + 1}
    steps = -(-len(scene.document) // min(k.get("chunk_size", 1 << 30) for k in runs.values()))
    short = replace(scene, chat_output_tokens=scene.decoded_before + steps + 2)
    for name, knobs in runs.items():
        progress(f"warming up {name}")
        serve(llm.new_engine(**pool, **knobs), replace(short, document_output_tokens=2))
    traces: dict[str, list[Trace]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, knobs in runs.items():
            progress(f"{name}, run {repeat + 1} of {repeats}")
            trace = serve(llm.new_engine(**pool, **knobs), scene)
            trace.meta["name"] = name
            traces[name].append(trace)
    return traces


def longest_chat_gap(trace: Trace) -> float:
    """The longest time, in seconds, that a reader of a chat waited for the next token."""
    chats = (record for name, record in trace.requests.items() if name != DOCUMENT)
    return max(
        after - before
        for record in chats
        for before, after in itertools.pairwise(record.token_times)
    )


def median_run(traces: Sequence[Trace]) -> Trace:
    """The trace whose longest chat gap is the median: a real run, not an average of several."""
    gaps = [longest_chat_gap(trace) for trace in traces]
    return traces[gaps.index(statistics.median_low(gaps))]


def recheck_in_float32(
    model: str, device: str, scene: Scene, runs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Trace]:
    """A short version of the scene in float32, where chunking must not change a single token."""
    from minichunk.llm import LLM

    llm = LLM(model, device=device, dtype="float32", num_blocks=1, quiet=True)
    short = Scene(scene.chats[:3], scene.document[:200], chat_output_tokens=24, decoded_before=4)
    traces = {}
    for name, knobs in runs.items():
        chunked = {"chunk_size": 48, "max_num_batched_tokens": 64} if "chunk_size" in knobs else {}
        pool = {"num_blocks": short.num_blocks(), "max_num_seqs": 4}
        traces[name] = serve(llm.new_engine(**pool, **{**knobs, **chunked}), short)
    return traces


def command(arguments: Namespace) -> None:
    """The demo, from arguments to output files. Nothing is written before all runs are over."""
    from minichunk.commands import split_policies

    began = time.perf_counter()
    runs = {}
    for policy in split_policies(arguments.policy):
        knobs = knobs_for(policy, arguments.chunk_size)
        runs[run_name(policy, knobs)] = knobs
    document = read_document(arguments.document) if arguments.document else None
    out = Path(arguments.out)
    check_writable(out)
    if arguments.json:
        check_writable(Path(arguments.json).absolute().parent)

    from minichunk import demo_report as report  # imports torch: after the quick refusals
    from minichunk.llm import LLM

    # The pool is sized for the scene, once its prompts are known.
    llm = LLM(arguments.model, device=arguments.device, num_blocks=1)
    scene = make_scene(llm, arguments.chunk_size, document, arguments.prompt_tokens)
    report.introduce(llm, scene, runs)
    with report.progress_bar(len(runs) * (1 + arguments.repeats) + 2) as progress:
        traces = measure(llm, scene, runs, arguments.repeats, progress)
        float32 = None
        if wants_recheck(llm, runs):
            progress("re-checking a short version in float32")
            float32 = recheck_in_float32(arguments.model, arguments.device, scene, runs)
        progress("comparing")
        figures = report.summarise(llm, scene, runs, traces, float32)
    report.show(figures, traces)
    files = report.write(out, figures, traces, arguments.json)
    report.finish(out, files, time.perf_counter() - began)


def wants_recheck(llm: LLM, runs: Mapping[str, Any]) -> bool:
    """In float32 the main runs are the proof; a large model would take too long or not fit."""
    small = 4 * llm.model_config.num_parameters <= FLOAT32_BYTES
    return len(runs) > 1 and small and llm.trace.meta["dtype"] != "float32"


def read_document(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None


def check_writable(folder: Path) -> None:
    """Find out before the long work, not after it, that a folder cannot be written into."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "cannot be written into", str(folder))
