"""All KV blocks: references, content names, and the order in which content is given up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from services.enginecore.kv.block_table import NULL_BLOCK
from services.enginecore.kv.free_queue import FreeQueue


class BlockPool:
    """Owned by a `BlockManager`.

    A block is *held* (referenced) or *free*. A free block may still be *cached*: its content has a name
    and can be had again until the block is taken for something else. Two blocks of equal content get one
    name between them, the first one's.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = FreeQueue(num_blocks)
        self._references = [0] * num_blocks
        self._block_to_hash: list[bytes | None] = [None] * num_blocks
        self._hash_to_block: dict[bytes, int] = {}
        self._num_cached_free = 0
        self.num_shareable_gained = 0
        """How often, since the start, a block came to be both held and named: hits in it cost no free block."""

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, the cached ones included."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose content can still be had."""
        return self._num_cached_free

    @property
    def num_held(self) -> int:
        return self._num_blocks - 1 - len(self._free)

    def find_run(self, block_hashes: Iterable[bytes]) -> list[int]:
        """The blocks of these contents, up to the first that there is none of."""
        return list(takewhile(bool, map(self._hash_to_block.get, block_hashes)))  # type: ignore[arg-type]

    def find_all(self, block_hashes: Iterable[bytes]) -> list[int]:
        """The blocks of these contents, as many as there are."""
        return list(filter(None, map(self._hash_to_block.get, block_hashes)))

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of them nobody holds."""
        return list(map(self._references.__getitem__, blocks)).count(0)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Hold the `count` least recently used free blocks; what was cached in them is forgotten."""
        taken = self._free.take(count)
        for block in taken:
            if self._block_to_hash[block] is not None:
                self._forget(block)
                self._num_cached_free -= 1
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            if not self._references[block]:
                self._free.remove(block)
                self._num_cached_free -= 1
                self.num_shareable_gained += 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each, in this order.

        Cached ones queue behind all others; ones without content are taken next.
        """
        for block in blocks:
            references = self._references[block] = self._references[block] - 1
            assert references >= 0, f"block {block} released more often than held"
            if references:
                continue
            if self._block_to_hash[block] is None:
                self._free.prepend(block)
            else:
                self._free.append(block)
                self._num_cached_free += 1

    def offer(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> list[int]:
        """Name the contents of held blocks, so that others find them; returns those named: a content that has a name
        already keeps it."""
        named = []
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert self._references[block], f"block {block} is offered but not held"
            assert self._block_to_hash[block] is None, f"block {block} has a name already"
            if block_hash not in self._hash_to_block:
                self._block_to_hash[block] = block_hash
                self._hash_to_block[block_hash] = block
                named.append(block)
        self.num_shareable_gained += len(named)
        return named

    def uncache(self, block: int) -> None:
        """Take a block's name back: nobody finds it any more. Its holders keep it."""
        if self._block_to_hash[block] is None:
            return
        self._forget(block)
        if not self._references[block]:
            self._num_cached_free -= 1
            self._free.remove(block)
            self._free.prepend(block)

    def forget_all(self) -> None:
        """Drop every name, for a worker whose blocks are gone. No block may be held."""
        assert not self.num_held, f"{self.num_held} blocks are in use"
        self._block_to_hash = [None] * self._num_blocks
        self._hash_to_block.clear()
        self._num_cached_free = 0

    def check_integrity(self, references: dict[int, int]) -> None:
        """`references`: block -> how many requests hold it, as counted by their owner."""
        blocks = range(1, self._num_blocks)
        assert self._references[NULL_BLOCK] == 0, "the null block is held"
        assert self._block_to_hash[NULL_BLOCK] is None, "the null block has a name"
        for block in blocks:
            counted, noted = references.get(block, 0), self._references[block]
            assert counted == noted, f"block {block} has {noted} references, {counted} requests hold it"
        self._free.check_integrity(block for block in blocks if not self._references[block])
        names = {name: block for block, name in enumerate(self._block_to_hash) if name is not None}
        assert names == self._hash_to_block, "names and blocks disagree"
        cached_free = sum(block in self._free for block in names.values())
        assert cached_free == self._num_cached_free, "the count of cached free blocks is off"

    def _forget(self, block: int) -> None:
        block_hash = self._block_to_hash[block]
        assert block_hash is not None
        del self._hash_to_block[block_hash]
        self._block_to_hash[block] = None
