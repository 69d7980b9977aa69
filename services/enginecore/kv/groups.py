"""Groups of layers as the engine sees them: the blocks that each kind needs, keeps, and releases.

A row computes positions from p on. Blocks of 4 tokens:

    position     0 .. 3 | 4 .. 7 | 8 .. 11 | 12 .. 15      p = 12
    full             needed, all of them
    window 6            | needed from 7 on                 the first query sees 7 .. 12
    chunk 8                      | needed from 8 on        its chunk begins at 8
    state                        | needed: the page of 11  it holds the state behind position 11
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError
from triptych.types.facts import KvGroup, KvKind, KvLayout, PositionT, least_state_page

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of blocks of both pools: those of keys and values, and those of states.

    They compare as a lack does. More than n: in either pool. At most n: in both.
    """

    kv: int
    state: int

    def __add__(self, other: PoolCounts | int) -> PoolCounts:
        kv, state = _both(other)
        return PoolCounts(self.kv + kv, self.state + state)

    __radd__ = __add__

    def __sub__(self, other: PoolCounts | int) -> PoolCounts:
        kv, state = _both(other)
        return PoolCounts(self.kv - kv, self.state - state)

    def __rsub__(self, other: int) -> PoolCounts:
        return PoolCounts(other - self.kv, other - self.state)

    def __gt__(self, other: PoolCounts | int) -> bool:
        kv, state = _both(other)
        return self.kv > kv or self.state > state

    def __le__(self, other: PoolCounts | int) -> bool:
        return not self > other

    def __lt__(self, other: PoolCounts | int) -> bool:
        kv, state = _both(other)
        return self.kv < kv or self.state < state


Count = int | PoolCounts
"""A number of blocks: of the one pool, or of both where there are groups."""


def _both(count: Count) -> tuple[int, int]:
    return (count, count) if isinstance(count, int) else (count.kv, count.state)


class GroupRules:
    """The blocks that a row needs of one group, or of several with the same rules, and their names. It has no state.

    Groups of one kind, window and block size are twins: rows take and release their blocks at the same positions. A row
    has one table for all of them, of *bundles*, each one block of every twin.

    A page of a state is found in the cache from the next step on: rows of one step are computed side by side, so none
    can begin with a page that another row writes in it.
    """

    def __init__(self, group: KvGroup, index: int, members: tuple[int, ...], suffix: str = "") -> None:
        """
        Args:
            group: One of the twins.
            index: Place of these rules among those of all groups.
            members: Places of the twins in the worker's layout, in order.
            suffix: Ends their name, where others have the same kind and window.
        """
        self.kind = group.kind
        self.is_state = group.kind is KvKind.STATE
        self.name = group.kind.name.lower() + (f"-{group.window}" if group.window else "") + suffix
        """Names these groups in metrics."""
        self.releases = group.kind is not KvKind.FULL
        """Whether rows need some of their blocks no more as they go on."""
        self.block_size = group.block_size
        self.window = group.window
        self.index = index
        self.members = members
        self.num_twins = len(members)
        """Blocks of a bundle."""
        self._group = group
        # As arrays: numpy adds these in half of the time that numbers of Python take.
        self._size = np.array(group.block_size)
        self._behind = np.array(1 if self.is_state else group.window - 1)
        """Tokens before a position that are needed at it. Not of chunks."""
        self._ahead = self._size + self._behind
        """Tokens from the first block that is held to the position at which it is needed no more. Not of chunks."""
        self.suffix = bytes([index]) if index else b""
        """Ends the names of these blocks in the prefix cache."""

    def first_needed(self, position: PositionT) -> PositionT:
        """Return what `KvGroup.first_needed` does."""
        return self._group.first_needed(position)

    def has_needless(self, reached: Ints, released: Ints) -> NDArray[np.bool_]:
        """Return which rows need fewer blocks than they hold, [n]: those of which `first_needed` is more than released.

        Args:
            reached: [n] position from which on each row computes.
            released: [n] leading blocks that it has released.
        """
        if self.kind is KvKind.CHUNK:
            return self.first_needed(reached) > released
        return reached >= released * self._size + self._ahead

    def nums_needless(self, reached: Ints) -> Ints:
        """Return how many leading blocks each row needs no more, [n], for rows of which `has_needless` is true."""
        if self.kind is KvKind.CHUNK:
            return self.first_needed(reached)
        return (reached - self._behind) // self._size

    def most_held(self, step_tokens: int) -> int | None:
        """Return what `KvGroup.most_held` does, in bundles."""
        return self._group.most_held(step_tokens)

    def blocks_for(self, num_tokens: PositionT) -> PositionT:
        """Return the number of bundles that a table of so many tokens reaches over."""
        return -(-num_tokens // self.block_size)

    def peak(self, start: int, end: int, chunk: int) -> int:
        """Return the most blocks, of all twins, that a row holds on its way from one position to another."""
        num_reached = self.blocks_for(end) - self.first_needed(start) + self.continues_at(start)
        most = self.most_held(chunk)
        return (num_reached if most is None else min(num_reached, most)) * self.num_twins

    def continues_at(self, position: int) -> bool:
        """Return whether a row that enters at a position goes on from a page of a state that is not full."""
        return self.is_state and position % self.block_size > 0

    def key_at(self, hashes: Sequence[bytes], num_hashes: int) -> bytes:
        """Return the name of the page of a state behind as many blocks as there are hashes."""
        return hashes[num_hashes - 1] + self.suffix

    def keys(self, hashes: Sequence[bytes], first: int, end: int, unit: int) -> list[bytes]:
        """Return the names of the content of bundles `first` to `end` in the prefix cache.

        Args:
            hashes: Hashes of the prompt's blocks of `unit` tokens.
            unit: Divides the group's block size.
        """
        ratio = self.block_size // unit
        named = hashes[(first + 1) * ratio - 1 : end * ratio : ratio]
        return [name + self.suffix for name in named] if self.suffix else list(named)


def rules_of(kv: KvLayout) -> tuple[GroupRules, ...]:
    """Return the rules of the groups of a layout, one for all twins. The first are those of the first group."""
    twins: dict[tuple[KvKind, int, int], list[int]] = {}
    for index, group in enumerate(kv.groups):
        twins.setdefault((group.kind, group.block_size, group.window), []).append(index)
    seen: set[tuple[KvKind, int]] = set()
    rules = []
    for index, ((kind, block_size, window), members) in enumerate(twins.items()):
        suffix = f"-by-{block_size}" if (kind, window) in seen else ""
        seen.add((kind, window))
        rules.append(GroupRules(kv.groups[members[0]], index, tuple(members), suffix))
    return tuple(rules)


def longest_step(max_tokens: int, max_steps_in_flight: int, max_samples_per_row: int) -> int:
    """Return the most positions that lie between what is known to be needed no more and the end of a step.

    Of a row that decodes these are its tokens in flight, of a prompt the tokens of one step.
    """
    return max(max_tokens, (max_steps_in_flight + 1) * max_samples_per_row)


def check_layout(
    kv: KvLayout, *, max_model_len: int, chunk: int, max_samples_per_row: int, max_steps_in_flight: int
) -> None:
    """Check that groups can share their pools, and that any one request fits into them.

    Pages of states of several sizes are refused. Triptych's workers need none: all layers with states are one group, of
    which a page holds the state of each layer, whatever its size.

    Args:
        chunk: As of `longest_step`.

    Raises:
        ConfigError: They cannot; names the group and the numbers.
    """
    for index, group in enumerate(kv.groups):
        name, kind = f"kv.groups: group {index} ({group.kind.name.lower()})", group.kind
        if group.block_size % kv.block_size:
            raise ConfigError(
                f"{name} has {group.block_size} tokens per block, which is no multiple of the smallest, {kv.block_size}"
            )
        if kind in (KvKind.WINDOW, KvKind.CHUNK) and group.window < 1:
            raise ConfigError(
                f"{name} has a window of {group.window} positions, and a query sees itself at least"
            )
        is_state = kind is KvKind.STATE
        first = next(each for each in kv.groups if (each.kind is KvKind.STATE) == is_state)
        if group.block_bytes != first.block_bytes:
            raise ConfigError(
                f"{name} has blocks of {group.block_bytes} bytes, and the others of its pool have {first.block_bytes}: "
                "the worker must choose groups of equal blocks"
            )
        if is_state and group.block_size != first.block_size:
            raise ConfigError(
                f"{name} has pages of {group.block_size} tokens, and another group of states has {first.block_size}: "
                "steps end at the ends of all of them"
            )
        if is_state and kv.continues_states and index != kv.groups.index(first):
            raise ConfigError(
                f"{name} is the second of states, and the worker says continues_states, which is for one such group: "
                "it must not say so, or have one group"
            )
        least = least_state_page(max_steps_in_flight, max_samples_per_row)
        if is_state and max_samples_per_row > 1 and group.block_size < least:
            raise ConfigError(
                f"{name} has pages of {group.block_size} tokens, and rows with up to {max_samples_per_row} tokens in a "
                f"step need {least} or more: set cache.state_interval to that"
            )
    if kv.is_plain:
        return
    needed = {False: 0, True: 0}
    for rules in rules_of(kv):
        needed[rules.is_state] += rules.peak(0, max_model_len, chunk)
    for is_state, num_blocks in ((False, kv.num_blocks), (True, kv.num_state_blocks)):
        if needed[is_state] > max(num_blocks - 1, 0):
            what = "pages of recurrent state" if is_state else "KV blocks"
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit into {max(num_blocks - 1, 0)} {what}: one request takes "
                f"up to {needed[is_state]} in {len(kv.groups)} groups of layers; lower model.max_model_len or "
                "scheduler.max_num_batched_tokens, or give the cache more memory"
            )
