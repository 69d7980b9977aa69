"""The blocks of a prompt that go from one worker to another, in an order that both engines know.

A prompt of 70 tokens, blocks of 16, windows of 20, and pages of states of 256 tokens, each kept where a prompt ends:

    full       0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63     each as soon as it is computed
    window                          32 .. 47 | 48 .. 63     what position 64 sees, once that is computed
    state                                      page of 63   with those

The prompt's rest, of a token at least, is computed by the engine that decodes: it is a prefix hit there. Full groups
alone are a hit by what has come. With others, all parts or none are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych_services.enginecore.kv.block_table import NULL_BLOCK, BlockTable, GroupTable
from triptych_services.enginecore.kv.bundle_pool import BundlePool, GroupUsage
from triptych_services.enginecore.kv.cache_changes import CachedPrefixes
from triptych_services.enginecore.kv.groups import GroupRules
from triptych_services.enginecore.kv.pool import BlockPool
from triptych_services.enginecore.kv.prefix_hits import GroupHits, PrefixLookup
from triptych_services.enginecore.kv.state_snapshots import StateSnapshots


class Parts(NamedTuple):
    """Some of the blocks and pages of a prompt, in their order: blocks first."""

    block_ids: list[int]
    hashes: list[bytes]
    """Hashes of the prompt up to the end of each."""
    pages: list[int]
    """Pages of states."""

    def append(self, other: Parts) -> None:
        """Append parts that come behind these."""
        self.block_ids.extend(other.block_ids)
        self.hashes.extend(other.hashes)
        self.pages.extend(other.pages)

    def between(self, first: int, end: int) -> Parts:
        """Return those with indices from `first` to `end`."""
        num_blocks = len(self.block_ids)
        pages = self.pages[max(first - num_blocks, 0) : max(end - num_blocks, 0)]
        return Parts(self.block_ids[first:end], self.hashes[first:end], pages)


class MovedPrompts:
    """Holds the parts of prompts, and caches those that have come. The block manager owns it.

    Here is the case of one full group.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def num_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many leading tokens of a prompt are brought."""
        return num_prompt_tokens // self._block_size * self._block_size

    def hold_computed(
        self, held: BlockTable, table: BlockTable, num_prompt_tokens: int, num_computed: int
    ) -> Parts:
        """Hold the parts of a running request's prompt that are computed and not held yet, and return them.

        Args:
            held: Holds them.
            table: The request's.
            num_computed: Tokens that the steps planned so far compute.
        """
        first, end = len(held.block_ids), min(num_prompt_tokens, num_computed) // self._block_size
        block_ids = table.block_ids[first:end]
        self._pool.share(block_ids)
        held.block_ids += block_ids
        return Parts(block_ids, table.hashes[first : first + len(block_ids)], [])

    def holds_all(self, held: BlockTable, num_prompt_tokens: int) -> bool:
        """Return whether a table holds all parts of a prompt."""
        return len(held.block_ids) * self._block_size >= self.num_tokens(num_prompt_tokens)

    def beginning(self, hits: Sequence[int], num_tokens: int) -> Sequence[int]:
        """Return those of the cached blocks of a prompt that need not be brought.

        Args:
            hits: From `BlockManager.get_computed_blocks`.
            num_tokens: Tokens that are to be brought.
        """
        return hits[: num_tokens // self._block_size]

    def take(self, table: BlockTable, num_tokens: int, hits: Sequence[int]) -> tuple[int, Parts]:
        """Hold blocks for a prompt, of which there must be enough.

        Args:
            table: Is empty, and has the hashes of the prompt.
            hits: From `beginning`.

        Returns:
            Index of the first part that is to be brought, and the places for it and all others.
        """
        num_full = num_tokens // self._block_size
        self._pool.share(hits)
        table.num_hits = table.num_cached = len(hits)
        taken = self._pool.take(num_full - len(hits))
        table.block_ids += [*hits, *taken]
        return len(hits), Parts(taken, table.hashes[len(hits) : num_full], [])

    def num_usable(self, table: BlockTable, num_parts: int) -> int:
        """Return how many leading tokens of a prompt need not be computed if these leading parts come, and not all."""
        return (table.num_hits + num_parts) * self._block_size

    def cache(self, table: BlockTable, num_tokens: int) -> None:
        """Let others find what has come of a prompt: so many leading tokens."""
        new = slice(table.num_cached, num_tokens // self._block_size)
        self._pool.cache(table.block_ids[new], table.hashes[new])
        table.num_cached = max(table.num_cached, new.stop)

    def hold(self, table: BlockTable, hits: Sequence[int]) -> None:
        """Hold cached blocks, from `BlockManager.get_computed_blocks`, in an empty table."""
        self._pool.share(hits)
        table.block_ids += hits


class MovedGroups(MovedPrompts):
    """The case of several groups, or of one that does not keep every key.

    Bundles of full groups come first, position by position. What others need behind the last of them is known only
    there, so it comes at the end.
    """

    def __init__(
        self,
        groups: Sequence[GroupRules],
        pools: Sequence[BundlePool],
        usages: Sequence[GroupUsage],
        lookup: PrefixLookup,
        cached_prefixes: CachedPrefixes,
        snapshots: StateSnapshots | None,
        *,
        block_size: int,
    ) -> None:
        """
        Args:
            pools: The pool of each group.
            usages: The counts of each group.
            block_size: Tokens of the blocks that hashes name.
        """
        super().__init__(pools[0], block_size)
        self._groups, self._pools, self._usages = groups, pools, usages
        self._lookup = lookup
        self._cached_prefixes = cached_prefixes
        self._snapshots = snapshots
        self._unit = lookup.alignment
        self._lasting = [group for group in groups if not group.releases]
        self._windows = [group for group in groups if group.releases and not group.is_state]
        self._states = [group for group in groups if group.is_state]
        self._parts_per_unit = sum(
            group.num_twins * (self._unit // group.block_size) for group in self._lasting
        )

    def num_tokens(self, num_prompt_tokens: int) -> int:
        if self._snapshots is not None:
            return self._snapshots.last_kept(num_prompt_tokens)
        return (num_prompt_tokens - 1) // self._unit * self._unit

    def hold_computed(
        self, held: BlockTable, table: BlockTable, num_prompt_tokens: int, num_computed: int
    ) -> Parts:
        num_tokens = self.num_tokens(num_prompt_tokens)
        if not num_tokens or held.num_cached:
            return Parts([], [], [])
        held.groups = held.groups or self._empty_tables(held)
        first, end = self._num_lasting(held), min(num_computed, num_tokens) // self._unit * self._unit
        for group in self._lasting:
            new = slice(first // group.block_size, end // group.block_size)
            self._extend(held, group, table.groups[group.index].block_ids[new])
        parts = self._lasting_parts(held, table.hashes, first, end)
        if num_computed > num_tokens and self._hold_last(held, table, num_tokens):
            held.num_cached = num_tokens // self._block_size
            parts.append(self._last_parts(held, table.hashes, num_tokens))
        return parts

    def holds_all(self, held: BlockTable, num_prompt_tokens: int) -> bool:
        return held.num_cached * self._block_size >= self.num_tokens(num_prompt_tokens)

    def beginning(self, hits: Sequence[int], num_tokens: int) -> Sequence[int]:
        if not isinstance(hits, GroupHits) or len(hits) * self._block_size >= num_tokens:
            return hits
        if not self._lasting:
            return []
        tables = zip(self._groups, hits.tables, strict=True)
        return GroupHits(len(hits), tuple([] if group.releases else table for group, table in tables))

    def take(self, table: BlockTable, num_tokens: int, hits: Sequence[int]) -> tuple[int, Parts]:
        num_hit = len(hits) * self._block_size
        table.num_hits = table.num_cached = len(hits)
        table.groups = self._empty_tables(table)
        if isinstance(hits, GroupHits):
            for group in self._lasting:
                self._extend(table, group, hits.tables[group.index])
        for group in self._groups:  # once all hits are held
            own = table.groups[group.index]
            if group.releases:
                self._skip(own, group.first_needed(num_tokens))
            num_new = group.blocks_for(num_tokens) - len(own.block_ids)
            own.block_ids += self._usages[group.index].take(num_new)[0]
        parts = self._lasting_parts(table, table.hashes, num_hit, num_tokens)
        parts.append(self._last_parts(table, table.hashes, num_tokens))
        return num_hit // self._unit * self._parts_per_unit, parts

    def num_usable(self, table: BlockTable, num_parts: int) -> int:
        num_units = 0 if self._windows or self._states else num_parts // self._parts_per_unit
        return table.num_hits * self._block_size + num_units * self._unit

    def cache(self, table: BlockTable, num_tokens: int) -> None:
        first, end = table.num_cached, num_tokens // self._block_size
        if end <= first:
            return
        self._cached_prefixes.add_chain(table.hashes, end)
        for group, pool, own in zip(self._groups, self._pools, table.groups, strict=True):
            at = max(own.num_released, first * self._block_size // group.block_size)
            if group.is_state:
                keys = [group.key_at(table.hashes, end)]
                at = len(own.block_ids) - 1
            else:
                keys = group.keys(table.hashes, at, num_tokens // group.block_size, self._block_size)
            _, stored = pool.cache_bundles(own.block_ids[at : at + len(keys)], keys)
            self._cached_prefixes.note_stored(stored)
        table.num_cached = end

    def hold(self, table: BlockTable, hits: Sequence[int]) -> None:
        if isinstance(hits, GroupHits):
            table.groups = self._empty_tables(table)
            for group in self._groups:
                bundles, own = hits.tables[group.index], table.groups[group.index]
                if group.releases:
                    self._skip(own, group.first_needed(len(hits) * self._block_size))
                self._extend(table, group, bundles[own.num_released :])

    def _empty_tables(self, table: BlockTable) -> tuple[GroupTable, ...]:
        return tuple(GroupTable([] if group.index else table.block_ids) for group in self._groups)

    def _skip(self, own: GroupTable, num_needless: int) -> None:
        """Begin a table behind bundles that no query reads any more."""
        own.block_ids += [NULL_BLOCK] * num_needless
        own.num_released = num_needless

    def _extend(self, table: BlockTable, group: GroupRules, bundles: Sequence[int]) -> None:
        """Hold bundles, which are held or cached already, in one more table."""
        self._usages[group.index].hold(bundles)
        table.groups[group.index].block_ids += bundles

    def _num_lasting(self, held: BlockTable) -> int:
        """Return the tokens of which a table holds the bundles of full groups."""
        return min(
            (len(held.groups[group.index].block_ids) * group.block_size for group in self._lasting), default=0
        )

    def _hold_last(self, held: BlockTable, table: BlockTable, num_tokens: int) -> bool:
        """Hold what a query behind so many tokens reads of windows and states.

        Returns:
            Whether it is all there. Else nothing has changed: the request has begun behind a longer hit, or there was
            no page to keep the state.
        """
        needed: list[tuple[GroupRules, int, list[int]]] = []
        for group in self._windows:
            first = group.first_needed(num_tokens)
            bundles = table.groups[group.index].block_ids[first : num_tokens // group.block_size]
            if NULL_BLOCK in bundles:
                return False
            needed.append((group, first, bundles))
        for group in self._states:
            page = self._pools[group.index].find(group.key_at(table.hashes, num_tokens // self._block_size))
            if page is None:
                return False
            needed.append((group, group.first_needed(num_tokens), [page]))
        for group, first, bundles in needed:
            self._skip(held.groups[group.index], first)
            self._extend(held, group, bundles)
        return True

    def _lasting_parts(self, table: BlockTable, hashes: Sequence[bytes], first: int, end: int) -> Parts:
        """Return the blocks of full groups that hold the tokens from `first` to `end`."""
        parts = Parts([], [], [])
        for start in range(first, end, self._unit) if self._lasting else ():
            for group in self._lasting:
                at = start // group.block_size
                self._add_blocks(parts, group, table, hashes, range(at, at + self._unit // group.block_size))
        return parts

    def _last_parts(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int) -> Parts:
        """Return what a query behind so many tokens reads of windows and states."""
        parts = Parts([], [], [])
        for group in self._windows:
            own = table.groups[group.index]
            self._add_blocks(parts, group, table, hashes, range(own.num_released, len(own.block_ids)))
        for group in self._states:
            parts.pages.append(table.groups[group.index].block_ids[-1])
            parts.hashes.append(hashes[num_tokens // self._block_size - 1])
        return parts

    def _add_blocks(
        self, parts: Parts, group: GroupRules, table: BlockTable, hashes: Sequence[bytes], indices: range
    ) -> None:
        """Append the blocks of some bundles of a group to parts, those of twins side by side."""
        ratio, bundles = group.block_size // self._block_size, table.groups[group.index].block_ids
        for index in indices:
            blocks = self._pools[group.index].blocks_of(bundles[index])
            parts.block_ids.extend(blocks)
            parts.hashes.extend([hashes[(index + 1) * ratio - 1]] * len(blocks))
