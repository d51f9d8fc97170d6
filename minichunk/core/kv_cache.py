"""Paged KV cache bookkeeping: which blocks exist, who holds them, which can be shared.

The scheduler asks here for blocks before each step; the executor only reads the resulting block
tables. Shows PagedAttention's block table (Kwon et al., SOSP 2023): a request's keys and values
are contiguous in logic only, and a full, computed block can serve every request with that prefix.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT_HASH = b""


def chain_hash(parent: bytes, content: object) -> bytes:
    """Hash of a full block: its own content *and*, through `parent`, everything before it.

    Two blocks with equal hashes therefore hold the same tokens at the same positions.
    """
    if isinstance(content, tuple) and content and all(type(token) is int for token in content):
        payload = b"t" + array("q", content).tobytes()
    else:
        payload = b"s" + repr(content).encode()
    return hashlib.blake2b(parent + payload, digest_size=16).digest()


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in the order of its positions.

    `blocks` is a tuple, replaced when it grows: a plan can carry it without copying, and nothing
    that happens later changes a plan that was already written.
    """

    blocks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks)

    def slot(self, position: int, block_size: int) -> int:
        """The cache slot of a position: where its key and value are written."""
        return self.blocks[position // block_size] * block_size + position % block_size


class BlockPool:
    """All blocks of the KV cache with their reference counts, and the prefix cache over them.

    A block whose count falls to zero goes to the end of the free queue and keeps its hash until it
    is taken again, so that a prefix survives its owners for as long as nobody needs the space.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks} and block_size={block_size} must both be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.hash_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self.free_queue)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` free blocks, the longest unused first; their old content is forgotten."""
        if count > len(self.free_queue):
            raise ValueError(f"{count} blocks asked for, but only {self.num_free} are free")
        taken = []
        for _ in range(count):
            block, _ = self.free_queue.popitem(last=False)
            old = self.hash_of.pop(block, None)
            if old is not None:
                del self.block_of[old]
            self.ref_counts[block] = 1
            taken.append(block)
        return tuple(taken)

    def share(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more; those that nobody held leave the free queue."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Give up one reference to each block; returns those that became free.

        The last block goes first: the head of a prompt is the likelier one to be asked for again.
        """
        freed = []
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None
                freed.append(block)
        return tuple(freed)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Offer a full and computed block for sharing; False if an equal block is known already."""
        if not self.prefix_caching or block_hash in self.block_of:
            return False
        self.block_of[block_hash] = block
        self.hash_of[block] = block_hash
        return True

    def forget(self) -> None:
        """No block may be shared any more: somebody else has written into their memory."""
        self.hash_of.clear()
        self.block_of.clear()

    def lookup(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """The published blocks for the longest known prefix of this chain of hashes."""
        found = []
        for block_hash in hashes:
            block = self.block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return tuple(found)
