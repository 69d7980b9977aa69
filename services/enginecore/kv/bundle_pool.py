"""Blocks of several groups of layers, of which rows take and release the same numbers at the same positions.

Groups of one kind and window are twins. A row takes a bundle for all of them: one block of each, named by its first.

    pool      1  2  3  4  5  6  7  8  9
    full      1                             a bundle of one block
    windows      2  3  4                    a bundle of three groups with one window: in tables it is 2
    free                  5  6  7           cached: it is evicted whole
                                   8  9     without content: single blocks, of which any bundle can be made
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from triptych.types.facts import GroupStatus
from triptych_services.enginecore.kv.cache_changes import CachedPrefixes
from triptych_services.enginecore.kv.groups import GroupRules
from triptych_services.enginecore.kv.pool import BlockPool, PoolSnapshot


class BundlePool(BlockPool):
    """A `BlockPool` that counts blocks, and holds, caches and evicts bundles. A `GroupedBlockManager` owns it.

    Wherever a method takes or returns blocks that are held or cached, they are the first blocks of bundles.
    """

    def __init__(self, num_blocks: int, soft_num_blocks: int | None, cached_prefixes: CachedPrefixes) -> None:
        """Start with all blocks free and untouched. The arguments are those of `BlockPool`."""
        super().__init__(num_blocks, soft_num_blocks, cached_prefixes)
        self._bundles: dict[int, Sequence[int]] = {}
        """First block -> all blocks, of each bundle of several that is held or cached."""
        self._most_twins = 1
        """Blocks of the largest bundle that was taken."""
        self._num_queued_bundles = 0
        """Bundles in the free queue, behind single blocks without content."""

    @property
    def num_cached(self) -> int:
        """Number of bundles with content that can be hit, held ones included."""
        return len(self._hash_to_block)

    def blocks_of(self, bundle: int) -> Sequence[int]:
        """Return the blocks of a bundle that is held, of each twin in turn."""
        return self._bundles.get(bundle) or (bundle,)

    def take_bundles(self, count: int, num_twins: int) -> list[list[int]]:
        """Hold `count` bundles of free blocks, as `take` does.

        Returns:
            [num_twins, count] the blocks of each twin. The first are the bundles.
        """
        blocks = self.take(count * num_twins)
        if num_twins == 1:
            return [blocks]
        self._most_twins = max(self._most_twins, num_twins)
        of_twins = [blocks[at::num_twins] for at in range(num_twins)]
        self._bundles.update(zip(of_twins[0], zip(*of_twins, strict=True), strict=True))
        return of_twins

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        self.num_free -= count
        num_blank = len(self._free) - self._num_queued_bundles
        taken = self._free.take(min(count, num_blank)) if num_blank else []
        num_untouched = min(count - len(taken), self._num_within_limit)
        num_lacking = count - len(taken) - num_untouched
        num_left = self._num_untouched
        while num_lacking > 0 and self._num_queued_bundles:
            evicted = self._evict_oldest(-(-num_lacking // self._most_twins), num_left)
            num_lacking -= len(evicted)
            taken += evicted
        num_untouched += max(num_lacking, 0)
        for _ in range(num_lacking, 0):  # the rest of the last bundle
            self._free.prepend(taken.pop())
        references, first_untouched = self._references, self._num_touched + 1
        for block in taken:
            references[block] = 1
        if num_untouched:
            self._num_touched += num_untouched
            references[first_untouched : first_untouched + num_untouched] = [1] * num_untouched
            taken += range(first_untouched, first_untouched + num_untouched)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._references[block]:
                num_blocks = len(self.blocks_of(block))
                self._free.remove(block)
                self.num_free -= num_blocks
                self._num_cached_free -= num_blocks
                self._num_queued_bundles -= 1
                self.num_shareable_gained += num_blocks
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Do as `BlockPool.release` does, with bundles of one size."""
        references, block_to_hash = self._references, self._block_to_hash
        queued: list[int] = []
        for block in blocks:
            num_left = references[block] = references[block] - 1
            if num_left:
                assert num_left > 0, f"block {block} released more often than held"
            elif block_to_hash[block] is None:
                self.num_free += len(self.blocks_of(block))
                self._dissolve(block)
            else:
                queued.append(block)
        if not queued:
            return
        self._free.extend(queued)
        num_queued = len(queued) * len(self.blocks_of(queued[0]))
        self.num_free += num_queued
        self._num_cached_free += num_queued
        self._num_queued_bundles += len(queued)

    def cache_bundles(
        self, bundles: Sequence[int], keys: Sequence[bytes], num_blocks: int | None = None
    ) -> tuple[list[int], list[bytes]]:
        """Do as `cache` does, except that the owner notes what is stored.

        Args:
            num_blocks: Blocks of all these bundles, if that is known.

        Returns:
            The bundles that are cached now, and their keys.
        """
        cached, stored = self._name_blocks(bundles, keys)
        if num_blocks is None or len(cached) < len(bundles):
            sizes = self._bundles
            num_blocks = sum([len(sizes[block]) if block in sizes else 1 for block in cached])
        self.num_shareable_gained += num_blocks
        return cached, stored

    def uncache(self, block: int) -> None:
        if self._block_to_hash[block] is None:
            return
        self._evict(block)
        if not self._references[block]:
            self._num_cached_free -= len(self.blocks_of(block))
            self._num_queued_bundles -= 1
            self._free.remove(block)
            self._dissolve(block)

    def uncache_all(self) -> None:
        bundles = [block for block in self._free if self._block_to_hash[block] is not None]
        super().uncache_all()
        self._num_queued_bundles = 0
        for block in bundles:
            self._free.remove(block)
            self._dissolve(block)

    def snapshot(self) -> PoolSnapshot:
        num_blank = len(self._free) - self._num_queued_bundles
        entries = list(self._free)
        free = (*entries[:num_blank], *chain.from_iterable(map(self.blocks_of, entries[num_blank:])))
        return self._snapshot(free, num_blank)

    def check_integrity(self, references: dict[int, int]) -> None:
        """Check every block.

        Args:
            references: First block of each bundle to the number of requests that hold it.

        Raises:
            AssertionError: Names the block and what is wrong with it.
        """
        queued = [block for block in self._free if self._block_to_hash[block] is not None]
        assert len(queued) == self._num_queued_bundles, "the count of cached free bundles is wrong"
        blank = [self._block_to_hash[block] is None for block in self._free]
        assert blank == sorted(blank, reverse=True), "a block without content is behind a cached one"
        hashes = {name: block for block, name in enumerate(self._block_to_hash) if name is not None}
        assert hashes == self._hash_to_block, "hashes and blocks disagree"
        alive = {block for block, count in references.items() if count} | set(queued)
        assert set(self._bundles) <= alive, "a bundle is neither held nor cached"
        assert all(self._references[block] == references.get(block, 0) for block in alive), "wrong references"
        used = list(chain.from_iterable(map(self.blocks_of, alive)))
        blank_blocks = [block for block in self._free if self._block_to_hash[block] is None]
        assert sorted(used + blank_blocks) == list(range(1, self._num_touched + 1)), "a block is lost"
        num_cached_free = sum(len(self.blocks_of(block)) for block in queued)
        assert num_cached_free == self._num_cached_free, "the count of cached free blocks is wrong"
        num_free = num_cached_free + len(blank_blocks) + self._num_untouched
        assert num_free == self.num_free, f"{num_free} blocks are free, {self.num_free} are noted"
        self._free.check_integrity([*blank_blocks, *queued])

    def _evict_oldest(self, count: int, num_untouched: int) -> list[int]:
        """Evict the `count` least recently used bundles, or all if there are fewer, and return their blocks."""
        evicted: list[int] = []
        queued = self._free.take(min(count, self._num_queued_bundles))
        for block in queued:
            blocks, name = self._bundles.pop(block, (block,)), self._block_to_hash[block]
            assert name is not None, "it is cached"
            self._evict(block)
            if num_untouched:
                self._evicted.add(name, limit=num_untouched, num_blocks=len(blocks))
            evicted += blocks
        self._num_queued_bundles -= len(queued)
        self._num_cached_free -= len(evicted)
        return evicted

    def _dissolve(self, bundle: int) -> None:
        """Queue the blocks of a bundle without content, to be taken next."""
        for block in self._bundles.pop(bundle, (bundle,)):
            self._free.prepend(block)


class GroupUsage:
    """Counts the blocks that requests hold in one group and its twins. A `GroupedBlockManager` owns it."""

    def __init__(self, group: GroupRules, pool: BundlePool) -> None:
        """
        Args:
            pool: The pool that the groups draw from.
        """
        self.num_held = 0
        """Blocks that requests hold. Those that several hold count once."""
        self._group, self._pool = group, pool
        self._num_hit = 0
        self._num_released = 0

    def take(self, count: int) -> list[list[int]]:
        """Return what `BundlePool.take_bundles` does."""
        num_twins = self._group.num_twins
        self.num_held += count * num_twins
        return self._pool.take_bundles(count, num_twins)

    def share(self, bundles: Sequence[int]) -> None:
        """Hold cached bundles that a request begins with."""
        self.hold(bundles)
        self._num_hit += len(bundles) * self._group.num_twins

    def hold(self, bundles: Sequence[int]) -> None:
        """Hold bundles that are held or cached once more."""
        num_free = self._pool.num_free
        self._pool.share(bundles)
        self.num_held += num_free - self._pool.num_free

    def release(self, bundles: Iterable[int]) -> None:
        """Give bundles up, in this order."""
        num_free = self._pool.num_free
        self._pool.release(bundles)
        self.num_held -= self._pool.num_free - num_free

    def release_unseen(self, bundles: Sequence[int]) -> None:
        """Give up bundles that no later query of their row sees."""
        self.release(bundles)
        self._num_released += len(bundles) * self._group.num_twins

    def add_totals(self, usages: Iterable[GroupUsage]) -> None:
        """Add what was counted of such groups for the worker before."""
        for usage in usages:
            if usage._group.name == self._group.name:
                self._num_hit += usage._num_hit
                self._num_released += usage._num_released

    def status(self) -> GroupStatus:
        """Return the counts as they are now."""
        group, pool = self._group, self._pool
        return GroupStatus(
            name=group.name,
            num_groups=group.num_twins,
            num_blocks=pool.num_blocks - 1,
            num_used_blocks=self.num_held,
            num_hit_blocks=self._num_hit,
            num_released_blocks=self._num_released,
            num_snapshots=pool.num_cached if group.is_state else 0,
        )
