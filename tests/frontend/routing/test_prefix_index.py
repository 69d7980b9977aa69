"""The index of the blocks that engines cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.scheduling import Clock
from triptych.prefix_hash import HASH_BYTES, hash_blocks, root_of_request
from triptych.types.outputs import CacheNews
from triptych.types.step import U32
from triptych_services.enginecore.kv.cache_changes import CacheChanges
from triptych_services.frontend.routing import holders, prefix_index
from triptych_services.frontend.routing.holders import BlockHolders
from triptych_services.frontend.routing.prefix_index import (
    EXPECTED_S,
    CachedBlocks,
    PrefixIndex,
    RoutedPrompt,
    keys_of,
)

TABLE_MASK, SECRET = holders._TABLE_MASK, prefix_index._SECRET


@cache
def spread(number: int) -> bytes:
    """A hash like those of blocks: its bits are all random."""
    return np.random.default_rng(number).bytes(HASH_BYTES)


@cache
def crowd(number: int) -> bytes:
    """A hash whose key, where there is no secret, is next to those of the others, at the end of one table."""
    return (2**64 - 1 - (number << 20)).to_bytes(8, "little") + bytes(8)


@dataclass
class Cache:
    """An engine's cache, its changes, and what a frontend knows of it."""

    blocks: CachedBlocks
    content: dict[bytes, int] = field(default_factory=dict)
    told: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        self.changes = CacheChanges(self.content)

    def tell(self) -> None:
        self.blocks.take_in(self.changes.take())
        self.told = frozenset(self.content)


class IndexMachine(RuleBasedStateMachine):
    """The caches of engines that come and go, and the index over them."""

    @initialize(table_bits=st.integers(0, 8), is_crowded=st.booleans())
    def start(self, table_bits: int, is_crowded: bool) -> None:
        self.name = crowd if is_crowded else spread
        prefix_index._SECRET = np.uint64(1) if is_crowded else SECRET
        holders._TABLE_MASK = (1 << table_bits) - 1
        self.clock = Clock()
        self.index = PrefixIndex(self.clock)
        self.caches = [Cache(CachedBlocks(self.index)) for _ in range(3)]

    def some(self, which: int) -> Cache:
        return self.caches[which % len(self.caches)]

    @rule(of=st.integers(0, 5))
    def connect(self, of: int) -> None:
        """An engine comes that has computed the same as another."""
        engine = Cache(CachedBlocks(self.index))
        engine.content.update(self.some(of).content)
        engine.changes.note_stored(engine.content)
        engine.tell()
        self.caches.append(engine)

    @precondition(lambda self: len(self.caches) > 1)
    @rule(which=st.integers(0, 5), is_said=st.booleans())
    def leave(self, which: int, is_said: bool) -> None:
        engine = self.caches.pop(which % len(self.caches))
        if is_said:
            engine.blocks.leave()

    @rule(which=st.integers(0, 5), numbers=st.sets(st.integers(0, 300), max_size=60))
    def store(self, which: int, numbers: set[int]) -> None:
        engine = self.some(which)
        for block_hash in map(self.name, numbers):
            if block_hash not in engine.content:
                engine.content[block_hash] = 1
                engine.changes.note_stored([block_hash])

    @rule(which=st.integers(0, 5), numbers=st.sets(st.integers(0, 300), max_size=60))
    def evict(self, which: int, numbers: set[int]) -> None:
        engine = self.some(which)
        for block_hash in map(self.name, numbers):
            if engine.content.pop(block_hash, None):
                engine.changes.note_evicted(block_hash)

    @rule(which=st.integers(0, 5))
    def reset(self, which: int) -> None:
        engine = self.some(which)
        engine.content.clear()
        engine.changes.note_cleared()

    @rule(which=st.integers(0, 5))
    def tell(self, which: int) -> None:
        self.some(which).tell()
        names = [self.name(number) for number in range(301)]
        for name, key in zip(names, keys_of(b"".join(names)), strict=True):
            having = [engine.blocks.member for engine in self.caches if name in engine.told]
            assert self.index.cached_at(key) == sum(1 << member for member in having)

    @rule()
    def wait(self) -> None:
        self.clock.now += EXPECTED_S

    def teardown(self) -> None:
        holders._TABLE_MASK, prefix_index._SECRET = TABLE_MASK, SECRET

    @invariant()
    def holds_together(self) -> None:
        caches = getattr(self, "caches", ())
        assert [len(engine.blocks) for engine in caches] == [len(engine.told) for engine in caches]
        if caches:
            check_sets(self.index._cached)


def check_sets(blocks: BlockHolders) -> None:
    """Check that there are the sets that some block has, and no others."""
    entries = np.concatenate([table.entries() for table in blocks._tables])
    numbers, num_blocks = np.unique(entries & np.uint64(holders._SET_MASK), return_counts=True)
    sets = blocks._sets
    assert {number: sets._num_blocks[number] for number in sets._numbers.values()} == dict(
        zip(numbers.tolist(), num_blocks.tolist(), strict=True)
    )
    assert {sets.members[number]: number for number in sets._numbers.values()} == sets._numbers
    assert 0 not in sets._numbers
    assert all(table.places[-1] == 0 for table in blocks._tables)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_what_engines_had_that_have_left_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_TABLE_MASK", 15)
    clock, hashes = Clock(), [spread(number) for number in range(400)]
    index = PrefixIndex(clock)
    staying = CachedBlocks(index)
    for turn in range(100):
        leaving = CachedBlocks(index)
        leaving.take_in(CacheNews(stored=b"".join(hashes[turn % 300 : turn % 300 + 100])))
        leaving.leave()
        staying.take_in(CacheNews(stored=hashes[turn % 300], evicted=hashes[turn % 300 - 1]))
        clock.now += 0.5
    assert index._num_members < 25, "numbers are used again"
    for _ in range(300):
        staying.take_in(CacheNews(stored=hashes[0]))
    assert len(index._cached) == len(staying) <= 2
    check_sets(index._cached)


def test_members_that_hold_nothing_use_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_TABLE_MASK", 15)
    clock, prompt = Clock(), RoutedPrompt(draw_tokens(0))
    index = PrefixIndex(clock)
    for _ in range(100):
        coming = CachedBlocks(index)
        coming.expect(prompt, 16)
        coming.leave()
        clock.now += 0.5
    assert index._num_members < 25


def test_a_block_takes_few_bytes_by_whomever_it_is_held() -> None:
    blocks, generator = BlockHolders(), np.random.default_rng(0)
    common = keys_of(generator.bytes(16 * 10_000))
    for member in range(4):
        assert blocks.add(member, common) == 10_000
        assert blocks.add(member, keys_of(generator.bytes(16 * 10_000))) == 10_000
    assert len(blocks) == 50_000
    assert sum(8 * len(table.places) for table in blocks._tables) < 34 * 50_000
    assert len(blocks._sets._numbers) == 5
    assert blocks.discard(2, common) == 10_000
    assert {blocks.at(key) for key in common} == {0b1011}
    for member in range(4):
        blocks.discard(member, common)
    assert {blocks.at(key) for key in common} == {0}
    check_sets(blocks)


def test_more_sets_than_there_can_be_leave_holders_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_MOST_SETS", 3)
    blocks, (a, b, c, d) = BlockHolders(), keys_of(b"".join(map(spread, range(4))))
    assert [blocks.add(member, [key]) for member, key in enumerate((a, b, c))] == [1, 1, 1]
    assert (blocks.add(1, [a]), blocks.add(3, [d])) == (0, 0)
    assert (blocks.at(a), blocks.at(d)) == (1 << 0, 0)
    assert blocks.discard(1, [a, b]) == 1
    assert blocks.add(1, [c]) == 0, "{1} is in use again, and {1, 2} is one too many"
    assert blocks.discard(0, [a]) == 1
    assert (blocks.add(1, [c]), blocks.add(0, [c]), blocks.at(c)) == (1, 1, 0b111)
    assert (blocks.add(1, [b]), blocks.add(3, [d])) == (1, 1)
    check_sets(blocks)
    assert blocks.discard(2, [c]) == 1
    assert blocks.at(c) == 0, "of two holders that cannot be kept, none is"
    check_sets(blocks)


@dataclass
class Member:
    """An engine as an index should know it."""

    blocks: CachedBlocks
    cached: dict[int, int] = field(default_factory=dict)
    """Prompt to how many of its blocks."""
    sent: list[tuple[float, int]] = field(default_factory=list)


def common_blocks(one: int, other: int) -> int:
    """Prompts 0 to 11 have 9 blocks: 3 with all others, 6 with those of the same third."""
    return 9 if one == other else 6 if one // 4 == other // 4 else 3


@cache
def draw_tokens(number: int) -> U32:
    parts = [(48, 0), (48, 1 + number // 4), (50, 4 + number)]
    drawn = [np.random.default_rng(seed).integers(0, 1000, size) for size, seed in parts]
    return np.concatenate(drawn).astype(np.uint32)


events = st.lists(
    st.tuples(
        st.sampled_from(["cache", "send", "wait", "clear", "find"]), st.integers(0, 3), st.integers(0, 11)
    ),
    min_size=10,
    max_size=60,
)


@given(events=events)
def test_a_prompt_is_found_where_it_is_cached_or_was_sent(events: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    index = PrefixIndex(clock)
    members = [Member(CachedBlocks(index)) for _ in range(4)]
    for what, which, number in events:
        member, prompt = members[which], RoutedPrompt(draw_tokens(number))
        match what:
            case "cache":
                hashes = hash_blocks(root_of_request(""), prompt._token_ids.tobytes(), 16)[: number + 1]
                member.blocks.take_in(CacheNews(stored=b"".join(hashes)))
                member.cached[number] = max(member.cached.get(number, 0), len(hashes))
            case "send":
                member.blocks.expect(prompt, 16)
                member.sent.append((clock.now, number))
            case "wait":
                clock.now += 0.3 * number
            case "clear" if member.cached:
                member.blocks.take_in(CacheNews(is_cleared=True))
                members[which] = Member(member.blocks)
            case "find":
                check_found(index, prompt, members, clock.now, number)


def check_found(
    index: PrefixIndex, prompt: RoutedPrompt, members: list[Member], now: float, number: int
) -> None:
    found = {row: count for count, held in index.find(prompt, 16) for row in prefix_index._members_of(held)}
    for member in members:
        cached = [min(count, common_blocks(of, number)) for of, count in member.cached.items()]
        fresh, sent = (
            [common_blocks(of, number) for at, of in member.sent if now - at <= limit_s]
            for limit_s in (EXPECTED_S, 3 * EXPECTED_S)
        )
        count = found.pop(member.blocks.member, 0)
        assert max([0, *cached, *fresh]) <= count <= max([0, *cached, *sent])
        assert member.blocks.count(prompt, 16) == count
    assert not found


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_member_does_not_inherit_what_was_sent_to_another(
    is_hashed: bool,
) -> None:
    clock = Clock()
    index, prompt = PrefixIndex(clock), RoutedPrompt(draw_tokens(0))
    if is_hashed:
        prompt.keys(16)
    staying, leaving = CachedBlocks(index), CachedBlocks(index)
    staying.expect(prompt, 16)
    leaving.expect(prompt, 16)
    number = leaving.member
    leaving.leave()
    for turn in range(300):  # its blocks are taken out
        staying.take_in(CacheNews(stored=spread(turn)))
    numbers = []
    for _ in range(3):
        coming = CachedBlocks(index)
        coming.take_in(CacheNews(stored=spread(0)))
        assert (coming.count(prompt, 16), staying.count(prompt, 16)) == (0, 9 if not numbers else 0)
        numbers.append(coming.member)
        clock.now += 2 * EXPECTED_S + 0.1
    assert numbers[0] != number
    assert number in numbers, "once nothing is expected there any more"


def test_a_member_with_a_gap_is_found_once() -> None:
    """Two requests that compute the same at the same time may leave one."""
    index, prompt = PrefixIndex(), RoutedPrompt(draw_tokens(0))
    keys = prompt.keys(16)
    members = [index.join() for _ in range(2)]
    index.add(members[0], [*keys[:5], *keys[6:]])
    index.add(members[1], keys[:6])
    found = [(count, prefix_index._members_of(held)) for count, held in index.find(prompt, 16)]
    assert sorted(member for _, held in found for member in held) == members
    assert (6, [members[1]]) in found


def test_a_prompt_s_keys_are_those_of_the_engine_s_hashes() -> None:
    token_ids = np.random.default_rng(0).integers(0, 1000, 70).astype(np.uint32)
    hashes = hash_blocks(root_of_request("salt"), token_ids.tobytes(), 16)
    assert RoutedPrompt(token_ids, "salt").keys(16) == keys_of(b"".join(hashes))
    assert len(hashes) == 4
    assert RoutedPrompt(token_ids).keys(16)[0] != keys_of(hashes[0])[0]
    assert len(RoutedPrompt(token_ids).keys(32)) == 2


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 17, 70])
def test_the_first_key_is_that_of_all_keys(num_tokens: int) -> None:
    token_ids = np.random.default_rng(1).integers(0, 1000, num_tokens).astype(np.uint32)
    prompt = RoutedPrompt(token_ids, "salt")
    first_key = prompt.first_key(16)
    assert not prompt.is_hashed(16)
    assert [first_key] == (list(prompt.keys(16))[:1] or [0])
    assert prompt.is_hashed(16)
