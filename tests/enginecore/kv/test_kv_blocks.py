"""Block tables of one to four groups, in any order of events, against a model that never shares a block.

The model keeps for each request what its groups must still be able to read, by position. Blocks have content here: the
prefix that was written to them. So a block that two requests hold with different content, that was released too early,
or that a hit names wrongly, is read as something else than the model says.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.enginecore.scheduler.test_groups import layout_for_one, layouts
from triptych.types.facts import KvGroup, KvKind
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.grouped_manager import GroupedBlockManager
from triptych_services.enginecore.kv.groups import GroupRules

MOST_TOKENS = 40
LONGEST_STEP = 6
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=30)


@dataclass(eq=False)
class Holder:
    """A request that runs: its table, its tokens, and how many of them are computed."""

    table: BlockTable
    tokens: list[int]
    computed: int
    capacity: int = 0


@dataclass
class Memory:
    """The content of the worker's memory: pool, block and offset to the group, and the prefix written there."""

    cells: dict[tuple[bool, int, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)


def first_seen(group: KvGroup, position: int) -> int:
    """Return the first position that a query at this one sees, by definition."""
    match group.kind:
        case KvKind.WINDOW:
            return max(position - group.window + 1, 0)
        case KvKind.CHUNK:
            return position - position % group.window
    return 0


class BlocksMachine(RuleBasedStateMachine):
    @initialize(data=st.data(), spare=st.integers(0, 20))
    def start(self, data: Any, spare: int) -> None:
        self.begin(data.draw(layouts()), spare)

    def begin(self, groups: tuple[KvGroup, ...], spare: int) -> None:
        self.groups = groups
        kv = layout_for_one(self.groups, MOST_TOKENS, LONGEST_STEP, spare=spare, spare_states=spare // 3)
        self.kv = kv
        self.manager = GroupedBlockManager(kv, enable_prefix_caching=True, longest_step=LONGEST_STEP)
        self.memory = Memory()
        self.holders: list[Holder] = []
        self.told: set[bytes] = set()

    def table_of(self, holder: Holder, index: int) -> list[int]:
        """Return a group's blocks, as the worker is told of them."""
        rules = self.rules_of(index)
        bundles, pool = holder.table.groups[rules.index].block_ids, self.manager._pools[rules.index]
        place = rules.members.index(index)
        return [pool.blocks_of(bundle)[place] if bundle else 0 for bundle in bundles]

    def rules_of(self, index: int) -> GroupRules:
        (rules,) = (rules for rules in self.manager.groups if index in rules.members)
        return rules

    def write(self, holder: Holder, start: int, end: int, read_page: int = 0) -> None:
        """Compute positions: read what each sees, then write it; of a state, the page of the one before the first.

        Args:
            read_page: Page of the state that it goes on from on another one; 0: it does not.
        """
        for index, group in enumerate(self.groups):
            table = self.table_of(holder, index)
            if group.kind is KvKind.STATE:
                if start:
                    self.check(holder, index, read_page or table[(start - 1) // group.block_size], 0, start)
                page = table[(end - 1) // group.block_size]
                assert page
                self.memory.cells[True, page, 0] = index, tuple(holder.tokens[:end])
                continue
            for position in range(start, end):
                block, offset = divmod(position, group.block_size)
                assert table[block]
                self.memory.cells[False, table[block], offset] = index, tuple(holder.tokens[: position + 1])
            for position in range(first_seen(group, start), end):
                block, offset = divmod(position, group.block_size)
                self.check(holder, index, table[block], offset, position + 1)

    def check(self, holder: Holder, index: int, block: int, offset: int, length: int) -> None:
        assert block, "a block that is needed was released"
        is_state = self.groups[index].kind is KvKind.STATE
        content = self.memory.cells.get((is_state, block, offset))
        assert content == (index, tuple(holder.tokens[:length])), "a block holds another prefix"

    def step_end(self, position: int, wanted: int) -> int:
        """Return where a step that begins here may end."""
        every = self.manager.step_end_every
        return min(position + wanted, (position // every + 1) * every) if every else position + wanted

    @rule(prompt=PROMPTS, count=st.integers(1, LONGEST_STEP))
    def admit(self, prompt: list[int], count: int) -> None:
        table, tokens = BlockTable(), array("I", prompt)
        self.begin_step()
        hits = self.manager.get_computed_blocks(table, tokens)
        computed = len(hits) * self.manager.block_size
        assert computed < len(prompt), "the last token is not computed"
        if self.manager.budget.num_lacking(len(prompt), hits) > 0:
            return
        end = min(self.step_end(computed, count), len(prompt))
        holder = Holder(table, prompt, computed)
        assert self.manager.allocate(table, end, hits) is not None, "it was to fit"
        further = [ids.tolist() for ids in self.manager.further_ids(table)]
        assert further == [self.table_of(holder, index) for index in range(1, len(self.groups))]
        self.note_capacity(holder, end)
        self.manager.cache_full_blocks([(table, tokens, end)], is_planning=True)
        is_within = self.manager.snapshots is not None and computed % self.manager.step_end_every > 0
        self.write(holder, computed, end, self.replace_page(holder) if is_within else 0)
        holder.computed = end
        self.holders.append(holder)

    def note_capacity(self, holder: Holder, end: int) -> None:
        holder.capacity = max(-(-end // self.manager.block_size) * self.manager.block_size, holder.capacity)

    def begin_step(self) -> None:
        """Give back what only the step before read."""
        if self.manager.snapshots is not None:
            self.manager.snapshots.release_read()

    def replace_page(self, holder: Holder) -> int:
        """Let a row go on with another page of states, and return the one that it reads."""
        assert self.manager.snapshots is not None
        (index,) = (index for index, group in enumerate(self.groups) if group.kind is KvKind.STATE)
        at = (holder.computed - 1) // self.groups[index].block_size
        before = self.table_of(holder, index)[at]
        page = self.manager.snapshots.go_on(holder.table, holder.computed)
        assert self.table_of(holder, index)[at] == page != before
        return before

    def may_keep(self, holder: Holder) -> bool:
        """Return whether the state of a row can be kept in the middle of its page."""
        snapshots, computed = self.manager.snapshots, holder.computed
        if snapshots is None or not computed % self.manager.step_end_every or not snapshots.num_free:
            return False
        return computed % self.manager._lookup.alignment == 0

    @precondition(lambda self: self.holders)
    @rule(
        choice=st.integers(0, 99),
        token=st.integers(0, 1),
        count=st.integers(1, LONGEST_STEP),
        keeps=st.booleans(),
    )
    def go_on(self, choice: int, token: int, count: int, keeps: bool) -> None:
        self.compute(self.holders[choice % len(self.holders)], token, count, keeps=keeps)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=2, max_size=12))
    def decode(self, choice: int, tokens: list[int]) -> None:
        holder = self.holders[choice % len(self.holders)]
        for token in tokens:
            if holder in self.holders:
                self.compute(holder, token, 1, decodes=True)

    def compute(
        self, holder: Holder, token: int, count: int, *, keeps: bool = False, decodes: bool = False
    ) -> None:
        """Compute a step of a row, which gets a further token if all before are computed.

        Args:
            keeps: Whether its state is kept, if that can be.
            decodes: Whether blocks are taken and cached as those of rows that decode.
        """
        self.begin_step()
        choice = self.holders.index(holder)
        if holder.computed == len(holder.tokens):
            holder.tokens = [*holder.tokens, token]
        if len(holder.tokens) > MOST_TOKENS:
            self.leave(choice, is_trusted=True)
            return
        self.release(holder)
        end = min(self.step_end(holder.computed, count), len(holder.tokens))
        capacity, ends = np.array([holder.capacity]), np.array([end])
        if end > holder.capacity:
            (num_needed,) = self.manager.budget.needs(capacity, ends)
            if self.manager.budget.num_lacking_to_grow(capacity, ends) > 0:
                self.leave(choice, is_trusted=True)
                return
            if decodes and self.manager.grows_evenly and holder.capacity + self.manager.block_size >= end:
                growths = self.manager.grow_by_one([holder.table])
            else:
                growths = self.manager.grow([holder.table], capacity, ends)
            assert sum(len(growth.block_ids) for growth in growths) == num_needed.kv + num_needed.state
            for growth in growths:  # the worker appends them
                own = self.table_of(holder, growth.group)
                assert own[len(own) - len(growth.block_ids) :] == growth.block_ids
            self.note_capacity(holder, end)
        tokens, unit = array("I", holder.tokens), self.manager.block_size
        closes = decodes and end == len(tokens) and end % unit == 0
        if not closes:
            self.manager.cache_full_blocks([(holder.table, tokens, end)], is_planning=True)
        read_page = 0
        if keeps and self.may_keep(holder):
            assert self.manager.snapshots is not None
            if self.manager.snapshots.keep(holder.table, tokens, holder.computed):
                read_page = self.replace_page(holder)
        self.write(holder, holder.computed, end, read_page)
        holder.computed = end
        if closes:  # the result has brought the token that was computed before it was known
            self.manager.cache_closed_blocks([(holder.table, tokens, end, tokens[-unit:].tobytes())])

    def release(self, holder: Holder) -> None:
        self.manager.cache_full_blocks([(holder.table, array("I", holder.tokens), holder.computed)])
        for group in self.manager.releasing:
            num_needless = group.first_needed(holder.computed)
            if num_needless > holder.table.groups[group.index].num_released:
                self.manager.release_unseen(group, [holder.table], [num_needless])

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), is_trusted=st.booleans())
    def leave(self, choice: int, is_trusted: bool) -> None:
        holder = self.holders.pop(choice % len(self.holders))
        if is_trusted:
            self.manager.cache_full_blocks([(holder.table, array("I", holder.tokens), holder.computed)])
        self.manager.free(holder.table)

    @precondition(lambda self: not self.holders)
    @rule()
    def reset(self) -> None:
        assert self.manager.reset()
        assert len(self.manager.get_computed_blocks(BlockTable(), array("I", [0] * 30))) == 0

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def fail(self, choice: int) -> None:
        """Remove what a holder has written from the cache."""
        holder = self.holders.pop(choice % len(self.holders))
        self.manager.uncache(self.manager.own_blocks(holder.table, 0))
        self.manager.free(holder.table)

    @rule(prompt=PROMPTS)
    def look_up(self, prompt: list[int]) -> None:
        """A hit is the longest prefix with which each group could go on, and frontends are told of it."""
        table, tokens = BlockTable(), array("I", prompt)
        hits = self.manager.get_computed_blocks(table, tokens)
        unit = self.manager.block_size
        table.extend_hashes(tokens, len(prompt) // unit, unit)
        lengths = [n for n in range(unit, len(prompt), unit) if self.can_serve(table, n)]
        assert len(hits) * unit == max(lengths, default=0)
        self.take_news()
        assert all(table.hashes[n // unit - 1] in self.told for n in lengths)
        for at, block_hash in enumerate(table.hashes):  # none is told without one behind it that can be hit
            if block_hash in self.told and self.can_serve(table, (at + 1) * unit):
                assert all(each in self.told for each in table.hashes[:at])

    def can_serve(self, table: BlockTable, num_tokens: int) -> bool:
        """Return whether every group has what a query at `num_tokens` sees before itself, by definition."""
        num_blocks = 0
        for index, group in enumerate(self.groups):
            may_end_within = group.kind is KvKind.STATE and self.kv.continues_states
            if num_tokens % group.block_size and not may_end_within:
                return False
            rules, ratio = self.rules_of(index), group.block_size // self.manager.block_size
            suffix, pool = rules.suffix, self.manager._pools[rules.index]
            if group.kind is KvKind.STATE:
                if pool.find(table.hashes[num_tokens // self.manager.block_size - 1] + suffix) is None:
                    return False
                num_blocks += 1
                continue
            seen = list(range(first_seen(group, num_tokens), num_tokens))
            blocks = {position // group.block_size for position in seen}
            if any(pool.find(table.hashes[(block + 1) * ratio - 1] + suffix) is None for block in blocks):
                return False
            num_blocks += len(blocks)
        return num_blocks > 0

    def take_news(self) -> None:
        news = self.manager.pool.cache_changes.take()
        if news.is_cleared:
            self.told.clear()
        for part, change in ((news.evicted, self.told.discard), (news.stored, self.told.add)):
            for start in range(0, len(part), 16):
                change(part[start : start + 16])

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity([holder.table for holder in self.holders])
        for holder in self.holders:
            for rules, own in zip(self.manager.groups, holder.table.groups, strict=True):
                assert len(own.block_ids) == rules.blocks_for(holder.capacity)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.holders:
            self.leave(0, is_trusted=True)
        assert self.manager.reset()
        assert self.manager.budget.fit_credit.kv >= self.kv.num_blocks - 1
        self.take_news()
        assert not self.told


class EvenBlocksMachine(BlocksMachine):
    """Two windows beside a full group, all with blocks of one size: rows that decode take one of each at once."""

    @initialize(data=st.data(), spare=st.integers(0, 20))
    def start(self, data: Any, spare: int) -> None:
        windows = [data.draw(st.integers(2, 14)) for _ in range(2)]
        full = KvGroup(KvKind.FULL, 1, 2, 1024)
        self.begin((full, *(replace(full, kind=KvKind.WINDOW, window=window) for window in windows)), spare)
        assert self.manager.grows_evenly


TestBlocksMachine = BlocksMachine.TestCase
TestBlocksMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestEvenBlocksMachine = EvenBlocksMachine.TestCase
TestEvenBlocksMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


@pytest.mark.thorough
class TestBlocksMachineForLong(BlocksMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
