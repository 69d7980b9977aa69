"""Decides which KV blocks a request holds, and finds the cached blocks of a new request's prompt.

Here is the case of one group of layers that keeps every key; `grouped_manager` has the others.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from triptych.prefix_hash import hash_next_blocks, root_hash
from triptych.types.step import U32
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.budget import BlockBudget
from triptych_services.enginecore.kv.bundle_pool import GroupUsage
from triptych_services.enginecore.kv.groups import Count, GroupRules, Ints
from triptych_services.enginecore.kv.moved_prompts import MovedPrompts
from triptych_services.enginecore.kv.pool import BlockPool
from triptych_services.enginecore.kv.state_snapshots import StateSnapshots


class Growth(NamedTuple):
    """Blocks of one group that some tables have grown by."""

    nums_new: Ints | None
    """[n] blocks of each table. None: one each."""
    block_ids: list[int]
    """[sum(nums_new)] the blocks, those of the first table first."""
    group: int | None = None
    """Place of the group in the worker's layout. None: there is one."""


class BlockManager:
    """Allocates and caches blocks. The scheduler owns it and decides which requests run.

    Steps run strictly in order on the worker. So a block may be given to another request as soon as no further step
    of its holder will be planned, whatever is still in flight for the holder.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        soft_num_blocks: int | None = None,
    ) -> None:
        """Start with all blocks free.

        Args:
            num_blocks: Number of KV blocks, including the null block.
            block_size: Tokens per block.
            enable_prefix_caching: Whether requests share blocks of equal content.
            soft_num_blocks: Number of blocks above which cached blocks are taken before blocks that were never held;
                None: no such limit.
        """
        self.pool = BlockPool(num_blocks, soft_num_blocks)
        """References and content of each block. Others may read its counts and changes."""
        self.block_size = block_size
        self.budget: BlockBudget = BlockBudget(self.pool, block_size)
        """Counts what requests need of the free blocks."""
        self.moved_prompts = MovedPrompts(self.pool, block_size)
        """Blocks that go to other workers, or come from them."""
        self.enable_prefix_caching = enable_prefix_caching
        self.groups: tuple[GroupRules, ...] = ()
        """Rules of the groups of layers. Empty: there is one that keeps every key."""
        self.releasing: tuple[GroupRules, ...] = ()
        """The groups of which rows release blocks as they go on."""
        self.usages: Sequence[GroupUsage] = ()
        """Counts of blocks by kind of group, of names that differ. Empty: there is one that keeps every key."""
        self.step_end_every = 0
        """Tokens of a block of states, at the ends of which steps of a row end; 0: they may end anywhere."""
        self.snapshots: StateSnapshots | None = None
        """Snapshots of states where prompts end; None: there are none."""
        self.grows_evenly = True
        """Whether a table that is full takes one block of each group, and all are those that hashes name."""
        self._newly_cached: list[int] = []
        self._num_own_roots = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_cached(self, table: BlockTable) -> bool:
        """Return whether requests with the same beginning share the blocks of a table."""
        return self.enable_prefix_caching or table.is_shared

    def hash_prompt(
        self, tables: Sequence[BlockTable], token_ids: array[int], num_prompt_tokens: int
    ) -> None:
        """Hash the full blocks of a prompt once, before it waits.

        Without prefix caching, the choices of one prompt share blocks among themselves.

        Args:
            tables: Tables of new requests with this prompt, equal roots and equal extras.
            token_ids: The prompt, and possibly emitted tokens after it.
            num_prompt_tokens: Length of the prompt.
        """
        first = tables[0]
        if not self.enable_prefix_caching and len(tables) > 1:
            self._num_own_roots += 1
            root = root_hash(b"choices", self._num_own_roots.to_bytes(8, "little"))
            for table in tables:
                table.root_hash, table.is_shared = root, True
        if self.is_cached(first):
            first.extend_hashes(token_ids, num_prompt_tokens // self.block_size, self.block_size)
            for table in tables:
                table.hashes, table.shares_hashes = first.hashes, len(tables) > 1

    def get_computed_blocks(self, table: BlockTable, token_ids: array[int]) -> Sequence[int]:
        """Return the longest run of cached blocks that holds a prefix of `token_ids`. It does not hold them yet."""
        if not self.is_cached(table):
            return []
        num_full = len(token_ids) // self.block_size
        hits: list[int] = []
        while len(hits) < num_full:
            if len(hits) == len(table.hashes):
                table.extend_hashes(token_ids, min(num_full, 2 * len(hits) + 1), self.block_size)
            hits += self.pool.find_run(table.hashes[len(hits) : num_full])
            if len(hits) < len(table.hashes):
                break
        return hits

    def allocate(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Grow a table until it holds `num_tokens` tokens.

        Args:
            table: The request's table; empty if there are hits.
            num_tokens: Tokens that the table must hold.
            hits: Cached blocks that the table begins with.

        Returns:
            The blocks added, hits first. None if there are too few free blocks; then nothing has changed.
        """
        assert not (hits and table.block_ids), "hits can only begin a table"
        num_new = self.blocks_for(num_tokens) - len(table.block_ids) - len(hits)
        if num_new + self.pool.num_free_among(hits) > self.pool.num_free:
            return None
        if hits:
            self.pool.share(hits)
            table.num_hits = table.num_cached = len(hits)
        added = [*hits, *self.pool.take(num_new)] if num_new > 0 else [*hits]
        table.block_ids += added
        return added

    def grow(self, tables: Sequence[BlockTable], capacities: Ints, ends: Ints) -> Sequence[Growth]:
        """Grow tables. There must be enough free blocks.

        Args:
            capacities: [n] positions that each holds.
            ends: [n] positions that each is to hold, more than that.

        Returns:
            The blocks of each group.
        """
        nums_new = -(-(ends - capacities) // self.block_size)
        added = self.pool.take(int(nums_new.sum()))
        start = 0
        for table, num_new in zip(tables, nums_new.tolist(), strict=True):
            table.block_ids += added[start : start + num_new]
            start += num_new
        return (Growth(nums_new, added),)

    def grow_by_one(self, tables: Sequence[BlockTable]) -> Sequence[Growth]:
        """Grow tables that are full by one block of each group, where `grows_evenly`.

        Returns:
            The blocks of each group.
        """
        added = self.pool.take(len(tables))
        for table, block in zip(tables, added, strict=True):
            table.block_ids.append(block)
        return (Growth(None, added),)

    def further_ids(self, table: BlockTable) -> tuple[U32, ...]:
        """Return the blocks of each group behind the first, in read-only arrays."""
        return ()

    def release_unseen(
        self, group: GroupRules, tables: Sequence[BlockTable], nums_needless: Sequence[int]
    ) -> None:
        """Give back blocks that no later query sees. Those of known tokens must have been cached.

        Args:
            group: One of `releasing`.
            nums_needless: How many leading blocks of the group each table does not need: more than before.
        """
        raise AssertionError("one full group keeps every key")

    def cache_full_blocks(
        self, filled: Iterable[tuple[BlockTable, array[int], int]], *, is_planning: bool = False
    ) -> None:
        """Let others find the blocks that tokens fill.

        Args:
            filled: A table, its request's tokens, and how many of these count: they must be known, and a planned step
                must compute each of them. A request that hits such a block is planned later, so it reads what was
                written.
            is_planning: Whether the last of these tokens are computed by the step that is being planned.
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        caches_all, block_size = self.enable_prefix_caching, self.block_size
        for table, token_ids, num_tokens in filled:
            num_full, num_cached = num_tokens // block_size, table.num_cached
            if num_full <= num_cached or not (caches_all or table.is_shared):
                continue
            if num_full > len(table.hashes):
                table.extend_hashes(token_ids, num_full, block_size)
            if num_full == num_cached + 1:  # as while rows decode
                blocks.append(table.block_ids[num_cached])
                hashes.append(table.hashes[num_cached])
            else:
                blocks += table.block_ids[num_cached:num_full]
                hashes += table.hashes[num_cached:num_full]
            table.num_cached = num_full
        if blocks:
            self._newly_cached += self.pool.cache(blocks, hashes)

    def cache_closed_blocks(self, closed: Iterable[tuple[BlockTable, array[int], int, bytes]]) -> None:
        """Do as `cache_full_blocks` does, when rows have filled a block that they decode.

        Args:
            closed: As `filled` there, each with the content of the last block that its known tokens fill. It is hashed
                at once, and cached by a later call if no planned step computes all of it.
        """
        computed: list[BlockTable] = []
        computed_contents: list[bytes] = []
        awaited: list[BlockTable] = []
        awaited_contents: list[bytes] = []
        others: list[tuple[BlockTable, array[int], int]] = []
        can_be_next, block_size = self.enable_prefix_caching and self.grows_evenly, self.block_size
        for table, token_ids, num_tokens, content in closed:
            num_hashes = len(table.hashes)
            is_next = num_hashes == len(token_ids) // block_size - 1 and not (
                table.extras or table.shares_hashes
            )
            if not (can_be_next and is_next and table.num_cached == num_hashes):
                others.append((table, token_ids, num_tokens))
            elif num_tokens == len(token_ids):
                computed.append(table)
                computed_contents.append(content)
            else:
                awaited.append(table)
                awaited_contents.append(content)
        if computed:
            self._cache_next_blocks(computed, self._hash_next_blocks(computed, computed_contents))
        if awaited:
            self._hash_next_blocks(awaited, awaited_contents)
        if others:
            self.cache_full_blocks(others)

    def _hash_next_blocks(self, tables: Sequence[BlockTable], contents: Sequence[bytes]) -> list[bytes]:
        """Hash a block of each table behind those that are hashed, and return the hashes."""
        parents = [table.hashes[-1] if table.hashes else table.root_hash for table in tables]
        hashes = hash_next_blocks(parents, contents)
        for table, block_hash in zip(tables, hashes, strict=True):
            table.hashes.append(block_hash)
        return hashes

    def _cache_next_blocks(self, tables: Sequence[BlockTable], hashes: Sequence[bytes]) -> None:
        """Cache the block of each table behind those that are cached, which has the table's last hash.

        Where blocks `grows_evenly`.
        """
        blocks: list[int] = []
        for table in tables:
            blocks.append(table.block_ids[table.num_cached])
            table.num_cached += 1
        self._newly_cached += self.pool.cache(blocks, hashes)

    def take_newly_cached(self) -> list[int]:
        """Return the blocks cached since the last call. The step being planned is the last that writes to them."""
        newly_cached, self._newly_cached = self._newly_cached, []
        return newly_cached

    def uncache(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the cache, for a step that failed."""
        for block in blocks:
            self.pool.uncache(block)

    def named_blocks(self, table: BlockTable) -> list[int]:
        """Return the cached blocks with a table's content, which may be other blocks than its own."""
        return self.pool.find_all(table.hashes)

    def own_blocks(self, table: BlockTable, num_trusted: int) -> list[int]:
        """Return the blocks that the holder of a table has written, behind the first `num_trusted` ones."""
        return table.block_ids[num_trusted:]

    def has_read(self, table: BlockTable, blocks: Set[int]) -> bool:
        """Return whether the holder of a table began with any of these blocks."""
        return not blocks.isdisjoint(table.block_ids[: table.num_hits])

    def free(self, table: BlockTable) -> None:
        """Give back all of a request's blocks, last first, so that its tail is evicted before its head."""
        self.pool.release(reversed(table.block_ids))
        table.block_ids.clear()
        table.num_hits = table.num_cached = 0

    def blocks_freed_by(self, tables: Iterable[BlockTable]) -> Iterator[Count]:
        """Yield for each table in turn how many more blocks would be free if it were given back as well."""
        block_to_references: dict[int, int] = {}
        for table in tables:
            num_freed = 0
            for block in table.block_ids:
                references = block_to_references.get(block) or self.pool.num_references(block)
                block_to_references[block] = references - 1
                num_freed += references == 1
            yield num_freed

    def reset(self) -> bool:
        """Empty the prefix cache. Return False, changing nothing, while any block is in use."""
        if self.pool.num_held:
            return False
        self.pool.uncache_all()
        self._newly_cached.clear()
        return True

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Check every block.

        Args:
            tables: Tables of all running requests, leases and pulls.

        Raises:
            AssertionError: Names what is wrong.
        """
        references: Counter[int] = Counter()
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "a table holds a block twice"
            assert table.num_hits <= table.num_cached <= len(table.block_ids), "more cached than held"
            references.update(table.block_ids)
        self.pool.check_integrity(references)
