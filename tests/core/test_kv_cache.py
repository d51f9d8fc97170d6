"""The block pool, the prefix cache over it, and the choice of victims."""

from __future__ import annotations

import random

import pytest

from minichunk.core.kv_cache import ROOT_HASH, BlockPool, BlockTable, chain_hash
from minichunk.core.request import PromptShape, Request, RequestStatus
from minichunk.core.victims import choose_victims

from .fake_executor import drain, expected_tokens, greedy, make_engine, random_prompt, tokens_of


def test_a_slot_is_block_times_size_plus_offset() -> None:
    table = BlockTable((7, 2, 5))
    assert [table.slot(position, 4) for position in (0, 3, 4, 11)] == [28, 31, 8, 23]


def test_the_longest_unused_block_is_taken_first_and_forgets_its_content() -> None:
    pool = BlockPool(4, 16)
    first = pool.allocate(2)
    assert pool.publish(first[0], b"prefix")
    assert pool.release(first) == (first[1], first[0])
    assert pool.allocate(3) == (2, 3, first[1])
    assert pool.lookup([b"prefix"]) == (first[0],)  # free, and still there
    pool.allocate(1)
    assert pool.lookup([b"prefix"]) == ()


def test_a_shared_block_becomes_free_with_its_last_owner() -> None:
    pool = BlockPool(3, 16)
    [block] = pool.allocate(1)
    pool.publish(block, b"h")
    pool.share([block])
    assert pool.release([block]) == ()
    assert pool.release([block]) == (block,)
    pool.share(pool.lookup([b"h"]))  # revived from the free queue
    assert (pool.num_free, pool.num_used) == (2, 1)


def test_too_many_blocks_are_an_error_that_takes_none() -> None:
    pool = BlockPool(3, 16)
    with pytest.raises(ValueError, match="4 blocks asked for, but only 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="num_blocks=0 and block_size=16"):
        BlockPool(0, 16)


def test_an_equal_block_is_published_once() -> None:
    pool = BlockPool(3, 16)
    a, b = pool.allocate(2)
    assert pool.publish(a, b"h")
    assert not pool.publish(b, b"h")
    assert not BlockPool(3, 16, prefix_caching=False).publish(0, b"h")


def test_a_hash_stands_for_the_content_and_everything_before_it(rng: random.Random) -> None:
    one, two = tuple(random_prompt(rng, 4)), tuple(random_prompt(rng, 4))
    assert chain_hash(ROOT_HASH, one) == chain_hash(ROOT_HASH, one)
    assert chain_hash(chain_hash(ROOT_HASH, one), two) != chain_hash(ROOT_HASH, two)
    assert chain_hash(ROOT_HASH, (1, 2)) != chain_hash(ROOT_HASH, (2, 1))
    assert chain_hash(ROOT_HASH, (1,)) != chain_hash(ROOT_HASH, ("1",))


@pytest.mark.parametrize("block_size", [1, 4, 5, 16, 24])
def test_shapes_share_exactly_the_blocks_of_their_common_prefix_ids(block_size: int) -> None:
    def contents(shape: PromptShape, rid: str) -> list[object]:
        request = Request(rid, shape, greedy())
        starts = range(0, shape.length - block_size + 1, block_size)
        return [request.block_content(start, start + block_size) for start in starts]

    one = contents(PromptShape(100, (1, 2, 3), 16), "one")
    two = contents(PromptShape(90, (1, 2, 9), 16), "two")
    common = sum(a == b for a, b in zip(one, two, strict=False))
    assert common == 32 // block_size
    assert one[:common] == two[:common]
    other_pieces = contents(PromptShape(90, (1, 2, 3), 8), "three")
    assert not set(map(str, one)) & set(map(str, other_pieces))


def test_a_shorter_shape_does_not_claim_more_than_its_length() -> None:
    request = Request("r", PromptShape(20, (1, 2, 3), 16), greedy())
    assert request.block_content(16, 32) == b"r 16"


@pytest.mark.parametrize(("length", "piece"), [(-1, 16), (4, 0)])
def test_a_shape_out_of_range_is_refused(length: int, piece: int) -> None:
    with pytest.raises(ValueError, match=f"length={length} with tokens_per_prefix_id={piece}"):
        PromptShape(length, (), piece)


def test_a_stale_block_is_never_hit_after_it_was_taken_again(rng: random.Random) -> None:
    """Prompts with common prefixes come and go in a pool that holds hardly two of them."""
    engine = make_engine(num_blocks=9, block_size=4)
    prefixes = [random_prompt(rng, 12) for _ in range(3)]
    prompts = {}
    events = []
    for _ in range(60):
        prompt = rng.choice(prefixes)[: rng.choice([4, 8, 12])] + random_prompt(rng, 3)
        rid = engine.add_request(prompt, greedy(rng.randint(1, 6)))
        prompts[rid] = prompt
        events += engine.step()
    events += drain(engine)
    for rid, prompt in prompts.items():
        tokens = tokens_of(events, rid)
        assert tokens == expected_tokens(prompt, greedy(), len(tokens))
    assert engine.trace.metrics().cached_tokens > 0


def test_a_block_is_shared_only_when_it_is_full_and_computed(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=10, block_size=4)
    prompt = random_prompt(rng, 18)
    for rid in ("first", "second"):
        engine.add_request(prompt, greedy(2), request_id=rid)
    engine.step()  # 10 of 18 tokens: two full blocks, and one half full
    events = drain(engine)
    [hits] = [
        e.tokens for e in engine.trace.events if (e.request_id, e.kind) == ("second", "admit")
    ]
    assert hits == 8
    assert tokens_of(events, "second") == expected_tokens(prompt, greedy(), 2)


def test_a_block_is_not_hit_behind_another_prefix_or_at_another_place(rng: random.Random) -> None:
    engine = make_engine(block_size=4)
    a, b = random_prompt(rng, 4), random_prompt(rng, 4)
    for prompt in ([*a, *b, 1], [*b, *a, 1], [*b, *b, 1], [*a, *a, *b, 1], [7] * 13, [7] * 9):
        rid = engine.add_request(prompt, greedy(3))
        assert tokens_of(drain(engine), rid) == expected_tokens(prompt, greedy(), 3)


def test_twins_in_one_step_share_nothing_that_is_not_computed_yet(rng: random.Random) -> None:
    engine = make_engine(max_num_batched_tokens=100)
    prompt = random_prompt(rng, 12)
    rids = [engine.add_request(prompt, greedy(3)) for _ in range(2)]
    events = engine.step()
    tables = [set(engine.requests[rid].table.blocks) for rid in rids]
    assert not tables[0] & tables[1]
    events += drain(engine)
    for rid in rids:
        assert tokens_of(events, rid) == expected_tokens(prompt, greedy(), 3)


# Victims ----------------------------------------------------------------------------------------


def holder(pool: BlockPool, rid: str, blocks: tuple[int, ...], promised: int = 0) -> Request:
    request = Request(rid, (1,), greedy(), status=RequestStatus.RUNNING)
    request.table.blocks = blocks
    request.num_promised_blocks = promised
    return request


def test_a_shared_block_counts_only_when_its_last_owner_goes() -> None:
    pool = BlockPool(6, 4)
    shared = pool.allocate(3)
    pool.share(shared)
    own = pool.allocate(3)
    one = holder(pool, "one", (*shared, *own[:1]))
    two = holder(pool, "two", (*shared, *own[1:]))
    assert choose_victims([one, two], pool, needed_blocks=1) == [one]
    assert choose_victims([one, two], pool, needed_blocks=2) == [one, two]
    assert choose_victims([one], pool, needed_blocks=2) is None
    assert choose_victims([one, two], pool, needed_blocks=7) is None


def test_a_hit_that_a_victim_gives_up_is_counted_once() -> None:
    pool = BlockPool(6, 4)
    mine = pool.allocate(6)
    one = holder(pool, "one", mine)
    assert choose_victims([one], pool, needed_blocks=6, hits=mine[:2]) == [one]
    assert choose_victims([one], pool, needed_blocks=7, hits=mine[:2]) is None
    assert choose_victims([one], pool, needed_blocks=2, hits=mine[:2]) == []


def test_what_a_victim_was_promised_counts_for_a_newcomer_only() -> None:
    pool = BlockPool(6, 4)
    one = holder(pool, "one", pool.allocate(2), promised=5)
    # Four blocks are free, three of them promised to "one".
    newcomer = choose_victims([one], pool, needed_blocks=5 + 3, frees_reserve=True)
    assert newcomer == [one]
    assert choose_victims([one], pool, needed_blocks=5 + 3) is None


def test_slots_need_victims_too() -> None:
    pool = BlockPool(6, 4)
    one, two = holder(pool, "one", ()), holder(pool, "two", ())
    assert choose_victims([one, two], pool, needed_blocks=0, needed_slots=1) == [one]
    assert choose_victims([one, two], pool, needed_blocks=0, needed_slots=3) is None
