"""The block tables of a worker's rows: one for each KV group, changed only by plans. Needs no torch.

    slot  full group      group with a window of 5, blocks of 4
    0     5 9 3           0 8 2        6 to 12 are computed: position 11 reads the keys at 7 .. 11
    1     4               7

In a row that enters, the null block, 0, is at positions that the row no longer needs, or never had behind a prefix hit.
In one that goes on, the ids of blocks that it no longer needs stay, while other rows use these blocks: nothing reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.types.facts import KvGroup, KvKind, KvLayout
from triptych.types.step import U32, NewRow, StepPlan

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

GUESSING_SLOTS = 16
"""Slots of rows that may guess in a model with states. The engine fills the lowest free slot, and more rows than that
gain nothing by guesses. It bounds the memory of what is kept of guesses."""


class BlockTable:
    """The blocks of one group. Owned by the `RequestRows`."""

    def __init__(
        self, group: KvGroup, *, num_blocks: int, max_num_seqs: int, max_model_len: int, name: str = ""
    ) -> None:
        """
        Args:
            num_blocks: Blocks of the pool that the group draws from, the null block included.
            name: The group's name in errors; empty if it is the only one.
        """
        self.group = group
        self.block_size = group.block_size
        """Tokens per block."""
        self.is_state = group.kind is KvKind.STATE
        max_blocks = -(-max_model_len // group.block_size)
        self.ids: I32 = np.zeros((max_num_seqs, max_blocks), np.int32)
        """[max_num_seqs, max_blocks]; 0, the null block, beyond `num_held`."""
        self.num_held: I64 = np.zeros(max_num_seqs, np.int64)
        """[max_num_seqs] entries of each row."""
        self._num_blocks = num_blocks
        self._name = name and f"{name}: "

    def check_new(self, row: NewRow, block_ids: U32) -> None:
        """Check the blocks with which a row enters.

        Raises:
            ProtocolViolation: One does not exist, or is missing where the row reads it.
        """
        name = f"{self._name}new_rows: slot {row.slot}"
        if block_ids.size > self.ids.shape[1]:
            raise ProtocolViolation(
                f"{name} holds {block_ids.size} blocks; a row has at most {self.ids.shape[1]}"
            )
        needed = block_ids[self.group.first_needed(row.num_computed_tokens) :]
        num_unneeded = block_ids.size - needed.size
        self._check_ids(needed, f"{self._name}new_rows")
        if num_unneeded:
            self._check_unneeded(block_ids[:num_unneeded], name)

    def _check_unneeded(self, block_ids: U32, name: str) -> None:
        """Check blocks that the row does not read: the null block first, then others."""
        first_held = int(np.count_nonzero(block_ids == 0))
        if block_ids[:first_held].any():
            raise ProtocolViolation(f"{name}: the null block comes after others in {block_ids.tolist()}")
        self._check_ids(block_ids[first_held:], name)

    def enter(self, slot: int, block_ids: U32) -> None:
        """Fill in the blocks of a row that enters."""
        self.ids[slot, : block_ids.size] = block_ids
        self.num_held[slot] = block_ids.size

    def leave(self, slot: int) -> None:
        """Forget a row's blocks."""
        self.ids[slot, : self.num_held[slot]] = 0

    def append(self, slots: U32, block_ids: U32) -> None:
        """Append `block_ids[i]` to the row of `slots[i]`, keeping the order within each row.

        Raises:
            ProtocolViolation: A block does not exist, or a row would hold more than its context.
        """
        self._check_ids(block_ids, f"{self._name}block_ids")
        order = np.argsort(slots, kind="stable")
        slots, block_ids = slots[order], block_ids[order]
        nth_of_slot = np.arange(slots.size) - np.searchsorted(slots, slots)  # 0, 1, 2 … within equal slots
        columns = self.num_held[slots] + nth_of_slot
        if columns.max() >= self.ids.shape[1]:
            raise ProtocolViolation(
                f"{self._name}block_slots: slot {slots[columns.argmax()]} would hold {columns.max() + 1} "
                f"blocks; a row has at most {self.ids.shape[1]}"
            )
        self.ids[slots, columns] = block_ids
        np.add.at(self.num_held, slots, 1)

    def replace_pages(self, slots: U32, starts: I64, pages: U32) -> I32:
        """Give rows other pages of states in the place of those that they go on from, which are returned.

        Args:
            slots: [n] rows, each once.
            starts: [n] position of the first token that each computes in this step.
            pages: [n] the new pages.

        Raises:
            ProtocolViolation: A page does not exist, or a row has no page to go on from: its tokens begin one.
        """
        name = f"{self._name}state_slots"
        self._check_ids(pages, f"{self._name}state_pages")
        begins = starts % self.block_size == 0
        if begins.any():
            raise ProtocolViolation(
                f"{name}: slot {slots[begins.argmax()]} computes from position {starts[begins.argmax()]} on, which "
                f"begins a page of {self.block_size} tokens; append it as a block"
            )
        columns = starts // self.block_size
        read_pages = self.ids[slots, columns]
        self.ids[slots, columns] = pages
        return read_pages

    def most_samples(self, slots: I64, last_known: I64) -> I64:
        """Return the most tokens that rows may get in a step of a model with states, [n].

        A page holds the state behind the last token that was known. So no guess is the last token of its page, since
        the page would be kept without it, or in another page.

        Args:
            slots: [n]
            last_known: [n] position of the last known token.
        """
        room = self.block_size - 1 - last_known % self.block_size
        return np.where(slots < GUESSING_SLOTS, np.maximum(room, 1), 1)

    def blocks_read(self, slot: int, start: int, end: int) -> I32:
        """Return the blocks that a row reads or writes to compute positions `start` to `end`."""
        return self.ids[slot, self.group.first_needed(start) : -(-end // self.block_size)]

    def blocks_written(self, slot: int, start: int, end: int) -> I32:
        """Return the blocks that a row writes to compute positions `start` to `end`."""
        first = (end - 1 if self.is_state else start) // self.block_size
        return self.ids[slot, first : -(-end // self.block_size)]

    def take_over(self, other: BlockTable) -> None:
        """Become a copy of another table of the same size."""
        self.ids[...] = other.ids
        self.num_held[...] = other.num_held

    def _check_ids(self, block_ids: U32, name: str) -> None:
        if block_ids.size and not 0 < block_ids.min() <= block_ids.max() < self._num_blocks:
            raise ProtocolViolation(
                f"{name}: block ids {block_ids.min()}..{block_ids.max()} are not within "
                f"1..{self._num_blocks - 1}"
            )


def create_tables(kv: KvLayout, *, max_num_seqs: int, max_model_len: int) -> tuple[BlockTable, ...]:
    """Return one table for each group of a layout."""
    return tuple(
        BlockTable(
            group,
            num_blocks=kv.num_state_blocks if group.kind is KvKind.STATE else kv.num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            name=f"group {number} ({group.kind.name.lower()})" if len(kv.groups) > 1 else "",
        )
        for number, group in enumerate(kv.groups)
    )


def tables_of(row: NewRow, num_groups: int) -> tuple[U32, ...]:
    """Return the blocks of a new row by group.

    Raises:
        ProtocolViolation: It has another number of groups.
    """
    if len(row.group_block_ids) != num_groups - 1:
        raise ProtocolViolation(
            f"new_rows: slot {row.slot} has blocks of {len(row.group_block_ids) + 1} groups; the cache has {num_groups}"
        )
    return (row.block_ids, *row.group_block_ids)


def append_new_blocks(tables: Sequence[BlockTable], plan: StepPlan) -> None:
    """Append the new blocks of a plan, of which the slots have been checked, to the tables of their groups.

    Raises:
        ProtocolViolation: A block does not exist, or its group does not.
    """
    slots, block_ids, groups = plan.block_slots, plan.block_ids, plan.block_groups
    if not groups.size:
        tables[0].append(slots, block_ids)
        return
    if groups.size != slots.size:
        raise ProtocolViolation(f"block_slots has {slots.size} entries, block_groups {groups.size}")
    if groups.max() >= len(tables):
        raise ProtocolViolation(
            f"block_groups: {groups.max()} is not below {len(tables)}, the number of groups"
        )
    for group, table in enumerate(tables):
        of_group = groups == group
        if of_group.any():
            table.append(slots[of_group], block_ids[of_group])
