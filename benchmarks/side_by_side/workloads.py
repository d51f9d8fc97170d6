"""What every engine is asked: five workloads, as plain data that another environment can read.

W1 is pure decoding, W2 a batch with prompts, W3 pure prefill, W4 the scene that chunked prefill was
invented for (once per token budget), W5 users who come at random. Prompts are random token ids,
seeded; answers are greedy and of fixed length, so that every engine does the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minichunk.compare import PromptFiller
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.workloads import Lengths, poisson

STALL_BUDGETS = (256, 512, 4096)
LARGE_BUDGET = 4096  # vLLM's own default on a CPU
AFTER_TOKENS = 8  # the long prompt of W4 comes when everybody has so many output tokens
WARM_UP_OUTPUT_TOKENS = AFTER_TOKENS + 4


@dataclass(frozen=True)
class Case:
    """One workload at one token budget.

    `late` is a request that arrives once each of `requests` has `AFTER_TOKENS` output tokens,
    however long that takes: every engine is interrupted at the same point of its work.
    """

    name: str
    what: str
    budget: int
    requests: tuple[RequestSpec, ...]
    late: RequestSpec | None = None

    def __post_init__(self) -> None:
        shortest = min(spec.output_tokens for spec in self.requests)
        if self.late is not None and shortest <= AFTER_TOKENS:
            raise ValueError(
                f"{self.name}: the late request comes after {AFTER_TOKENS} tokens of each other "
                f"one, and one of them has only {shortest}"
            )

    @property
    def num_requests(self) -> int:
        return len(self.requests) + (self.late is not None)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(spec.prompt) + spec.output_tokens for spec in self._all)

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds when nobody has finished."""
        return sum(len(spec.prompt) + spec.output_tokens for spec in self._all)

    @property
    def _all(self) -> tuple[RequestSpec, ...]:
        return self.requests + ((self.late,) if self.late else ())

    def shortened(self) -> Case:
        """The same prompts at once with short answers: the warm-up, alike for every engine."""

        def short(spec: RequestSpec) -> RequestSpec:
            tokens = min(spec.output_tokens, WARM_UP_OUTPUT_TOKENS)
            return replace(spec, arrival=0.0, output_tokens=tokens)

        late = short(self.late) if self.late else None
        return replace(self, requests=tuple(map(short, self.requests)), late=late)

    def to_json(self) -> dict[str, Any]:
        def row(spec: RequestSpec) -> list[Any]:
            return [spec.arrival, list(spec.prompt), spec.output_tokens]  # type: ignore[arg-type]

        return {
            "name": self.name,
            "what": self.what,
            "budget": self.budget,
            "requests": [row(spec) for spec in self.requests],
            "late": row(self.late) if self.late else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        def spec(row: list[Any]) -> RequestSpec:
            return RequestSpec(row[0], tuple(row[1]), row[2])

        return cls(
            data["name"],
            data["what"],
            data["budget"],
            tuple(spec(row) for row in data["requests"]),
            spec(data["late"]) if data["late"] else None,
        )


def cases(names: Sequence[str], vocab_size: int, seed: int = 0) -> list[Case]:
    """The cases of these workloads, in the order given: "W1" … "W5", or "W4-256" for one budget."""
    known = all_cases(vocab_size, seed)
    chosen: dict[str, Case] = {}
    for name in names:
        found = [case for case in known if name in (case.name, case.name.partition("-")[0])]
        if not found:
            listed = ", ".join(case.name for case in known)
            raise ValueError(
                f"unknown workload {name!r}; known: {listed}, and W4 for all its budgets"
            )
        chosen.update((case.name, case) for case in found)
    return list(chosen.values())


def all_cases(vocab_size: int, seed: int = 0) -> list[Case]:
    """Every case there is; each prompt is drawn anew, in this order, from the one seed."""
    fill = PromptFiller(vocab_size, seed)

    def asked(prompt: int, output: int, count: int = 1) -> tuple[RequestSpec, ...]:
        shaped = RequestSpec(0.0, PromptShape(prompt), output)
        return tuple(replace(shaped, prompt=fill(shaped)) for _ in range(count))

    return [
        Case("W1", "10 requests, prompt 32, 64 tokens each", LARGE_BUDGET, asked(32, 64, 10)),
        Case("W2", "32 requests, prompt 256, 64 tokens each", LARGE_BUDGET, asked(256, 64, 32)),
        Case("W3", "one prompt of 2,048 tokens", LARGE_BUDGET, asked(2048, 1)),
        *(
            Case(
                f"W4-{budget}",
                f"10 requests decode, a prompt of 3,000 arrives; budget {budget:,}",
                budget,
                asked(32, 48, 10),
                asked(3000, 8)[0],
            )
            for budget in STALL_BUDGETS
        ),
        Case(
            "W5",
            "24 chats arrive at random, 1.5 a second; budget 512",
            512,
            tuple(
                replace(spec, prompt=fill(spec))
                for spec in poisson(
                    1.5,
                    24,
                    prompt=Lengths(120, p90=400, maximum=1000),
                    output=Lengths(40, p90=90, maximum=120),
                    seed=seed,
                )
            ),
        ),
    ]
