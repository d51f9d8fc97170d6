"""An executor that is a language model of sorts: it reads what it computed through block tables.

Each slot keeps a hash of its token, its position and the slot before, as real keys and values
depend on their whole prefix; the next token is a hash of all slots that the block table leads to.
A freshly allocated block is poisoned. So a wrong table, a stale prefix block, a lost recomputation
or a chunk that starts at the wrong place changes tokens, or reads poison and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minichunk.core.clock import VirtualClock
from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine, TokenEvent
from minichunk.core.plan import StepPlan, StepResult
from minichunk.core.request import SamplingParams

VOCAB_SIZE = 50_021
POISON = -1


def one_second(plan: StepPlan) -> float:
    return 1.0


class FakeExecutor:
    """Serves one engine. `duration` gives a step's seconds, `before` is called with each plan."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        duration: Callable[[StepPlan], float] = one_second,
    ) -> None:
        self.block_size = block_size
        self.slots = [POISON] * (num_blocks * block_size)
        self.duration = duration
        self.plans: list[StepPlan] = []
        self.before: Callable[[StepPlan], None] = lambda plan: None

    def poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            first = block * self.block_size
            self.slots[first : first + self.block_size] = [POISON] * self.block_size

    def execute(self, plan: StepPlan) -> StepResult:
        self.before(plan)
        self.plans.append(plan)
        for chunk in plan.chunks:  # all of a step's keys are written before any of them is read
            self._write(chunk)
        tokens = {}
        for chunk in plan.chunks:
            if chunk.sampling is not None:
                tokens[chunk.request_id] = next_token(self._read(chunk), chunk.sampling)
        return StepResult(tokens, self.duration(plan))

    def _slots_of(self, chunk: Any, start: int, stop: int) -> list[int]:
        size, table = self.block_size, chunk.block_table
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def _write(self, chunk: Any) -> None:
        token_ids = chunk.token_ids or (0,) * chunk.num_tokens  # a shape has no tokens
        before = 0
        if chunk.start:
            before = self.slots[self._slots_of(chunk, chunk.start - 1, chunk.start)[0]]
            assert before != POISON, f"{chunk} follows a position that was never computed"
        own = self._slots_of(chunk, chunk.start, chunk.stop)
        for slot, token, position in zip(
            own, token_ids, range(chunk.start, chunk.stop), strict=True
        ):
            before = self.slots[slot] = written(before, token, position)

    def _read(self, chunk: Any) -> tuple[int, ...]:
        seen = tuple(self.slots[slot] for slot in self._slots_of(chunk, 0, chunk.stop))
        assert POISON not in seen, f"{chunk} reads a slot that was never written"
        return seen


def written(before: int, token: int, position: int) -> int:
    """What a slot holds. Hashes of tuples of ints are the same in every process."""
    return hash((before, token, position)) & 0xFFFFFFFFFFFF


def next_token(seen: tuple[int, ...], sampling: SamplingParams) -> int:
    """A greedy token depends on what is seen; a sampled one on seed and position, too."""
    seed = 0 if sampling.temperature == 0 else hash((sampling.seed, len(seen)))
    return hash((*seen, seed)) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """What the model says with no engine around it. `params.seed` must be resolved."""
    seen: list[int] = []
    outputs: list[int] = []
    tokens = list(prompt)
    while len(outputs) < count:
        for token in tokens:
            seen.append(written(seen[-1] if seen else 0, token, len(seen)))
        tokens = [next_token(tuple(seen), params)]
        outputs += tokens
    return outputs


def make_engine(
    duration: Callable[[StepPlan], float] = one_second,
    stop_check: Callable[[Any], bool] | None = None,
    eos_token_ids: Sequence[int] = (),
    **knobs: Any,
) -> Engine:
    """An engine on a fake executor and a virtual clock, with all invariants checked."""
    knobs = {"num_blocks": 64, "block_size": 4, "check_invariants": True, **knobs}
    config = EngineConfig(**knobs)
    executor = FakeExecutor(config.num_blocks or 1, config.block_size, duration)
    engine = Engine(
        executor,
        config,
        clock=VirtualClock(),
        vocab_size=VOCAB_SIZE,
        stop_check=stop_check,
        eos_token_ids=eos_token_ids,
    )
    cache = engine.scheduler.cache
    log = cache.on_block

    def on_block(kind: str, request_id: str, blocks: tuple[int, ...]) -> None:
        if kind == "alloc":
            executor.poison(blocks)
        log(kind, request_id, blocks)

    cache.on_block = on_block
    return engine


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def drain(engine: Engine, max_steps: int = 5_000) -> list[TokenEvent]:
    """Step until nobody is left; an engine that spins fails here."""
    events: list[TokenEvent] = []
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return events
        events += engine.step()
    raise AssertionError(f"still unfinished after {max_steps} steps: {sorted(engine.requests)}")


def tokens_of(events: list[TokenEvent], request_id: str) -> list[int]:
    return [e.token_id for e in events if e.request_id == request_id and e.token_id is not None]


def chunks_of(engine: Engine, request_id: str) -> list[tuple[int, int, int]]:
    """(step, start, num_tokens) of everything that the request was granted."""
    return [
        (number, chunk.start, chunk.num_tokens)
        for number, plan in enumerate(engine.executor.plans)  # type: ignore[attr-defined]
        for chunk in plan.chunks
        if chunk.request_id == request_id
    ]


def random_prompt(rng: Any, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]
