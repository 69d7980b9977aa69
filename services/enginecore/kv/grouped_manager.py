"""Blocks of a model with several groups of layers, or with one that does not keep every key."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import repeat

import numpy as np

from triptych.types.facts import KvLayout
from triptych.types.step import U32
from triptych_services.enginecore.kv.block_table import NULL_BLOCK, BlockTable, GroupTable
from triptych_services.enginecore.kv.budget import GroupedBlockBudget
from triptych_services.enginecore.kv.bundle_pool import BundlePool, GroupUsage
from triptych_services.enginecore.kv.cache_changes import CachedPrefixes
from triptych_services.enginecore.kv.groups import Count, GroupRules, Ints, PoolCounts, rules_of
from triptych_services.enginecore.kv.manager import BlockManager, Growth
from triptych_services.enginecore.kv.moved_prompts import MovedGroups
from triptych_services.enginecore.kv.prefix_hits import GroupHits, PrefixLookup
from triptych_services.enginecore.kv.state_snapshots import StateSnapshots


class GroupedBlockManager(BlockManager):
    """A `BlockManager` with a table per request and kind of group. Tables hold bundles: see `BundlePool`.

    Blocks of states have ids of their own. Where both kinds are in one list, that of a state is negative.
    """

    def __init__(self, kv: KvLayout, *, enable_prefix_caching: bool, longest_step: int) -> None:
        """Start with all blocks free.

        Args:
            longest_step: As in `groups`.
        """
        super().__init__(num_blocks=1, block_size=kv.block_size, enable_prefix_caching=enable_prefix_caching)
        self.groups = rules_of(kv)
        self.releasing = tuple(group for group in self.groups if group.releases)
        self._cached_prefixes = CachedPrefixes(self.groups, kv.block_size)
        self._kv_pool = BundlePool(max(kv.num_blocks, 1), kv.soft_num_blocks, self._cached_prefixes)
        self._state_pool = BundlePool(max(kv.num_state_blocks, 1), None, self._cached_prefixes)
        self._pools = [self._state_pool if group.is_state else self._kv_pool for group in self.groups]
        self.pool = self._state_pool if all(group.is_state for group in self.groups) else self._kv_pool
        self.usages = [GroupUsage(group, pool) for group, pool in zip(self.groups, self._pools, strict=True)]
        self._state_groups = [group for group in self.groups if group.is_state]
        self._even_groups = [
            group for group in self.groups if not group.is_state and group.block_size == kv.block_size
        ]
        """Groups of keys and values with the blocks that hashes name."""
        self._wide_groups = [
            group for group in self.groups if not group.is_state and group.block_size != kv.block_size
        ]
        self.grows_evenly = len(self._even_groups) == len(self.groups)
        self._lookup = PrefixLookup(
            self.groups, self._pools, kv.block_size, continues_states=kv.continues_states
        )
        self.budget: GroupedBlockBudget = GroupedBlockBudget(
            self.groups, self._kv_pool, self._state_pool, kv.block_size, longest_step
        )
        states = [group.block_size for group in self.groups if group.is_state]
        self.step_end_every = min(states, default=0)
        if kv.continues_states:
            self.snapshots = self._create_snapshots()
        self.moved_prompts = MovedGroups(
            self.groups,
            self._pools,
            self.usages,
            self._lookup,
            self._cached_prefixes,
            self.snapshots,
            block_size=kv.block_size,
        )

    def _create_snapshots(self) -> StateSnapshots:
        (group,) = self._state_groups
        return StateSnapshots(
            group,
            self._state_pool,
            self.usages[group.index],
            self._cached_prefixes,
            block_size=self.block_size,
            unit=self._lookup.alignment,
            note_cached=lambda page: self._newly_cached.append(-page),
        )

    def get_computed_blocks(self, table: BlockTable, token_ids: array[int]) -> Sequence[int]:
        """Return the blocks of the longest prefix of `token_ids` that every group can serve.

        One token at least is left to be computed, since the last one's position needs the window before it.
        """
        if not self.is_cached(table):
            return []
        num_tokens = (len(token_ids) - 1) // self._lookup.alignment * self._lookup.alignment
        if num_tokens <= 0:
            return []
        table.extend_hashes(token_ids, num_tokens // self.block_size, self.block_size)
        return self._lookup.find(table.hashes, num_tokens) or []

    def allocate(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        assert not table.groups or not any(own.block_ids for own in table.groups), "it has blocks already"
        lacking = self.budget.more_blocks(len(hits) * self.block_size, num_tokens)
        shared = hits.tables if isinstance(hits, GroupHits) else ((),) * len(self.groups)
        for group, pool in zip(self.groups, self._pools, strict=True):
            num_taken = pool.num_free_among(block for block in shared[group.index] if block) * group.num_twins
            num_taken += group.continues_at(len(hits) * self.block_size)
            lacking += PoolCounts(0, num_taken) if group.is_state else PoolCounts(num_taken, 0)
        if lacking > self.budget.num_free:
            return None
        table.num_hits = len(hits)
        table.groups = tuple(GroupTable(table.block_ids if not group.index else []) for group in self.groups)
        for group, usage, own in zip(self.groups, self.usages, table.groups, strict=True):
            blocks = shared[group.index]
            own.num_released = group.first_needed(len(hits) * self.block_size) if blocks else 0
            usage.share(blocks[own.num_released :])
            own.num_settled = len(hits) * self.block_size // group.block_size
            own.block_ids += blocks
        table.num_cached = len(hits)
        for group, own in zip(self.groups, table.groups, strict=True):  # once all hits are held
            num_new = group.blocks_for(num_tokens) - len(own.block_ids)
            own.block_ids += self.usages[group.index].take(num_new)[0]
        return table.block_ids

    def grow(self, tables: Sequence[BlockTable], capacities: Ints, ends: Ints) -> Sequence[Growth]:
        growths: list[Growth] = []
        size_to_added: dict[int, tuple[Ints, list[int]]] = {}
        for group, usage in zip(self.groups, self.usages, strict=True):
            size, index = group.block_size, group.index
            if size not in size_to_added:
                added = self.budget.nums_new(capacities, ends, size)
                size_to_added[size] = added, added.tolist()
            nums_new, counts = size_to_added[size]
            if not (num_all := sum(counts)):
                continue
            of_twins = usage.take(num_all)
            bundles, start = of_twins[0], 0
            if num_all == len(tables) and 0 not in counts:  # a bundle each, as while rows decode
                for table, bundle in zip(tables, bundles, strict=True):
                    table.groups[index].block_ids.append(bundle)
            else:
                for table, num_new in zip(tables, counts, strict=True):
                    table.groups[index].block_ids += bundles[start : start + num_new]
                    start += num_new
            growths += map(Growth, repeat(nums_new), of_twins, group.members)
        return growths

    def grow_by_one(self, tables: Sequence[BlockTable]) -> Sequence[Growth]:
        growths: list[Growth] = []
        for group, usage in zip(self.groups, self.usages, strict=True):
            index, of_twins = group.index, usage.take(len(tables))
            for table, bundle in zip(tables, of_twins[0], strict=True):
                table.groups[index].block_ids.append(bundle)
            growths += map(Growth, repeat(None), of_twins, group.members)
        return growths

    def further_ids(self, table: BlockTable) -> tuple[U32, ...]:
        ids = [np.empty(0, np.uint32)] * sum(group.num_twins for group in self.groups)
        for group, pool, own in zip(self.groups, self._pools, table.groups, strict=True):
            nothing = (NULL_BLOCK,) * group.num_twins
            rows = [pool.blocks_of(bundle) if bundle else nothing for bundle in own.block_ids]
            columns = np.array(rows, np.uint32).reshape(-1, group.num_twins).T
            for member, column in zip(group.members, columns, strict=True):
                ids[member] = column.copy()
                ids[member].flags.writeable = False
        return tuple(ids[1:])

    def release_unseen(
        self, group: GroupRules, tables: Sequence[BlockTable], nums_needless: Sequence[int]
    ) -> None:
        bundles: list[int] = []
        index, is_state = group.index, group.is_state
        ratio = 1 if is_state else group.block_size // self.block_size
        for table, num_needless in zip(tables, nums_needless, strict=True):
            own = table.groups[index]
            first, own.num_released = own.num_released, num_needless
            num_settled = own.num_settled if is_state else table.num_cached
            if num_settled < num_needless * ratio:
                assert not self.is_cached(table), "not cached yet"
            if num_needless == first + 1:  # as while rows decode
                bundles.append(own.block_ids[first])
                own.block_ids[first] = NULL_BLOCK
            else:
                bundles += own.block_ids[first:num_needless]
                own.block_ids[first:num_needless] = [NULL_BLOCK] * (num_needless - first)
        self.usages[group.index].release_unseen(bundles)

    def cache_full_blocks(
        self, filled: Iterable[tuple[BlockTable, array[int], int]], *, is_planning: bool = False
    ) -> None:
        unit, wide = self.block_size, self._wide_groups
        even = [group.index for group in self._even_groups]
        named: list[bytes] = []
        chains: list[tuple[Sequence[bytes], int, int]] = []
        bundles: list[list[int]] = [[] for _ in self.groups]
        keys: list[list[bytes]] = [[] for _ in self.groups]
        filled = [each for each in filled if self.enable_prefix_caching or each[0].is_shared]
        for table, token_ids, num_tokens in filled:
            first, end = table.num_cached, num_tokens // unit
            if end <= first:
                continue
            if end > len(table.hashes):
                table.extend_hashes(token_ids, end, unit)
            table.num_cached = end
            hashes, groups = table.hashes, table.groups
            chains.append((hashes, first, end))
            if end == first + 1:  # as while rows decode
                named.append(hashes[first])
                for index in even:
                    bundles[index].append(groups[index].block_ids[first])
            else:
                named += hashes[first:end]
                for index in even:
                    bundles[index] += groups[index].block_ids[first:end]
            for group in wide:
                full = slice(first * unit // group.block_size, end * unit // group.block_size)
                bundles[group.index] += groups[group.index].block_ids[full]
                keys[group.index] += group.keys(hashes, full.start, full.stop, unit)
        if not (named or self._state_groups):
            return
        for group in self._even_groups:
            keys[group.index] = [name + group.suffix for name in named] if group.suffix else named
        for group in self._state_groups:
            self._collect_pages(group, filled, bundles[group.index], keys[group.index], is_planning)
        self._cache(bundles, keys, chains, len(named))

    def _cache_next_blocks(self, tables: Sequence[BlockTable], hashes: Sequence[bytes]) -> None:
        bundles: list[int] = []
        keys: list[bytes] = []
        num_blocks = 0
        for group in self.groups:
            index, suffix = group.index, group.suffix
            bundles += [table.groups[index].block_ids[table.num_cached] for table in tables]
            keys += [name + suffix for name in hashes] if suffix else hashes
            num_blocks += len(tables) * group.num_twins
        for table in tables:
            table.num_cached += 1
        cached, stored = self._kv_pool.cache_bundles(bundles, keys, num_blocks)
        self._newly_cached += cached
        if len(stored) == len(bundles):
            self._cached_prefixes.note_next_stored([table.hashes for table in tables])
        else:
            for table in tables:
                self._cached_prefixes.add_chain(table.hashes, table.num_cached)
            self._cached_prefixes.note_stored(stored)

    def _collect_pages(
        self,
        group: GroupRules,
        filled: Sequence[tuple[BlockTable, array[int], int]],
        pages: list[int],
        keys: list[bytes],
        is_planning: bool,
    ) -> None:
        """Append the pages of states that can be cached, and their names. The arguments are those of the caller."""
        for table, _, num_tokens in filled:
            own = table.groups[group.index]
            first, num_full = own.num_settled, num_tokens // group.block_size
            if is_planning:  # the step writes the last page
                num_full = min(num_full, len(own.block_ids) - 1)
            if num_full > first:
                self._cached_prefixes.add_chain(table.hashes, num_full * group.block_size // self.block_size)
                pages += own.block_ids[first:num_full]
                keys += group.keys(table.hashes, first, num_full, self.block_size)
                own.num_settled = num_full

    def _cache(
        self,
        bundles: Sequence[list[int]],
        keys: Sequence[list[bytes]],
        chains: Sequence[tuple[Sequence[bytes], int, int]],
        num_named: int,
    ) -> None:
        """Cache bundles of each group, all of a pool at once.

        Args:
            chains: As of `CachedPrefixes.note_stored_whole`, of the bundles of keys and values.
            num_named: The prefixes that end with these bundles.
        """
        of_pool: tuple[list[int], list[int]] = ([], [])
        named_in: tuple[list[bytes], list[bytes]] = ([], [])
        for group in self.groups:
            of_pool[group.is_state].extend(bundles[group.index])
            named_in[group.is_state].extend(keys[group.index])
        if of_pool[False]:
            cached, stored = self._kv_pool.cache_bundles(of_pool[False], named_in[False])
            self._newly_cached += cached
            if len(stored) == num_named * len(self.groups):
                self._cached_prefixes.note_stored_whole(chains)
            else:
                for hashes, _, end in chains:
                    self._cached_prefixes.add_chain(hashes, end)
                self._cached_prefixes.note_stored(stored)
        if of_pool[True]:
            cached, stored = self._state_pool.cache_bundles(of_pool[True], named_in[True])
            self._newly_cached += [-page for page in cached]
            self._cached_prefixes.note_stored(stored)

    def uncache(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block > 0:
                self._kv_pool.uncache(block)
            else:
                self._state_pool.uncache(-block)

    def named_blocks(self, table: BlockTable) -> list[int]:
        return self._lookup.named(table.hashes, 0)

    def own_blocks(self, table: BlockTable, num_trusted: int) -> list[int]:
        """Return the blocks that the holder of a table has written, and those of the same content.

        What it has released is in the cache still, and known by its content only.
        """
        blocks = self._lookup.named(table.hashes, num_trusted)
        for group, own in zip(self.groups, table.groups, strict=True):
            first = max(own.num_released, num_trusted * self.block_size // group.block_size)
            held = own.block_ids[first:]
            blocks += [-block for block in held] if group.is_state else held
        return blocks

    def has_read(self, table: BlockTable, blocks: Set[int]) -> bool:
        """Return whether the holder of a table may have begun with any of these blocks: it began with some.

        Those that it has released since are not known any more.
        """
        return bool(table.num_hits and blocks)

    def free(self, table: BlockTable) -> None:
        for usage, own in zip(self.usages, table.groups, strict=False):
            usage.release(reversed(own.block_ids[own.num_released :]))
            if own.read_page:
                usage.release([own.read_page])
            own.read_page = 0
            own.block_ids.clear()
        table.groups = ()
        table.num_hits = table.num_cached = 0

    def blocks_freed_by(self, tables: Iterable[BlockTable]) -> Iterator[Count]:
        references: dict[int, int] = {}
        for table in tables:
            nums_freed = [0, 0]
            for group, pool, own in zip(self.groups, self._pools, table.groups, strict=True):
                sign = -1 if group.is_state else 1
                for block in own.block_ids[own.num_released :]:
                    num_left = references.get(sign * block) or pool.num_references(block)
                    references[sign * block] = num_left - 1
                    nums_freed[int(group.is_state)] += (num_left == 1) * group.num_twins
            yield PoolCounts(*nums_freed)

    def reset(self) -> bool:
        if self._kv_pool.num_held or self._state_pool.num_held:
            return False
        self._kv_pool.uncache_all()
        self._state_pool.uncache_all()
        self._newly_cached.clear()
        return True

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        references: dict[int, Counter[int]] = {id(pool): Counter() for pool in self._pools}
        bundles: list[set[int]] = [set() for _ in self.groups]
        for table in tables:
            for group, own in zip(self.groups, table.groups, strict=bool(table.groups)):
                num_settled = self._num_settled(group, table)
                assert num_settled <= len(own.block_ids), "more cached than held"
                held = own.block_ids[own.num_released :] + [own.read_page] * bool(own.read_page)
                assert not any(own.block_ids[: own.num_released]), "a block was released and is held"
                assert NULL_BLOCK not in held, "the null block is held"
                references[id(self._pools[group.index])].update(held)
                bundles[group.index].update(held)
        for group, usage in zip(self.groups, self.usages, strict=True):
            num_held = len(bundles[group.index]) * group.num_twins
            assert usage.num_held == num_held, f"{num_held} blocks are held, {usage.num_held} are counted"
        for pool in {id(pool): pool for pool in self._pools}.values():
            counted = references[id(pool)]
            pool.check_integrity(counted)

    def _num_settled(self, group: GroupRules, table: BlockTable) -> int:
        """Return how many leading bundles of a table were given to the prefix cache, or came from there."""
        if group.is_state:
            return table.groups[group.index].num_settled
        return table.num_cached * self.block_size // group.block_size


def create_block_manager(kv: KvLayout, *, enable_prefix_caching: bool, longest_step: int) -> BlockManager:
    """Return the manager of a worker's blocks.

    Args:
        longest_step: As in `groups`.
    """
    if kv.is_plain:
        return BlockManager(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            enable_prefix_caching=enable_prefix_caching,
            soft_num_blocks=kv.soft_num_blocks,
        )
    return GroupedBlockManager(kv, enable_prefix_caching=enable_prefix_caching, longest_step=longest_step)
