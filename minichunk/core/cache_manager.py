"""Who holds which blocks: admission's promises, growing tables, prefix hits, publishing.

Between the scheduler, which decides, and the block pool, which only counts. A request is promised
blocks for its whole prompt when it is admitted and takes them chunk by chunk; what is promised and
not yet taken is the reserve, which keeps two half-done prompts from starving each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minichunk.core.kv_cache import ROOT_HASH, BlockPool, chain_hash
from minichunk.core.request import Request

Log = Callable[..., None]


class CacheManager:
    """The block tables of the running requests. `on_block(kind, request_id, blocks)` reports."""

    def __init__(self, pool: BlockPool, on_block: Log) -> None:
        self.pool = pool
        self.on_block = on_block
        self.reserved_blocks = 0  # promised at admission, not yet held

    def find_hits(self, request: Request) -> tuple[int, ...]:
        """Blocks of the prefix cache that the request can start with.

        Never all of its tokens: the last one must be computed, or nothing could be sampled.
        """
        most = (request.num_tokens - 1) // self.pool.block_size
        return self.pool.lookup(self._hashes(request, most))

    def fits(self, promised: int, hits: tuple[int, ...]) -> bool:
        """Is there room for a newcomer, beside everything that others were promised?

        A hit on a block that nobody holds takes a free one.
        """
        needed = promised - sum(self.pool.ref_counts[block] > 0 for block in hits)
        return needed <= self.pool.num_free - self.reserved_blocks

    def start(self, request: Request, hits: tuple[int, ...], promised: int) -> None:
        """Open the request's table with its prefix hits, which count as computed."""
        request.num_computed_tokens = len(hits) * self.pool.block_size
        request.num_published_blocks = len(hits)
        request.num_promised_blocks = promised
        self.reserved_blocks += promised
        self.pool.share(hits)
        self._hold(request, hits)
        if hits:
            self.on_block("share", request.request_id, hits)

    def take(self, request: Request, count: int) -> None:
        """Append `count` fresh blocks to the request's table."""
        if count > 0:
            fresh = self.pool.allocate(count)
            self._hold(request, request.table.blocks + fresh)
            self.on_block("alloc", request.request_id, fresh)

    def trim(self, request: Request) -> None:
        """Give back the blocks beyond the computed tokens: their step is not going to run."""
        keep = self.pool.blocks_for(request.num_computed_tokens)
        surplus = request.table.blocks[keep:]
        self._hold(request, request.table.blocks[:keep])
        self._free(request, surplus)

    def release(self, request: Request) -> None:
        """Give back everything the request holds, and what it was promised."""
        blocks = request.table.blocks
        self._hold(request, ())
        self.reserved_blocks -= request.num_promised_blocks
        request.num_promised_blocks = 0
        request.num_published_blocks = 0
        self._free(request, blocks)

    def publish(self, request: Request, full_blocks: int) -> None:
        """Full *and* computed: from now on others may share these blocks."""
        first, request.num_published_blocks = request.num_published_blocks, full_blocks
        hashes = self._hashes(request, full_blocks)
        published = tuple(
            request.table.blocks[i]
            for i in range(first, len(hashes))
            if self.pool.publish(request.table.blocks[i], hashes[i])
        )
        if published:
            self.on_block("publish", request.request_id, published)

    def _hold(self, request: Request, blocks: tuple[int, ...]) -> None:
        """Set the request's table, and account for what of its promise is now in hand."""
        promised = request.num_promised_blocks
        before = max(0, promised - len(request.table.blocks))
        request.table.blocks = blocks
        self.reserved_blocks += max(0, promised - len(blocks)) - before

    def _free(self, request: Request, blocks: tuple[int, ...]) -> None:
        if blocks:
            self.pool.release(blocks)
            self.on_block("free", request.request_id, blocks)

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Chained hashes of the request's first `count` full blocks."""
        if not self.pool.prefix_caching:
            return []
        hashes, size = request.block_hashes, self.pool.block_size
        while len(hashes) < count:
            start = len(hashes) * size
            content = request.block_content(start, start + size)
            if isinstance(content, bytes):  # no other request can have this block
                hashes.append(content)
            else:
                hashes.append(chain_hash(hashes[-1] if hashes else ROOT_HASH, content))
        return hashes[:count]


def ignore(*_: Any) -> None:
    """A log that nobody keeps."""
