"""The `minichunk` command: what can be asked for, and how errors are told.

Only the parser lives here, so that `minichunk --help` answers at once; a command's own module is
imported when it runs. A mistake of the user's is one line and exit status 1, never a traceback
(set MINICHUNK_DEBUG=1 to see one).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from minichunk.console import fail, print_whatever_the_terminal_can, quieten_libraries

MODEL_HELP = "short name, folder, .gguf file or hub id (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Tells a wrong option in one line, with exit status 1."""

    def error(self, message: str) -> NoReturn:
        sys.exit(fail(f"{message} (see {self.prog} --help)"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit status."""
    print_whatever_the_terminal_can()
    arguments = build_parser().parse_args(argv)
    quieten_libraries()
    from minichunk.core.policies import PolicyError
    from minichunk.model.errors import ModelError

    try:
        module, function = arguments.run.split(":")
        getattr(importlib.import_module(module), function)(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return 0
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the same, met by a rich console
            return 0
        raise
    except (ValueError, OSError, ModelError, PolicyError) as error:
        if os.environ.get("MINICHUNK_DEBUG"):
            raise
        return fail(error)


def build_parser() -> Parser:
    parser = Parser(
        prog="minichunk",
        description="A small LLM inference engine to learn scheduling from: see a long prompt "
        "stall everybody's stream of tokens, and chunked prefill prevent it.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _demo(commands)
    _generate(commands)
    _simulate(commands)
    _timeline(commands)
    _export(commands)
    _bench(commands)
    _lab(commands)
    return parser


def _demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="show the stall and its cure on a real model",
        description="Ten chats are decoding when a document of about 2,000 tokens arrives. Each "
        "policy serves the same scene on the same model; one table and one timeline compare them.",
    )
    demo.add_argument("--model", default="smollm2-135m", help=MODEL_HELP)
    demo.add_argument("--device", default="auto", help="cpu, cuda, mps, … (default: %(default)s)")
    demo.add_argument(
        "--policy",
        default="continuous,decode-first",
        metavar="A,B",
        help="policies to compare (default: %(default)s)",
    )
    demo.add_argument(
        "--chunk-size",
        type=positive,
        default=256,
        metavar="N",
        help="most prompt tokens of a request in one step; the step's budget is this plus room "
        "for the decodes (default: %(default)s). `continuous` takes whole prompts anyway",
    )
    demo.add_argument("--document", metavar="FILE", help="the long prompt: a text file of yours")
    demo.add_argument(
        "--prompt-tokens",
        type=positive,
        metavar="N",
        help="cut the document to N tokens (default: 2200 of the built-in one, all of yours)",
    )
    demo.add_argument(
        "--repeats",
        type=positive,
        default=3,
        metavar="N",
        help="measured runs of each policy, in turn; the median is shown (default: %(default)s)",
    )
    demo.add_argument(
        "--out", default="minichunk-demo", metavar="DIR", help="output folder (%(default)s)"
    )
    demo.add_argument("--json", metavar="FILE", help="write all figures into this file, too")
    demo.set_defaults(run="minichunk.demo:command")


def _generate(commands: argparse._SubParsersAction) -> None:
    generate = commands.add_parser("generate", help="stream an answer to a prompt")
    generate.add_argument("prompt", help="the prompt, or - to read it from standard input")
    generate.add_argument("--model", default="smollm2-135m", help=MODEL_HELP)
    generate.add_argument("--device", default="auto", help="cpu, cuda, … (default: %(default)s)")
    generate.add_argument("--dtype", default="auto", help="float32, bfloat16, … (%(default)s)")
    generate.add_argument(
        "--max-tokens", type=positive, default=200, metavar="N", help="(default: %(default)s)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="sample from the N likeliest (0: all)"
    )
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="from the likeliest that add up to this (1: all)"
    )
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="from those at least this times the likeliest"
    )
    generate.add_argument("--seed", type=int, help="the same seed, the same samples")
    generate.add_argument("--stop", action="append", default=[], help="a text to stop at")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt, without the chat template"
    )
    generate.set_defaults(run="minichunk.commands:generate")


def _simulate(commands: argparse._SubParsersAction) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="serve a workload on a modelled GPU",
        description="The same scheduler and step loop on a virtual clock.",
    )
    simulate.add_argument("--model", default="llama-2-7b", help="model shape (%(default)s)")
    simulate.add_argument("--gpu", default="a100-80g-sxm", help="GPU (default: %(default)s)")
    simulate.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs (%(default)s)"
    )
    simulate.add_argument(
        "--policy",
        default="continuous,decode-first",
        metavar="A,B",
        help="policies to compare (default: %(default)s)",
    )
    simulate.add_argument(
        "--workload",
        default="scene",
        help="scene, poisson, bursty or closed-loop, with arguments as in "
        "'poisson(rate=2, num_requests=100, prompt=(1730, 5696))' where a pair is (median, P90); "
        "or a file of a published trace as azure:FILE, sharegpt:FILE, mooncake:FILE "
        "(default: %(default)s)",
    )
    simulate.add_argument("--limit", type=positive, metavar="N", help="the file's first N requests")
    simulate.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    simulate.add_argument(
        "--trace", metavar="FILE", help="write the trace; several policies: FILE-POLICY.jsonl"
    )
    add_engine_options(simulate)
    simulate.set_defaults(run="minichunk.commands:simulate")


def _timeline(commands: argparse._SubParsersAction) -> None:
    timeline = commands.add_parser("timeline", help="turn saved traces into a page")
    timeline.add_argument("traces", nargs="+", metavar="run.jsonl", help="one pane for each")
    timeline.add_argument("-o", "--output", metavar="page.html", help="(default: run.html)")
    timeline.set_defaults(run="minichunk.commands:timeline")


def _export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export", help="say a configuration in another engine's flags, and what it cannot say"
    )
    export.add_argument(
        "--engine", required=True, choices=("vllm", "sglang", "tensorrt-llm", "deepspeed")
    )
    export.add_argument("--model", default="MODEL", help="put in as it is (%(default)s)")
    export.add_argument("--policy", help="(default: decode-first)", default=argparse.SUPPRESS)
    add_engine_options(export)
    export.set_defaults(run="minichunk.commands:export")


def _bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure minichunk beside other engines (in a checkout)",
        description="The same requests to several engines on this machine's CPU, in turn, each in "
        "a process of its own: one table, one timeline per stall scene. vLLM needs an environment "
        "of its own, which `python -m benchmarks.side_by_side.make_vllm_environment DIR` makes.",
    )
    bench.add_argument(
        "--engines",
        default="minichunk,transformers,vllm",
        metavar="A,B",
        help="any of minichunk, minichunk-compiled, transformers (generate), transformers-cb "
        "(continuous batching), vllm, vllm-compiled (default: %(default)s)",
    )
    bench.add_argument(
        "--compiled", action="store_true", help="add the compiled modes of the engines named"
    )
    bench.add_argument(
        "--workloads",
        default="W1,W2,W3,W4,W5",
        metavar="A,B",
        help="W1 decodes, W2 a batch with prompts, W3 one long prompt, W4 the stall scene at "
        "budgets 256, 512 and 4096 (W4-256 for one), W5 random arrivals (default: %(default)s)",
    )
    bench.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="rounds (default: %(default)s)"
    )
    bench.add_argument("--model", default="smollm2-135m", help=MODEL_HELP)
    bench.add_argument("--dtype", default="bfloat16", help="of every engine (%(default)s)")
    bench.add_argument(
        "--threads", type=positive, metavar="N", help="of every engine (default: all cores)"
    )
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    bench.add_argument(
        "--vllm-python",
        metavar="PATH",
        help="the interpreter of vLLM's environment (default: $MINICHUNK_VLLM_PYTHON)",
    )
    bench.add_argument(
        "--out", default="minichunk-bench", metavar="DIR", help="output folder (%(default)s)"
    )
    bench.add_argument("--json", metavar="FILE", help="write all figures into this file, too")
    bench.set_defaults(run="minichunk.commands:bench")


def _lab(commands: argparse._SubParsersAction) -> None:
    lab = commands.add_parser("lab", help="copy the notebooks here and open JupyterLab")
    lab.add_argument("--to", default="minichunk-lab", metavar="DIR", help="(%(default)s)")
    lab.add_argument("--copy-only", action="store_true", help="do not open JupyterLab")
    lab.set_defaults(run="minichunk.commands:lab")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The engine's knobs. Only those given are set, so that defaults stay in one place."""
    from minichunk.core.config import EngineConfig

    group = parser.add_argument_group("engine options")

    def option(name: str, **settings: object) -> None:
        group.add_argument(name, default=argparse.SUPPRESS, **settings)  # type: ignore[arg-type]

    option("--preset", help="chat, rag, batch or multi-tenant; other options win")
    option("--order", help="fcfs, priority, fair, shortest, deadline; 'priority(ageing_seconds=9)'")
    for name, meaning in ENGINE_NUMBERS.items():
        default = getattr(EngineConfig, name[2:].replace("-", "_"))
        shown = "" if default is None else f" (default: {default})"
        option(name, type=positive, metavar="N", help=meaning + shown)
    option(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="compute each prompt anew, even if another one began alike",
    )
    option("--seed", type=int, metavar="N", help="for sampling (default: 0)")


ENGINE_NUMBERS = {
    "--max-num-batched-tokens": "the budget: most tokens in one step",
    "--chunk-size": "most prompt tokens of one request in one step (default: the budget)",
    "--max-num-seqs": "slots: most requests running at once",
    "--max-queued-requests": "refuse requests while N are waiting (default: never)",
    "--max-long-partial-prefills": "most long prompts in progress at once (default: any number)",
    "--long-prefill-threshold": "a prompt above N tokens is long; set with the option above",
    "--block-size": "tokens in one block of the KV cache",
    "--num-blocks": "blocks of the KV cache (default: what fits into memory)",
    "--max-model-len": "most tokens of prompt and answer together (default: no limit)",
}


def positive(text: str) -> int:
    """An argument that must be a whole number, at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return value


def _version() -> str:
    from minichunk import __version__

    return f"minichunk {__version__}"
