"""Blocks of a model with several groups of layers, or with one that does not keep every key."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from math import lcm

import numpy as np

from triptych.types.facts import KvLayout
from triptych_services.enginecore.kv.block_table import NULL_BLOCK, BlockTable, GroupTable
from triptych_services.enginecore.kv.budget import GroupedBlockBudget, GroupHits
from triptych_services.enginecore.kv.cache_changes import CachedPrefixes
from triptych_services.enginecore.kv.groups import Count, GroupRules, Ints, PoolCounts, rules_of, twins_of
from triptych_services.enginecore.kv.manager import BlockManager, Growth
from triptych_services.enginecore.kv.pool import BlockPool


class GroupedBlockManager(BlockManager):
    """A `BlockManager` with a table per group and request.

    Blocks of states have ids of their own. Where both kinds are in one list, that of a state is negative.
    """

    def __init__(self, kv: KvLayout, *, enable_prefix_caching: bool, longest_step: int) -> None:
        """Start with all blocks free.

        Args:
            longest_step: As in `groups`.
        """
        super().__init__(num_blocks=1, block_size=kv.block_size, enable_prefix_caching=enable_prefix_caching)
        self.groups = rules_of(kv)
        self.releasing = twins_of(self.groups)
        self._cached_prefixes = CachedPrefixes(self.groups, kv.block_size)
        self._kv_pool = BlockPool(max(kv.num_blocks, 1), kv.soft_num_blocks, self._cached_prefixes)
        self._state_pool = BlockPool(max(kv.num_state_blocks, 1), None, self._cached_prefixes)
        self._pools = [self._state_pool if group.is_state else self._kv_pool for group in self.groups]
        self.pool = self._state_pool if all(group.is_state for group in self.groups) else self._kv_pool
        self._alignment = lcm(*(group.block_size for group in self.groups))
        self.budget: GroupedBlockBudget = GroupedBlockBudget(
            self.groups, self._kv_pool, self._state_pool, kv.block_size, longest_step
        )
        states = [group.block_size for group in self.groups if group.is_state]
        self.step_end_every = min(states, default=0)

    def get_computed_blocks(self, table: BlockTable, token_ids: array[int]) -> Sequence[int]:
        """Return the blocks of the longest prefix of `token_ids` that every group can serve.

        One token at least is left to be computed, since the last one's position needs the window before it.
        """
        if not self.is_cached(table):
            return []
        num_tokens = (len(token_ids) - 1) // self._alignment * self._alignment
        if num_tokens <= 0:
            return []
        table.extend_hashes(token_ids, num_tokens // self.block_size, self.block_size)
        num_tokens = self._longest_hit(table.hashes, num_tokens)
        if not num_tokens:
            return []
        tables = tuple(self._blocks_behind(group, table.hashes, num_tokens) for group in self.groups)
        return GroupHits(num_tokens // self.block_size, tables)

    def allocate(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        assert not table.groups or not any(own.block_ids for own in table.groups), "it has blocks already"
        lacking = self.budget.more_blocks(len(hits) * self.block_size, num_tokens)
        shared = hits.tables if isinstance(hits, GroupHits) else ((),) * len(self.groups)
        for group, pool in zip(self.groups, self._pools, strict=True):
            num_taken = pool.num_free_among(block for block in shared[group.index] if block)
            lacking += PoolCounts(0, num_taken) if group.is_state else PoolCounts(num_taken, 0)
        if lacking > self.budget.num_free:
            return None
        table.num_hits = len(hits)
        table.groups = tuple(GroupTable(table.block_ids if not group.index else []) for group in self.groups)
        for group, pool, own in zip(self.groups, self._pools, table.groups, strict=True):
            blocks = shared[group.index]
            own.num_released = group.first_needed(len(hits) * self.block_size) if blocks else 0
            pool.share(blocks[own.num_released :])
            own.num_settled = len(blocks)
            own.block_ids += blocks
        table.num_cached = len(hits)
        for group, pool, own in zip(
            self.groups, self._pools, table.groups, strict=True
        ):  # once all hits are held
            own.block_ids += pool.take(group.blocks_for(num_tokens) - len(own.block_ids))
        return table.block_ids

    def grow(self, tables: Sequence[BlockTable], capacities: Ints, ends: Ints) -> Growth:
        size_to_added = {
            size: (-(-ends // size) - -(-capacities // size))
            for size in {each.block_size for each in self.groups}
        }
        nums_new = sum((size_to_added[group.block_size] for group in self.groups), np.zeros_like(ends))
        num_state = sum(int(size_to_added[group.block_size].sum()) for group in self.groups if group.is_state)
        state_blocks = self._state_pool.take(num_state)
        kv_blocks = self._kv_pool.take(int(nums_new.sum()) - num_state)
        columns = [size_to_added[group.block_size].tolist() for group in self.groups]
        block_ids: list[int] = []
        block_groups: list[int] = []
        kv_start = state_start = 0
        for table, *nums in zip(tables, *columns, strict=True):
            for index, (own, num_new) in enumerate(zip(table.groups, nums, strict=True)):
                if not num_new:
                    continue
                if self.groups[index].is_state:
                    blocks = state_blocks[state_start : state_start + num_new]
                    state_start += num_new
                else:
                    blocks = kv_blocks[kv_start : kv_start + num_new]
                    kv_start += num_new
                own.block_ids += blocks
                block_ids += blocks
                block_groups += [index] * num_new
        return Growth(nums_new, block_ids, block_groups)

    def release_unseen(self, twins: Sequence[GroupRules], needless: Sequence[tuple[BlockTable, int]]) -> None:
        for group in twins:
            blocks: list[int] = []
            for table, num_needless in needless:
                own = table.groups[group.index]
                assert own.num_settled >= num_needless or not self.is_cached(table), "not cached yet"
                first = own.num_released
                blocks += own.block_ids[first:num_needless]
                own.block_ids[first:num_needless] = [NULL_BLOCK] * (num_needless - first)
                own.num_released = num_needless
            self._pools[group.index].release(blocks)

    def cache_full_blocks(
        self, filled: Iterable[tuple[BlockTable, array[int], int]], *, is_planning: bool = False
    ) -> None:
        caches_all, unit = self.enable_prefix_caching, self.block_size
        blocks: tuple[list[int], list[int]] = ([], [])
        keys: tuple[list[bytes], list[bytes]] = ([], [])
        for table, token_ids, num_tokens in filled:
            num_named = num_tokens // unit
            if num_named <= table.num_cached or not (caches_all or table.is_shared):
                continue
            if num_named > len(table.hashes):
                table.extend_hashes(token_ids, num_named, unit)
            self._cached_prefixes.add_chain(table.hashes, num_named)
            for group, own in zip(self.groups, table.groups, strict=True):
                first, num_full = own.num_settled, num_tokens // group.block_size
                if group.is_state and is_planning:  # the step writes the last page
                    num_full = min(num_full, len(own.block_ids) - 1)
                if num_full > first:
                    blocks[group.is_state].extend(own.block_ids[first:num_full])
                    keys[group.is_state].extend(group.keys(table.hashes, first, num_full, unit))
                    own.num_settled = num_full
            if not (is_planning and self.step_end_every):  # a page of a state may follow
                table.num_cached = num_named
        if blocks[False]:
            self._newly_cached += self._kv_pool.cache(blocks[False], keys[False])
        if blocks[True]:
            self._newly_cached += [-block for block in self._state_pool.cache(blocks[True], keys[True])]

    def uncache(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block > 0:
                self._kv_pool.uncache(block)
            else:
                self._state_pool.uncache(-block)

    def named_blocks(self, table: BlockTable) -> list[int]:
        return self._named_behind(table, 0)

    def own_blocks(self, table: BlockTable, num_trusted: int) -> list[int]:
        """Return the blocks that the holder of a table has written, and those of the same content.

        What it has released is in the cache still, and known by its content only.
        """
        blocks = self._named_behind(table, num_trusted)
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
        for pool, own in zip(self._pools, table.groups, strict=False):
            pool.release(reversed(own.block_ids[own.num_released :]))
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
                    nums_freed[int(group.is_state)] += num_left == 1
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
        for table in tables:
            for pool, own in zip(self._pools, table.groups, strict=bool(table.groups)):
                held = own.block_ids[own.num_released :]
                assert not any(own.block_ids[: own.num_released]), "a block was released and is held"
                assert NULL_BLOCK not in held, "the null block is held"
                assert own.num_settled <= len(own.block_ids), "more cached than held"
                references[id(pool)].update(held)
        for pool in {id(pool): pool for pool in self._pools}.values():
            counted = references[id(pool)]
            pool.check_integrity(counted)

    def _longest_hit(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Return the most tokens up to `num_tokens`, a multiple of every block size, that all groups can serve."""
        unit, alignment = self.block_size, self._alignment
        for group, pool in zip(self.groups, self._pools, strict=True):
            if not group.releases:
                run = pool.find_run(group.keys(hashes, 0, num_tokens // group.block_size, unit))
                num_tokens = len(run) * group.block_size // alignment * alignment
        is_settled = False
        while num_tokens and not is_settled:
            is_settled = True
            for group, pool in zip(self.groups, self._pools, strict=True):
                while num_tokens and group.releases:
                    end = num_tokens // group.block_size
                    first = group.first_needed(num_tokens)
                    keys = group.keys(hashes, first, end, unit)
                    missing = next(
                        (at for at in range(end - 1, first - 1, -1) if pool.find(keys[at - first]) is None),
                        None,
                    )
                    if missing is None:
                        break
                    is_settled = False
                    num_tokens = min(missing * group.block_size, num_tokens - 1) // alignment * alignment
            if num_tokens and not self._needs_any(num_tokens):  # only chunks, of which a new one begins here
                is_settled = False
                num_tokens -= alignment
        return num_tokens

    def _needs_any(self, num_tokens: int) -> bool:
        """Return whether a request that goes on behind so many tokens reads any block."""
        return any(group.first_needed(num_tokens) * group.block_size < num_tokens for group in self.groups)

    def _blocks_behind(self, group: GroupRules, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return a group's blocks of a prefix that it can serve."""
        first, end = group.first_needed(num_tokens), num_tokens // group.block_size
        blocks = self._pools[group.index].find_all(group.keys(hashes, first, end, self.block_size))
        return [NULL_BLOCK] * (end - len(blocks)) + blocks

    def _named_behind(self, table: BlockTable, num_trusted: int) -> list[int]:
        """Return the cached blocks with the content of a table behind its first `num_trusted` hashes."""
        blocks: list[int] = []
        for group, pool in zip(self.groups, self._pools, strict=True):
            ratio = group.block_size // self.block_size
            keys = group.keys(table.hashes, num_trusted // ratio, len(table.hashes) // ratio, self.block_size)
            found = pool.find_all(keys)
            blocks += [-block for block in found] if group.is_state else found
        return blocks


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
