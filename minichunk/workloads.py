"""Workloads: who asks what, when, and how long the answers will be.

A workload is what the engine is driven with, on a real model and in simulation alike. Here are the
scene that chunked prefill was invented for, the arrival processes of the queueing textbook
(Poisson, bursty, closed loop, several tenants), and loaders for published request traces.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import Any, TextIO

from minichunk.core.request import PromptShape, RequestSpec

__all__ = [
    "Lengths",
    "Workload",
    "bursty",
    "closed_loop",
    "describe",
    "load",
    "load_azure",
    "load_mooncake",
    "load_sharegpt_lengths",
    "merge",
    "multi_tenant",
    "poisson",
    "stall_scene",
]

# The quantile of the standard normal distribution at 0.9: fixes a lognormal by median and P90.
_Z90 = 1.2815515655446004


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, drawn as whole numbers in [minimum, maximum].

    `Lengths(500)` is constant. `Lengths(1730, p90=5696)` is lognormal with that median and 90th
    percentile, the way papers report their data sets. `Lengths.of([…])` draws from given values.
    """

    median: float
    p90: float | None = None
    minimum: int = 1
    maximum: int | None = None
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.median < 1:
            raise ValueError(f"median={self.median} tokens must be at least 1")
        if self.p90 is not None and self.p90 < self.median:
            raise ValueError(f"p90={self.p90} must not be below median={self.median}")
        if self.minimum < 1 or (self.maximum is not None and self.maximum < self.minimum):
            raise ValueError(
                f"minimum={self.minimum} and maximum={self.maximum}: need 1 <= minimum <= maximum"
            )

    @classmethod
    def of(cls, values: Iterable[int]) -> Lengths:
        """Draw from these values, each as likely as it is frequent."""
        values = tuple(values)
        if not values:
            raise ValueError("Lengths.of needs at least one value")
        return cls(median(values), minimum=min(values), values=values)

    def draw(self, rng: random.Random) -> int:
        if self.values:
            return rng.choice(self.values)
        length = float(self.median)
        if self.p90 is not None:
            length *= math.exp(rng.gauss(0.0, math.log(self.p90 / self.median) / _Z90))
        return max(self.minimum, min(round(length), self.maximum or round(length)))


LengthsLike = int | Lengths


def _lengths(value: LengthsLike) -> Lengths:
    return value if isinstance(value, Lengths) else Lengths(value)


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. `bad_rows` names the rows that a loader could not read."""

    name: str
    requests: tuple[RequestSpec, ...]
    bad_rows: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def on_finish(self, spec: RequestSpec, now: float) -> RequestSpec | None:
        """The request that follows when `spec` has finished; None in an open loop."""
        return None

    def head(self, num_requests: int) -> Workload:
        """The first `num_requests` requests only."""
        return replace(self, requests=self.requests[:num_requests])

    def scaled(self, speed: float) -> Workload:
        """The same requests arriving `speed` times as fast."""
        if not speed > 0:
            raise ValueError(f"speed={speed} must be above 0")
        requests = tuple(replace(spec, arrival=spec.arrival / speed) for spec in self.requests)
        return replace(self, requests=requests)


@dataclass(frozen=True)
class Turn(RequestSpec):
    """A request of a closed loop: it knows whose it is and which of that user's."""

    user: int = 0
    turn: int = 0


@dataclass(frozen=True)
class ClosedLoop(Workload):
    """A fixed number of users, each of whom asks again after reading the answer.

    Holds no state: a finished `Turn` names its successor, so one object serves many runs.
    """

    turns: tuple[tuple[tuple[int, int], ...], ...] = ()  # per user: (prompt, output) lengths
    think_times: tuple[tuple[float, ...], ...] = ()

    def on_finish(self, spec: RequestSpec, now: float) -> RequestSpec | None:
        if not isinstance(spec, Turn) or spec.turn + 1 >= len(self.turns[spec.user]):
            return None
        turn = spec.turn + 1
        prompt, output = self.turns[spec.user][turn]
        return replace(
            spec,
            arrival=now + self.think_times[spec.user][turn],
            prompt=PromptShape(prompt),
            output_tokens=output,
            turn=turn,
        )


def stall_scene(
    num_decodes: int = 10,
    prompt_tokens: int = 8000,
    *,
    decode_prompt_tokens: int = 32,
    decode_output_tokens: int = 200,
    prompt_output_tokens: int = 20,
    prompt_arrival: float = 0.2,
) -> Workload:
    """The scene of this course: `num_decodes` answers are streaming when one long prompt arrives.

    The long prompt comes `prompt_arrival` seconds after the others; on slow hardware give them
    enough output tokens to be still decoding by then.
    """
    if num_decodes < 0 or prompt_tokens < 1:
        raise ValueError(
            f"num_decodes={num_decodes} must be at least 0 and prompt_tokens={prompt_tokens} "
            "at least 1"
        )
    decode = RequestSpec(0.0, PromptShape(decode_prompt_tokens), decode_output_tokens)
    long = RequestSpec(prompt_arrival, PromptShape(prompt_tokens), prompt_output_tokens)
    name = f"stall_scene({num_decodes} decodes, prompt of {prompt_tokens})"
    return Workload(name, (decode,) * num_decodes + (long,))


def poisson(
    rate: float,
    num_requests: int,
    *,
    prompt: LengthsLike = 512,
    output: LengthsLike = 128,
    seed: int = 0,
    tenant: str = "default",
    priority: int = 0,
) -> Workload:
    """Independent users: `rate` requests per second with exponential gaps."""
    return bursty(
        rate, num_requests, cv=1.0, prompt=prompt, output=output, seed=seed, tenant=tenant,
        priority=priority,
    )  # fmt: skip


def bursty(
    rate: float,
    num_requests: int,
    *,
    cv: float = 3.0,
    prompt: LengthsLike = 512,
    output: LengthsLike = 128,
    seed: int = 0,
    tenant: str = "default",
    priority: int = 0,
) -> Workload:
    """Gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, more is burstier."""
    if not rate > 0 or not cv > 0 or num_requests < 0:
        raise ValueError(
            f"rate={rate} and cv={cv} must be above 0, num_requests={num_requests} at least 0"
        )
    # One stream for the gaps and one for the lengths: the same requests come at any rate.
    gaps, lengths = random.Random(f"gaps {seed}"), random.Random(f"lengths {seed}")
    shape = 1.0 / cv**2
    prompts, outputs = _lengths(prompt), _lengths(output)
    arrival, requests = 0.0, []
    for _ in range(num_requests):
        arrival += gaps.gammavariate(shape, 1.0 / (rate * shape))
        shaped = PromptShape(prompts.draw(lengths))
        requests.append(RequestSpec(arrival, shaped, outputs.draw(lengths), tenant, priority))
    kind = "poisson" if cv == 1.0 else f"bursty(cv={cv:g})"
    return Workload(f"{kind} {rate:g}/s", tuple(requests))


def closed_loop(
    num_users: int,
    requests_per_user: int,
    *,
    prompt: LengthsLike = 512,
    output: LengthsLike = 128,
    think_time: float = 0.0,
    seed: int = 0,
    tenant: str = "default",
) -> ClosedLoop:
    """Users who wait for the answer, think (exponential, mean `think_time` seconds), ask again."""
    if num_users < 1 or requests_per_user < 1 or think_time < 0:
        raise ValueError(
            f"num_users={num_users} and requests_per_user={requests_per_user} must be at least 1, "
            f"think_time={think_time} at least 0"
        )
    rng = random.Random(f"closed loop {seed}")
    prompts, outputs = _lengths(prompt), _lengths(output)
    turns = tuple(
        tuple((prompts.draw(rng), outputs.draw(rng)) for _ in range(requests_per_user))
        for _ in range(num_users)
    )
    thinks = tuple(
        tuple(rng.expovariate(1.0 / think_time) if think_time else 0.0 for _ in user)
        for user in turns
    )
    first = [
        Turn(thinks[user][0], PromptShape(own[0][0]), own[0][1], tenant, user=user)
        for user, own in enumerate(turns)
    ]
    first.sort(key=lambda spec: spec.arrival)
    return ClosedLoop(f"closed loop of {num_users} users", tuple(first), (), turns, thinks)


def merge(*workloads: Workload, name: str = "merged") -> Workload:
    """Several open-loop workloads as one, in order of arrival."""
    for workload in workloads:
        if isinstance(workload, ClosedLoop):
            raise ValueError(f"{workload.name!r} is a closed loop: it cannot be merged with others")
    requests = [spec for workload in workloads for spec in workload]
    requests.sort(key=lambda spec: spec.arrival)
    bad_rows = tuple(row for workload in workloads for row in workload.bad_rows)
    return Workload(name, tuple(requests), bad_rows)


def multi_tenant(tenants: Mapping[str, Workload]) -> Workload:
    """One workload per tenant, merged; each request carries its tenant's name."""
    named = [
        replace(workload, requests=tuple(replace(spec, tenant=tenant) for spec in workload))
        for tenant, workload in tenants.items()
    ]
    return merge(*named, name=f"tenants {', '.join(tenants)}")


def describe(workload: Iterable[RequestSpec]) -> str:
    """Counts, arrival rate and length quantiles, in a few lines."""
    specs = list(workload)
    name = getattr(workload, "name", "workload")
    if not specs:
        return f"{name}: no requests"
    span = max(spec.arrival for spec in specs) - min(spec.arrival for spec in specs)
    rate = f"{(len(specs) - 1) / span:.3g} requests/s over {span:.1f} s" if span else "all at once"
    lines = [f"{name}: {len(specs)} requests, {rate}"]
    for label, values in (
        ("prompt", sorted(len(spec.prompt) for spec in specs)),
        ("output", sorted(spec.output_tokens for spec in specs)),
    ):
        p90 = values[min(len(values) - 1, math.ceil(0.9 * len(values)) - 1)]
        lines.append(
            f"  {label} tokens: median {median(values):g}, P90 {p90}, max {values[-1]}, "
            f"total {sum(values):,}"
        )
    bad_rows: Sequence[str] = getattr(workload, "bad_rows", ())
    if bad_rows:
        lines.append(f"  {len(bad_rows)} bad rows left out: {_sample(bad_rows)}")
    return "\n".join(lines)


# Published traces -------------------------------------------------------------------------------


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
        raise ValueError(f"{name}: no readable rows ({_sample(bad_rows) or 'the file is empty'})")
    if bad_rows:
        warnings.warn(
            f"{name}: {len(bad_rows)} of {number - 1} rows left out ({_sample(bad_rows)})",
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


def _sample(rows: Sequence[str], count: int = 3) -> str:
    return "; ".join(rows[:count]) + ("; …" if len(rows) > count else "")
