"""Counts of blocks: those that requests need, those that were promised to them, and those that are free.

Nothing is given out here. Where there are groups, a count is that of both pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from triptych_services.enginecore.kv.block_table import BlockTable, GroupTable
from triptych_services.enginecore.kv.bundle_pool import BundlePool
from triptych_services.enginecore.kv.groups import Count, GroupRules, Ints, PoolCounts
from triptych_services.enginecore.kv.pool import BlockPool
from triptych_services.enginecore.kv.prefix_hits import GroupHits


class BlockBudget:
    """The counts of one full group. Owned by the block manager."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    @property
    def fit_credit(self) -> Count:
        """A number that grows whenever any request comes closer to fitting.

        A request that lacked n blocks need not be tried again until it has grown by n.
        """
        return self._pool.num_free + self._pool.num_shareable_gained

    def num_lacking_to_grow(self, capacities: Ints, ends: Ints) -> Count:
        """Return how many of the blocks that rows grow by are not free; 0 or less: there are enough.

        Args:
            capacities: [n] positions that the blocks of each hold.
            ends: [n] positions that they must hold.
        """
        return int(np.add.reduce(self.nums_new(capacities, ends, self._block_size))) - self._pool.num_free

    def has_one_for(self, count: int) -> bool:
        """Return whether so many rows can grow by one block of each group."""
        return count <= self._pool.num_free

    def needs(self, capacities: Ints, ends: Ints) -> Sequence[Count]:
        """Return the blocks that each row grows by, [n]. The arguments are those of `num_lacking_to_grow`."""
        needs: list[int] = self.nums_new(capacities, ends, self._block_size).tolist()
        return needs

    def nums_new(self, capacities: Ints, ends: Ints, size: int) -> Ints:
        """Return how many blocks of `size` tokens each row grows by, [n]."""
        if size == self._block_size:  # capacities end with a block
            return -(-np.maximum(ends - capacities, 0) // size)
        return np.maximum(-(-ends // size) - -(-capacities // size), 0)

    def most_tokens(self, capacity: int, end: int, count: int, taken: Count) -> tuple[int, Count]:
        """Return how many of `count` more tokens a row can have blocks for.

        Args:
            capacity: Positions that its blocks hold, or will hold.
            end: Positions that they must hold without those tokens.
            taken: Free blocks that others have been given meanwhile.

        Returns:
            The number of tokens, and `taken` with the blocks for them.
        """
        assert isinstance(taken, int), "one pool"
        held, block_size = capacity - end, self._block_size
        count = min(count, held + (self._pool.num_free - taken) * block_size)
        return count, taken + max(-(-(count - held) // block_size), 0)

    def num_promised(self, known: Ints, capacities: Ints, released: Ints) -> Count:
        """Count the blocks that running rows still need for known tokens: those of prompts computed in chunks.

        Args:
            known: [n] known tokens of each row.
            capacities: [n] positions that its blocks hold.
            released: [num_groups, n] blocks that it has released.
        """
        return int((-(-np.maximum(known - capacities, 0) // self._block_size)).sum())

    def num_outstanding(self, table: BlockTable, num_tokens: int) -> Count:
        """Return how many more blocks a table needs until it holds so many tokens."""
        return max(-(-num_tokens // self._block_size) - len(table.block_ids), 0)

    def num_lacking(self, num_tokens: int, hits: Sequence[int] = (), num_promised: Count = 0) -> Count:
        """Return how many more blocks must become free before a request without blocks fits; 0 or less: it fits.

        A hit that no request holds is in the free queue, so it takes a free block.

        Args:
            num_tokens: Tokens that the request must have blocks for.
            hits: Cached blocks that the request shares.
            num_promised: Free blocks that other requests are to get.
        """
        num_shared = len(hits) - self._pool.num_free_among(hits)
        return -(-num_tokens // self._block_size) - num_shared + num_promised - self._pool.num_free


class GroupedBlockBudget(BlockBudget):
    """The counts of several groups, or of one that does not keep every key."""

    def __init__(
        self,
        groups: Sequence[GroupRules],
        kv_pool: BundlePool,
        state_pool: BundlePool,
        block_size: int,
        longest_step: int,
    ) -> None:
        """
        Args:
            block_size: Tokens of the blocks that hashes name.
            longest_step: As in `groups`.
        """
        super().__init__(kv_pool, block_size)
        self._groups = groups
        self._kv_pool, self._state_pool = kv_pool, state_pool
        self._pools = [state_pool if group.is_state else kv_pool for group in groups]
        self._unit = block_size
        self._longest_step = longest_step
        self._kinds: Counter[tuple[int, int]] = Counter()
        """Pool and block size -> groups that have them."""
        for group in groups:
            self._kinds[int(group.is_state), group.block_size] += group.num_twins
        self._num_kv_groups = sum(group.num_twins for group in groups if not group.is_state)
        self._num_state_groups = sum(group.num_twins for group in groups if group.is_state)

    @property
    def fit_credit(self) -> Count:
        kv, state = self._kv_pool, self._state_pool
        return PoolCounts(kv.num_free + kv.num_shareable_gained, state.num_free + state.num_shareable_gained)

    def num_lacking_to_grow(self, capacities: Ints, ends: Ints) -> Count:
        lacking = [-self._kv_pool.num_free, -self._state_pool.num_free]
        for (is_state, size), num_groups in self._kinds.items():
            lacking[is_state] += num_groups * int(np.add.reduce(self.nums_new(capacities, ends, size)))
        return PoolCounts(*lacking)

    def has_one_for(self, count: int) -> bool:
        if count * self._num_state_groups > self._state_pool.num_free:
            return False
        return count * self._num_kv_groups <= self._kv_pool.num_free

    def needs(self, capacities: Ints, ends: Ints) -> Sequence[Count]:
        nums_new = np.zeros((2, len(ends)), np.int64)
        for (is_state, size), num_groups in self._kinds.items():
            nums_new[is_state] += num_groups * self.nums_new(capacities, ends, size)
        return [PoolCounts(kv, state) for kv, state in nums_new.T.tolist()]

    def most_tokens(self, capacity: int, end: int, count: int, taken: Count) -> tuple[int, Count]:
        more = self.more_blocks(capacity, end + count)
        if taken + more > self.num_free:
            return max(min(count, capacity - end), 0), taken
        return count, taken + more

    def num_promised(self, known: Ints, capacities: Ints, released: Ints) -> Count:
        promised = [0, 0]
        for group in self._groups:
            reached = group.blocks_for(capacities)
            lacking = np.maximum(group.blocks_for(known) - reached, 0)
            if (most := group.most_held(self._longest_step)) is not None:
                room = most - (reached - released[group.index])
                lacking = np.minimum(lacking, np.maximum(room, 0))
            promised[int(group.is_state)] += int(lacking.sum()) * group.num_twins
        return PoolCounts(*promised)

    def num_outstanding(self, table: BlockTable, num_tokens: int) -> Count:
        nums = [0, 0]
        tables = table.groups or [GroupTable([]) for _ in self._groups]
        for group, own in zip(self._groups, tables, strict=True):
            lacking = max(group.blocks_for(num_tokens) - len(own.block_ids), 0)
            if (most := group.most_held(self._longest_step)) is not None:
                lacking = min(lacking, max(most - (len(own.block_ids) - own.num_released), 0))
            nums[int(group.is_state)] += lacking * group.num_twins
        return PoolCounts(*nums)

    def num_lacking(self, num_tokens: int, hits: Sequence[int] = (), num_promised: Count = 0) -> Count:
        start = len(hits) * self._unit
        nums = [0, 0]
        for group, pool in zip(self._groups, self._pools, strict=True):
            num_needed = group.peak(start, num_tokens, self._longest_step)
            if isinstance(hits, GroupHits):
                shared = [block for block in hits.tables[group.index] if block]
                num_needed -= (len(shared) - pool.num_free_among(shared)) * group.num_twins
            nums[int(group.is_state)] += num_needed
        return PoolCounts(*nums) + num_promised - self.num_free

    @property
    def num_free(self) -> PoolCounts:
        return PoolCounts(self._kv_pool.num_free, self._state_pool.num_free)

    def more_blocks(self, capacity: int, end: int) -> PoolCounts:
        """Return how many blocks a table that holds `capacity` positions grows by to hold `end`."""
        nums = [0, 0]
        for group in self._groups:
            num_new = max(group.blocks_for(end) - group.blocks_for(capacity), 0)
            nums[int(group.is_state)] += num_new * group.num_twins
        return PoolCounts(*nums)
