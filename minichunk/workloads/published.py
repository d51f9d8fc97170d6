"""Reads published request traces: Azure's, Mooncake's, and chat lengths as ShareGPT gives them.

A row that cannot be read is counted and named in `Workload.bad_rows`, with one warning; it does not
stop the rest. Files may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, TextIO

from minichunk.core.request import PromptShape, RequestSpec
from minichunk.workloads.workload import Workload, sample_rows


def load(path: str | os.PathLike[str], *, rate: float = 1.0, limit: int | None = None) -> Workload:
    """Read any of the three formats below, told apart by their first line. `.gz` is welcome.

    `rate` is used only for a file without arrival times.
    """
    with _open(path) as file:
        first = file.readline()
    if first.lstrip().startswith("{"):
        return load_mooncake(path, limit=limit)
    if "ContextTokens" in first:
        return load_azure(path, limit=limit)
    if "num_prefill_tokens" in first:
        return load_sharegpt_lengths(path, rate=rate, limit=limit)
    raise ValueError(
        f"{os.fspath(path)}: starts with {first.strip()[:80]!r}; expected a CSV with the columns "
        "TIMESTAMP,ContextTokens,GeneratedTokens or num_prefill_tokens,num_decode_tokens, or JSON "
        'lines with "timestamp", "input_length", "output_length", "hash_ids"'
    )


def load_azure(path: str | os.PathLike[str], *, limit: int | None = None) -> Workload:
    """The Azure LLM inference trace (Patel et al., Splitwise, ISCA 2024): arrivals and lengths.

    Columns TIMESTAMP, ContextTokens, GeneratedTokens; the first arrival becomes time 0.
    """

    def parse(row: Mapping[str, str]) -> RequestSpec:
        # Seven digits of a second are one more than datetime reads.
        stamp, _, fraction = row["TIMESTAMP"].strip().partition(".")
        fraction = fraction.partition("+")[0]
        arrival = datetime.fromisoformat(stamp).timestamp() + float(f"0.{fraction or 0}")
        return _spec(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"]))

    return _load(path, csv.DictReader, parse, limit)


def load_sharegpt_lengths(
    path: str | os.PathLike[str], *, rate: float, seed: int = 0, limit: int | None = None
) -> Workload:
    """Chat lengths as published with Sarathi-Serve (OSDI 2024), arriving as a Poisson process.

    Columns num_prefill_tokens and num_decode_tokens; others are ignored.
    """
    if not rate > 0:
        raise ValueError(f"rate={rate} must be above 0")

    def parse(row: Mapping[str, str]) -> RequestSpec:
        return _spec(0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))

    workload = _load(path, csv.DictReader, parse, limit)
    rng, arrival, requests = random.Random(f"gaps {seed}"), 0.0, []
    for spec in workload:
        arrival += rng.expovariate(rate)
        requests.append(replace(spec, arrival=arrival))
    return replace(workload, requests=tuple(requests))


def load_mooncake(
    path: str | os.PathLike[str], *, tokens_per_block: int = 512, limit: int | None = None
) -> Workload:
    """Mooncake's traces (Qin et al., FAST 2025): JSON lines with arrival in milliseconds.

    `hash_ids` name the prompt's blocks of `tokens_per_block` tokens; equal leading ids become a
    shared prefix, so the prefix cache sees what the original service saw.
    """

    def parse(line: str) -> RequestSpec:
        row = json.loads(line)
        ids = tuple(int(block) for block in row.get("hash_ids", ()))
        prompt, output = int(row["input_length"]), int(row["output_length"])
        spec = _spec(float(row["timestamp"]) / 1000.0, prompt, output)
        return replace(spec, prompt=PromptShape(prompt, ids, tokens_per_block))

    return _load(path, lambda file: (line for line in file if line.strip()), parse, limit)


def _spec(arrival: float, prompt_tokens: int, output_tokens: int) -> RequestSpec:
    if prompt_tokens < 1 or output_tokens < 1:
        raise ValueError(f"{prompt_tokens} prompt and {output_tokens} output tokens: need 1 each")
    if not math.isfinite(arrival):
        raise ValueError(f"arrival {arrival} is not a time")
    return RequestSpec(arrival, PromptShape(prompt_tokens), output_tokens)


def _load(
    path: str | os.PathLike[str],
    reader: Callable[[TextIO], Iterable[Any]],
    parse: Callable[[Any], RequestSpec],
    limit: int | None,
) -> Workload:
    """Read rows, keep the good ones in order of arrival from time 0, and name the bad ones."""
    specs: list[RequestSpec] = []
    bad_rows: list[str] = []
    with _open(path) as file:
        rows, number = iter(reader(file)), 1
        while limit is None or len(specs) < limit:
            try:
                row = next(rows, None)
                if row is None:
                    break
                specs.append(parse(row))
            except (
                ValueError,
                TypeError,
                KeyError,
                ArithmeticError,
                AttributeError,
                csv.Error,
            ) as error:
                bad_rows.append(f"row {number}: {type(error).__name__}: {error}")
            number += 1
    name = os.path.basename(os.fspath(path))
    if not specs:
        raise ValueError(
            f"{name}: no readable rows ({sample_rows(bad_rows) or 'the file is empty'})"
        )
    if bad_rows:
        warnings.warn(
            f"{name}: {len(bad_rows)} of {number - 1} rows left out ({sample_rows(bad_rows)})",
            stacklevel=3,
        )
    specs.sort(key=lambda spec: spec.arrival)
    start = specs[0].arrival
    shifted = tuple(replace(spec, arrival=spec.arrival - start) for spec in specs)
    return Workload(name, shifted, tuple(bad_rows))


def _open(path: str | os.PathLike[str]) -> TextIO:
    # utf-8-sig: some published files begin with a byte order mark, which would spoil a column name.
    opener: Callable[..., Any] = gzip.open if os.fspath(path).endswith(".gz") else open
    opened: TextIO = opener(path, "rt", encoding="utf-8-sig", errors="replace")
    return opened
