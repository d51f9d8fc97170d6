"""Whom to preempt: chosen first, evicted only if together they suffice.

Counting what a victim frees is less obvious than it looks: a shared block becomes free only when
its last owner goes, and a promised block that was not taken yet is free but spoken for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minichunk.core.kv_cache import BlockPool
from minichunk.core.request import Request


def choose_victims(
    candidates: Iterable[Request],
    pool: BlockPool,
    *,
    needed_blocks: int,
    needed_slots: int = 0,
    hits: tuple[int, ...] = (),
    frees_reserve: bool = False,
) -> list[Request] | None:
    """The fewest candidates, taken in this order, that make room; None if all of them do not.

    `needed_blocks` must be free after they left, where a block of `hits` that somebody still holds
    counts as there. With `frees_reserve`, what a victim was promised and does not hold counts too.
    """
    victims: list[Request] = []
    given_up: Counter[int] = Counter()
    free = pool.num_free
    held_hits = {block for block in hits if pool.ref_counts[block] > 0}

    def suffices() -> bool:
        return free + len(held_hits) >= needed_blocks and len(victims) >= needed_slots

    for victim in candidates:
        if suffices():
            break
        victims.append(victim)
        for block in victim.table.blocks:
            given_up[block] += 1
            if given_up[block] == pool.ref_counts[block]:
                free += 1
                held_hits.discard(block)
        if frees_reserve:
            free += max(0, victim.num_promised_blocks - len(victim.table.blocks))
    return victims if suffices() else None
