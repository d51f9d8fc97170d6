"""The process in which one engine lives: loaded once, then asked for one run at a time.

`python -m benchmarks.side_by_side.worker OPTIONS` with the interpreter of the engine's environment.
Tasks come as JSON lines on standard input, answers go as JSON lines to standard output; whatever
the libraries print goes to standard error instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import Any

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.engines import ENGINES
from benchmarks.side_by_side.workloads import Case


def main(argv: list[str]) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # also what C libraries print

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    options = Options(**json.loads(argv[0]))
    try:
        adapter = load(options)
    except Exception as error:
        answer(error=in_one_line(error))
        raise
    gc.collect()
    gc.freeze()  # as vLLM does: a collection in a run looks only at what the run made
    answer(ready=adapter.versions(), compile_seconds=compile_seconds())
    for line in sys.stdin:
        task = json.loads(line)
        try:
            gc.collect()
            trace = adapter.run(Case.from_json(task["case"]))
            trace.validate()
            trace.save(task["trace"])
            answer(done=task["trace"], compile_seconds=compile_seconds())
        except Exception as error:
            answer(error=in_one_line(error))
            raise
    return 0


def load(options: Options) -> Any:
    """The engine's adapter, with its model loaded: it has `versions()` and `run(case)`."""
    module, _, name = ENGINES[options.engine].adapter.partition(":")
    adapter = importlib.import_module(f"benchmarks.side_by_side.adapters.{module}")
    return getattr(adapter, name)(options)


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def compile_seconds() -> float:
    """What torch.compile has taken in this process so far; vLLM and minichunk both use it.

    minichunk's functions are compiled when they are first called, vLLM's model ahead of time, which
    torch books under another name.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing has been compiled
    times = dynamo.compilation_time_metrics if dynamo else {}
    names = ("_compile.compile_inner", "fullgraph_capture")
    return float(sum(sum(times.get(name, ())) for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
