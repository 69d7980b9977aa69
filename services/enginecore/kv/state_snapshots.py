"""Snapshots of states where a prompt ends, beside those of the pages that are full.

A prompt of 22 tokens, blocks of 4, pages of 12. A step ends at 20, and the next one of the row goes on from page 3 on
page 9, which takes its place in the table. So page 3 keeps the state behind 20 tokens, under the hash of the block that
ends there:

    tokens     0 .. 11 | 12 .. 19 | 20 .. 22 ..
    step        1           2           3             reads 3, writes 9
    page        5           3           9

The same prompt again, or one that goes on behind it, is a hit of 20 tokens. It reads page 3 with its first step, and
writes to a page of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import lcm

from triptych_services.enginecore.kv.block_table import BlockTable, GroupTable
from triptych_services.enginecore.kv.bundle_pool import BundlePool, GroupUsage
from triptych_services.enginecore.kv.cache_changes import CachedPrefixes
from triptych_services.enginecore.kv.groups import GroupRules

_LEAST_SHARE = 8  # of a page: a state that saves fewer tokens than that is not worth a step more


class StateSnapshots:
    """Lets rows go on from a page of states on another one. A `GroupedBlockManager` owns it.

    The page that a row goes on from is held until the next step is planned. No row of its step writes to it then, and
    steps run in order.
    """

    def __init__(
        self,
        group: GroupRules,
        pool: BundlePool,
        usage: GroupUsage,
        cached_prefixes: CachedPrefixes,
        *,
        block_size: int,
        unit: int,
        note_cached: Callable[[int], None],
    ) -> None:
        """
        Args:
            group: The only group of states.
            pool: Its pages.
            block_size: Tokens of the blocks that hashes name.
            unit: Tokens at multiples of which every other group can serve a hit.
            note_cached: Takes in a page that is cached.
        """
        self._group = group
        self._pool = pool
        self._usage = usage
        self._cached_prefixes = cached_prefixes
        self._block_size = block_size
        self._unit = unit
        self._note_cached = note_cached
        self._continued: list[GroupTable] = []
        """Tables of the rows that went on to another page in the step planned last."""

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return self._pool.num_free

    def end_for(self, num_prompt_tokens: int, num_computed_tokens: int) -> int:
        """Return the length of a prompt's beginning of which the state is to be kept; `num_computed_tokens` if that is
        not worth a step more.

        One token at least comes behind it, so that the same prompt again can go on from there.

        Args:
            num_computed_tokens: Tokens that were found in the cache.
        """
        page = self._group.block_size
        end = (num_prompt_tokens - 1) // self._unit * self._unit
        num_saved = end - max(num_computed_tokens, end // page * page)
        return end if num_saved >= max(page // _LEAST_SHARE, 1) else num_computed_tokens

    def last_kept(self, num_prompt_tokens: int) -> int:
        """Return the length of the longest beginning of a prompt of which the state is kept: of its last full page,
        where no step more is worth it."""
        page = lcm(self._group.block_size, self._unit)
        return self.end_for(num_prompt_tokens, 0) or (num_prompt_tokens - 1) // page * page

    def keep(self, table: BlockTable, token_ids: array[int], num_tokens: int) -> bool:
        """Cache the page of a running row, which holds the state behind its first tokens.

        Args:
            num_tokens: Tokens that the steps before compute; what `end_for` has returned.

        Returns:
            Whether it is cached now. False: another page with this state is, so the row may stay on this one.
        """
        num_hashes = num_tokens // self._block_size
        table.extend_hashes(token_ids, num_hashes, self._block_size)
        self._cached_prefixes.add_chain(table.hashes, num_hashes)
        page = self._table_of(table).block_ids[(num_tokens - 1) // self._group.block_size]
        cached, stored = self._pool.cache_bundles([page], [self._group.key_at(table.hashes, num_hashes)])
        self._cached_prefixes.note_stored(stored)
        for each in cached:
            self._note_cached(each)
        return bool(cached)

    def go_on(self, table: BlockTable, num_tokens: int) -> int:
        """Give a row a fresh page for what follows its first `num_tokens` tokens, and return it. There must be one."""
        own, index = self._table_of(table), (num_tokens - 1) // self._group.block_size
        assert not own.read_page, "it goes on once in a step"
        ((page,),) = self._usage.take(1)
        own.read_page, own.block_ids[index] = own.block_ids[index], page
        self._continued.append(own)
        return page

    def release_read(self) -> None:
        """Give back the pages that only the step planned last reads."""
        for own in self._continued:
            if own.read_page:
                self._usage.release_unseen([own.read_page])
                own.read_page = 0
        self._continued.clear()

    def _table_of(self, table: BlockTable) -> GroupTable:
        return table.groups[self._group.index]
