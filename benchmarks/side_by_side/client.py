"""The parent's end of a worker process: start it, ask for runs, end it.

Whatever goes wrong there (it cannot be started, it dies, it takes too long) is one `WorkerError`
of one line, so that the other engines can go on.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.adapters.options import Options
from benchmarks.side_by_side.engines import environment
from benchmarks.side_by_side.workloads import Case
from minichunk.core.trace import Trace

TIMEOUT = 900.0  # seconds for one answer; compiling takes minutes on a small machine


class WorkerError(Exception):
    """An engine that cannot be measured, and why, in one line."""


class Worker:
    """One engine in a process of its own. `log` takes what its libraries print."""

    def __init__(
        self, options: Options, python: str, log: Path, cache: Path, timeout: float = TIMEOUT
    ) -> None:
        self.name, self.log, self.timeout = options.engine, log, timeout
        self.compile_seconds = 0.0
        started = time.perf_counter()
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [python, "-m", "benchmarks.side_by_side.worker", json.dumps(asdict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(options.engine, python, options.threads, cache),
                text=True,
                encoding="utf-8",
            )
        try:
            self.versions: dict[str, str] = self._answer("starting")["ready"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started  # from nothing to ready, imports too

    def run(self, case: Case, path: Path) -> Trace:
        """Serve a case; its trace is written to `path` by the worker, read and checked here."""
        task = json.dumps({"case": case.to_json(), "trace": str(path)})
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: `_answer` says so
            self.process.stdin.write(task + "\n")
            self.process.stdin.flush()
        self._answer(case.name)
        trace = Trace.load(path)
        trace.validate()
        return trace

    def close(self) -> None:
        """End the process: politely first, by closing its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone already
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _answer(self, during: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        too_late = threading.Event()

        def give_up() -> None:
            too_late.set()
            self.process.kill()

        alarm = threading.Timer(self.timeout, give_up)
        alarm.start()
        try:
            line = self.process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            if too_late.is_set():
                raise WorkerError(f"{self.name}, {during}: no answer in {self.timeout:g} s")
            status = self.process.wait()
            raise WorkerError(
                f"{self.name}, {during}: its process ended with status {status}: "
                f"{self._last_words()} (all of it: {self.log})"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}, {during}: {answer['error']} (more: {self.log})")
        self.compile_seconds = answer["compile_seconds"]
        return answer

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it printed nothing")[:300]
