"""All KV blocks: references, the hashes of their content, and the order in which content is evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from triptych_services.enginecore.kv.block_table import NULL_BLOCK
from triptych_services.enginecore.kv.cache_changes import CacheChanges, CachedPrefixes

_ABSENT = -1


class FreeQueue:
    """The touched blocks that no request holds, least recently used first.

    A doubly linked list of block ids in two arrays, with the null block, which is never free, as its sentinel. Every
    operation on one block is O(1), also in the middle: a hit takes a cached block out of there.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create an empty queue for blocks 1 .. num_blocks - 1."""
        self._next = [NULL_BLOCK, *[_ABSENT] * (num_blocks - 1)]
        self._previous = self._next[:]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return block != NULL_BLOCK and self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def take(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used blocks. There must be as many."""
        assert count <= self._size, f"{count} blocks wanted, {self._size} free"
        following, previous = self._next, self._previous
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = previous[block] = _ABSENT
            block = after
        following[NULL_BLOCK] = block
        previous[block] = NULL_BLOCK
        self._size -= count
        return taken

    def remove(self, block: int) -> None:
        """Take one block out of the queue."""
        assert block in self, f"block {block} is not free"
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = _ABSENT
        self._size -= 1

    def append(self, block: int) -> None:
        """Add a block that is taken last."""
        self._insert(block, before=self._previous[NULL_BLOCK], after=NULL_BLOCK)

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks that are taken last, in this order."""
        following, previous = self._next, self._previous
        last = previous[NULL_BLOCK]
        for block in blocks:
            assert following[block] == _ABSENT, f"block {block} is free already"
            following[last], previous[block] = block, last
            last = block
        following[last], previous[NULL_BLOCK] = NULL_BLOCK, last
        self._size += len(blocks)

    def prepend(self, block: int) -> None:
        """Add a block that is taken next."""
        self._insert(block, before=NULL_BLOCK, after=self._next[NULL_BLOCK])

    def check_integrity(self, free: Iterable[int]) -> None:
        """Check that the queue holds exactly `free`, and that both directions agree."""
        forwards = list(self)
        assert len(forwards) == len(set(forwards)) == self._size, "the free queue lost count"
        assert set(forwards) == set(free), "the free queue is not the set of unreferenced blocks"
        backwards = []
        block = self._previous[NULL_BLOCK]
        while block != NULL_BLOCK:
            backwards.append(block)
            block = self._previous[block]
        assert forwards == backwards[::-1], "the free queue reads differently backwards"

    def _insert(self, block: int, *, before: int, after: int) -> None:
        assert block not in self, f"block {block} is free already"
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._size += 1


class EvictedHashes:
    """The hashes of content that was evicted although untouched blocks were left, the latest to be evicted last.

    All of it would still be cached if the untouched blocks had been taken instead.
    """

    def __init__(self) -> None:
        self._hashes: dict[bytes, int] = {}
        """Hash -> blocks of its content."""

    def add(self, block_hash: bytes, limit: int, num_blocks: int = 1) -> None:
        """Remember a hash, and the latest `limit` hashes at most."""
        hashes = self._hashes
        hashes.pop(block_hash, None)
        hashes[block_hash] = num_blocks
        while len(hashes) > limit:
            del hashes[next(iter(hashes))]

    def forget(self, block_hashes: Iterable[bytes]) -> int:
        """Forget hashes of content that was computed again, and return how many blocks of it were remembered."""
        hashes = self._hashes
        return sum(hashes.pop(block_hash, 0) for block_hash in block_hashes) if hashes else 0

    def clear(self) -> None:
        self._hashes.clear()


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A copy of the state of a pool, for tests and for debugging."""

    free: tuple[int, ...]
    """Free blocks, the next to be taken first."""
    num_touched: int
    """Blocks that have been held since the start."""
    references: tuple[int, ...]
    """[num_blocks] requests that hold each block."""
    hash_to_block: dict[bytes, int]
    """The prefix cache."""


class BlockPool:
    """All blocks of the worker's KV cache. A `BlockManager` owns it.

    A block is *held* (referenced) or *free*. A free block may still be *cached*: its content has a hash and can be
    hit until the block is taken for something else. Of two blocks with equal content only the first is cached.

    A block is *touched* once it has been held. On a CPU only touched blocks take memory. They are touched in order:

        1 .. num_touched | num_touched + 1 .. num_blocks - 1
        held or free       untouched, and free

    Above the soft limit a cached block that no request holds is taken before an untouched one. The limit rises by one
    for each block of content that has to be computed again because of it (docs/adr/0021).
    """

    def __init__(
        self,
        num_blocks: int,
        soft_num_blocks: int | None = None,
        cached_prefixes: CachedPrefixes | None = None,
    ) -> None:
        """Start with all blocks free and untouched.

        Args:
            num_blocks: Number of blocks, including the null block.
            soft_num_blocks: The soft limit at the start; None: touching blocks costs nothing.
            cached_prefixes: Takes in what comes and goes, where a prefix needs blocks of several groups.
        """
        self.num_blocks = num_blocks
        """Number of blocks, including the null block."""
        self._soft_limit = num_blocks if soft_num_blocks is None else soft_num_blocks
        self._num_touched = 0
        self.num_free = num_blocks - 1
        """Number of blocks that can be taken, the cached and the untouched ones included."""
        self._evicted = EvictedHashes()
        self._free = FreeQueue(num_blocks)
        self._references = [0] * num_blocks
        self._block_to_hash: list[bytes | None] = [None] * num_blocks
        self._hash_to_block: dict[bytes, int] = {}
        self.cache_changes: CacheChanges | CachedPrefixes = cached_prefixes or CacheChanges(
            self._hash_to_block
        )
        """The hashes that came into the cache and left it."""
        self._num_cached_free = 0
        self.num_shareable_gained = 0
        """Times since the start that a block came to be both held and cached. Hits in such a block cost no free one."""

    @property
    def num_touched(self) -> int:
        """Number of blocks that have been held since the start."""
        return self._num_touched

    @property
    def num_cached_free(self) -> int:
        """Number of free blocks with content that can still be hit."""
        return self._num_cached_free

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def find_run(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks with these hashes, up to the first hash that is not cached."""
        return list(takewhile(bool, map(self._hash_to_block.get, block_hashes)))  # type: ignore[arg-type]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this hash; None: there is none."""
        return self._hash_to_block.get(block_hash)

    def find_all(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks with these hashes; hashes that are not cached are left out."""
        return list(filter(None, map(self._hash_to_block.get, block_hashes)))

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Count the blocks that no request holds."""
        return list(map(self._references.__getitem__, blocks)).count(0)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks: those without content, then untouched ones within the soft limit, then the least
        recently used ones, which evicts their content, then further untouched ones. There must be enough."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        self.num_free -= count
        num_blank = min(count, len(self._free) - self._num_cached_free)
        num_evicted = min(max(count - num_blank - self._num_within_limit, 0), self._num_cached_free)
        num_untouched = count - num_blank - num_evicted
        first_untouched = self._num_touched + 1
        self._num_touched += num_untouched
        taken = self._free.take(num_blank + num_evicted)
        references, block_to_hash, num_left = self._references, self._block_to_hash, self._num_untouched
        for block in taken[num_blank:]:
            block_hash = block_to_hash[block]
            self._evict(block)
            if num_left and block_hash is not None:
                self._evicted.add(block_hash, limit=num_left)
        self._num_cached_free -= num_evicted
        taken += range(first_untouched, first_untouched + num_untouched)
        for block in taken:
            references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            if not self._references[block]:
                self._free.remove(block)
                self.num_free -= 1
                self._num_cached_free -= 1
                self.num_shareable_gained += 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block, in this order.

        Cached blocks queue behind all other free blocks; blocks without content are taken next.
        """
        for block in blocks:
            references = self._references[block] = self._references[block] - 1
            assert references >= 0, f"block {block} released more often than held"
            if references:
                continue
            self.num_free += 1
            if self._block_to_hash[block] is None:
                self._free.prepend(block)
            else:
                self._free.append(block)
                self._num_cached_free += 1

    def cache(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> list[int]:
        """Let others find held blocks by the hashes of their content.

        Returns:
            The blocks that are cached now. A block is left out if another one with its hash is cached already.
        """
        cached, stored = self._name_blocks(blocks, block_hashes)
        self.cache_changes.note_stored(stored)
        self.num_shareable_gained += len(cached)
        return cached

    def _name_blocks(
        self, blocks: Sequence[int], block_hashes: Sequence[bytes]
    ) -> tuple[list[int], list[bytes]]:
        """Cache blocks, and return those that are cached now, and their hashes."""
        references, block_to_hash, hash_to_block = self._references, self._block_to_hash, self._hash_to_block
        cached: list[int] = []
        stored: list[bytes] = []
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert references[block], f"block {block} is to be cached but not held"
            assert block_to_hash[block] is None, f"block {block} is cached already"
            if hash_to_block.setdefault(block_hash, block) == block:
                block_to_hash[block] = block_hash
                cached.append(block)
                stored.append(block_hash)
        if num_again := self._evicted.forget(block_hashes):
            self._soft_limit = max(self._soft_limit, self._num_touched) + num_again
        return cached, stored

    def uncache(self, block: int) -> None:
        """Remove a block from the cache, so that no further request finds it. Its holders keep it."""
        if self._block_to_hash[block] is None:
            return
        self._evict(block)
        if not self._references[block]:
            self._num_cached_free -= 1
            self._free.remove(block)
            self._free.prepend(block)

    def uncache_all(self) -> None:
        """Empty the cache, for a worker that lost its blocks. No block may be held."""
        assert not self.num_held, f"{self.num_held} blocks are in use"
        self._block_to_hash = [None] * self.num_blocks
        self._hash_to_block.clear()
        self.cache_changes.note_cleared()
        self._num_cached_free = 0
        self._evicted.clear()

    def snapshot(self) -> PoolSnapshot:
        """Copy everything. Takes time in proportion to the number of blocks."""
        return self._snapshot(tuple(self._free), len(self._free) - self._num_cached_free)

    def _snapshot(self, free: tuple[int, ...], num_blank: int) -> PoolSnapshot:
        """Return a copy, given the touched free blocks, of which the first have no content."""
        untouched = tuple(range(self._num_touched + 1, self.num_blocks))
        within, above = untouched[: self._num_within_limit], untouched[self._num_within_limit :]
        return PoolSnapshot(
            free[:num_blank] + within + free[num_blank:] + above,
            self._num_touched,
            tuple(self._references),
            dict(self._hash_to_block),
        )

    def check_integrity(self, references: dict[int, int]) -> None:
        """Check every block.

        Args:
            references: Block to the number of requests that hold it, as counted by their owner.

        Raises:
            AssertionError: Names the block and what is wrong with it.
        """
        blocks = range(1, self.num_blocks)
        assert self._references[NULL_BLOCK] == 0, "the null block is held"
        assert self._block_to_hash[NULL_BLOCK] is None, "the null block is cached"
        for block in blocks:
            counted, noted = references.get(block, 0), self._references[block]
            assert counted == noted, f"block {block} has {noted} references, {counted} requests hold it"
        num_unheld = self._references[1:].count(0)
        assert num_unheld == self.num_free, f"{num_unheld} blocks are free, {self.num_free} are noted"
        touched, untouched = blocks[: self._num_touched], blocks[self._num_touched :]
        assert not any(self._references[block] for block in untouched), "an untouched block is held"
        self._free.check_integrity(block for block in touched if not self._references[block])
        blank = [self._block_to_hash[block] is None for block in self._free]
        assert blank == sorted(blank, reverse=True), "a block without content is behind a cached one"
        hashes = {name: block for block, name in enumerate(self._block_to_hash) if name is not None}
        assert hashes == self._hash_to_block, "hashes and blocks disagree"
        cached_free = sum(block in self._free for block in hashes.values())
        assert cached_free == self._num_cached_free, "the count of cached free blocks is wrong"

    @property
    def _num_untouched(self) -> int:
        return self.num_blocks - 1 - self._num_touched

    @property
    def _num_within_limit(self) -> int:
        """Number of untouched blocks within the soft limit."""
        return max(min(self._soft_limit, self.num_blocks - 1) - self._num_touched, 0)

    def _evict(self, block: int) -> None:
        block_hash = self._block_to_hash[block]
        assert block_hash is not None
        del self._hash_to_block[block_hash]
        self._block_to_hash[block] = None
        self.cache_changes.note_evicted(block_hash)
