"""Finds the prefixes that are cached where each needs blocks of several groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import overload

from triptych_services.enginecore.kv.block_table import NULL_BLOCK
from triptych_services.enginecore.kv.bundle_pool import BundlePool
from triptych_services.enginecore.kv.groups import GroupRules


class GroupHits(Sequence[int]):
    """A prefix that every group has in the cache. As a sequence: one entry for each block that hashes name."""

    def __init__(self, num_blocks: int, tables: tuple[list[int], ...]) -> None:
        """
        Args:
            tables: The bundles of each kind of group, the null block in the place of those that are not needed.
        """
        self.tables = tables
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        table = self.tables[0]
        return [table[at * len(table) // self._num_blocks] for at in range(self._num_blocks)][index]


class PrefixLookup:
    """Looks prefixes up in the pools. A `GroupedBlockManager` owns it, and the pools."""

    def __init__(
        self,
        groups: Sequence[GroupRules],
        pools: Sequence[BundlePool],
        block_size: int,
        *,
        continues_states: bool,
    ) -> None:
        """
        Args:
            pools: The pool of each group.
            block_size: Tokens of the blocks that hashes name.
            continues_states: Whether a hit may end within a page of states.
        """
        self._groups = groups
        self._pools = pools
        self._block_size = block_size
        sizes = [group.block_size for group in groups if not (group.is_state and continues_states)]
        self.alignment = lcm(block_size, *sizes)
        """Tokens at multiples of which a hit may end."""

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> GroupHits | None:
        """Return the longest prefix of at most `num_tokens` tokens, a multiple of `alignment`, that all groups can
        serve. None: there is none."""
        num_tokens = self._longest(hashes, num_tokens)
        if not num_tokens:
            return None
        tables = tuple(
            self._blocks_behind(group, pool, hashes, num_tokens)
            for group, pool in zip(self._groups, self._pools, strict=True)
        )
        return GroupHits(num_tokens // self._block_size, tables)

    def named(self, hashes: Sequence[bytes], num_trusted: int) -> list[int]:
        """Return the cached blocks with the content of a table behind its first `num_trusted` hashes; those of states
        are negative."""
        blocks: list[int] = []
        for group, pool in zip(self._groups, self._pools, strict=True):
            if group.is_state:  # one may end behind any block
                names = [name + group.suffix for name in hashes[num_trusted:]]
                blocks += [-page for page in pool.find_all(names)]
            else:
                ratio = group.block_size // self._block_size
                first, end = num_trusted // ratio, len(hashes) // ratio
                blocks += pool.find_all(group.keys(hashes, first, end, self._block_size))
        return blocks

    def _longest(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Return the most tokens up to `num_tokens` that all groups can serve."""
        unit, alignment = self._block_size, self.alignment
        for group, pool in zip(self._groups, self._pools, strict=True):
            if not group.releases:
                run = pool.find_run(group.keys(hashes, 0, num_tokens // group.block_size, unit))
                num_tokens = len(run) * group.block_size // alignment * alignment
        is_settled = False
        while num_tokens and not is_settled:
            before = num_tokens
            for group, pool in zip(self._groups, self._pools, strict=True):
                if group.is_state:
                    num_tokens = self._last_state(group, pool, hashes, num_tokens)
                elif group.releases:
                    num_tokens = self._last_window(group, pool, hashes, num_tokens)
            is_settled = num_tokens == before
            if num_tokens and not self._needs_any(num_tokens):  # only chunks, of which a new one begins here
                is_settled = False
                num_tokens -= alignment
        return num_tokens

    def _last_state(
        self, group: GroupRules, pool: BundlePool, hashes: Sequence[bytes], num_tokens: int
    ) -> int:
        """Return the most tokens up to `num_tokens` behind which the state is cached."""
        lengths = range(num_tokens, 0, -self.alignment)
        key_at, unit = group.key_at, self._block_size
        return next((end for end in lengths if pool.find(key_at(hashes, end // unit)) is not None), 0)

    def _last_window(
        self, group: GroupRules, pool: BundlePool, hashes: Sequence[bytes], num_tokens: int
    ) -> int:
        """Return the most tokens up to `num_tokens` behind which all blocks that the next query sees are cached."""
        while num_tokens:
            first, end = group.first_needed(num_tokens), num_tokens // group.block_size
            keys = group.keys(hashes, first, end, self._block_size)
            missing = next(
                (at for at in range(end - 1, first - 1, -1) if pool.find(keys[at - first]) is None), None
            )
            if missing is None:
                break
            num_tokens = min(missing * group.block_size, num_tokens - 1) // self.alignment * self.alignment
        return num_tokens

    def _needs_any(self, num_tokens: int) -> bool:
        """Return whether a request that goes on behind so many tokens reads any block."""
        return any(group.first_needed(num_tokens) * group.block_size < num_tokens for group in self._groups)

    def _blocks_behind(
        self, group: GroupRules, pool: BundlePool, hashes: Sequence[bytes], num_tokens: int
    ) -> list[int]:
        """Return a group's blocks of a prefix that it can serve."""
        first = group.first_needed(num_tokens)
        if group.is_state:
            return [NULL_BLOCK] * first + pool.find_all(
                [group.key_at(hashes, num_tokens // self._block_size)]
            )
        end = num_tokens // group.block_size
        blocks = pool.find_all(group.keys(hashes, first, end, self._block_size))
        return [NULL_BLOCK] * (end - len(blocks)) + blocks
