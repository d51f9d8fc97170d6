"""The checks of notebook 02 pass their solutions and tell plausible wrong answers apart."""

from __future__ import annotations

import pytest

from minichunk.labs import check
from tests.labs.wrong_answers import assert_all_wrong


def test_slot_mapping(solution) -> None:
    assert check.slot_mapping(solution("02_paged_kv", "slot-mapping")).passed
    results = assert_all_wrong(
        check.slot_mapping,
        {
            "contiguous": lambda table, size, start, n: list(range(start, start + n)),
            "from the first block": lambda table, size, start, n: [
                table[0] * size + start + i for i in range(n)
            ],
            "the start forgotten": lambda table, size, start, n: [
                table[i // size] * size + i % size for i in range(n)
            ],
            "the offset forgotten": lambda table, size, start, n: [
                table[p // size] * size for p in range(start, start + n)
            ],
            "one too many": lambda table, size, start, n: [
                table[min(p // size, len(table) - 1)] * size + p % size
                for p in range(start, start + n + 1)
            ],
        },
    )
    assert all(result.picture is not None for result in results)


def test_new_blocks(solution) -> None:
    assert check.new_blocks(solution("02_paged_kv", "new-blocks")).passed
    results = assert_all_wrong(
        check.new_blocks,
        {
            "as if at a block's start": lambda start, n, size: -(-n // size),
            "rounded down": lambda start, n, size: (start + n) // size - start // size,
            "all blocks so far": lambda start, n, size: -(-(start + n) // size),
            "one per chunk": lambda start, n, size: 1,
        },
    )
    assert all(result.picture is not None for result in results)


def common(a, b) -> int:
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                min(len(a), len(b)))  # fmt: skip


def blocks_of(tokens, size) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]


def test_prefix_hits(solution) -> None:
    assert check.prefix_hits(solution("02_paged_kv", "prefix-hits")).passed

    def token_by_token(computed, prompt, size):
        return max(min(common(known, prompt), len(prompt) - 1) for known in computed)

    def last_block_too(computed, prompt, size):
        return max(common(known, prompt) // size * size for known in computed)

    def without_what_comes_before(computed, prompt, size):
        known = {block for tokens in computed for block in blocks_of(tokens, size)}
        most = (len(prompt) - 1) // size
        return size * sum(block in known for block in blocks_of(prompt, size)[:most])

    def a_block_too_few(computed, prompt, size):
        return max(0, max(common(known, prompt) // size - 1 for known in computed)) * size

    wrong = [token_by_token, last_block_too, without_what_comes_before, a_block_too_few]
    assert_all_wrong(check.prefix_hits, {f.__name__: f for f in wrong})


@pytest.mark.parametrize("name", ["slot_mapping", "new_blocks", "prefix_hits"])
def test_an_unwritten_answer_is_said_to_be_unwritten(name: str) -> None:
    def stub(*_):
        raise NotImplementedError

    assert getattr(check, name)(stub).status == "not written"
