"""The index of the blocks that an engine caches."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from triptych.prefix_hash import HASH_BYTES, hash_blocks, root_of_request
from triptych.types.outputs import CacheNews
from triptych_services.enginecore.kv.cache_changes import CacheChanges
from triptych_services.frontend.routing import prefix_index
from triptych_services.frontend.routing.prefix_index import PrefixIndex, RoutedPrompt, count_leading, keys_of

SECRET = prefix_index._SECRET


def spread(number: int) -> bytes:
    """A hash like those of blocks: its bits are all random."""
    return np.random.default_rng(number).bytes(HASH_BYTES)


def crowd(number: int) -> bytes:
    """A hash whose key is next to those of the others, at the end of the table."""
    return (2**64 - 1 - number).to_bytes(8, "little") + bytes(8)


class IndexMachine(RuleBasedStateMachine):
    """An engine's cache, its changes, and the indices of frontends that come at different times."""

    @initialize(is_crowded=st.booleans())
    def start(self, is_crowded: bool) -> None:
        self.name = crowd if is_crowded else spread
        prefix_index._SECRET = np.uint64(1 if is_crowded else 0x9E3779B97F4A7C15)
        self.cached: dict[bytes, int] = {}
        self.changes = CacheChanges(self.cached)
        self.indices: list[PrefixIndex] = []

    @rule()
    def connect(self) -> None:
        index = PrefixIndex()
        index.take_in(CacheNews(stored=b"".join(self.changes.base())))
        self.indices.append(index)

    @rule(numbers=st.sets(st.integers(0, 300), max_size=60))
    def store(self, numbers: set[int]) -> None:
        for block_hash in map(self.name, numbers):
            if block_hash not in self.cached:
                self.cached[block_hash] = 1
                self.changes.note_stored([block_hash])

    @rule(numbers=st.sets(st.integers(0, 300), max_size=60))
    def evict(self, numbers: set[int]) -> None:
        for block_hash in map(self.name, numbers):
            if self.cached.pop(block_hash, None):
                self.changes.note_evicted(block_hash)

    @rule()
    def reset(self) -> None:
        self.cached.clear()
        self.changes.note_cleared()

    @rule()
    def tell(self) -> None:
        news = self.changes.take()
        for index in self.indices:
            index.take_in(news)
        keys = set(keys_of(b"".join(self.cached)))
        for index in self.indices:
            assert len(index) == len(keys)
            assert all(key in index for key in keys)
            assert all(
                (key in index) == (key in keys) for key in keys_of(b"".join(map(self.name, range(301))))
            )

    def teardown(self) -> None:
        prefix_index._SECRET = SECRET

    @invariant()
    def holds_together(self) -> None:
        for index in getattr(self, "indices", ()):
            assert len(index) == sum(1 for entry in index._places if entry)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [spread, crowd])
def test_a_table_grows_with_its_entries_and_stays_small(
    name: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "_SECRET", np.uint64(1))
    index, hashes = PrefixIndex(), [name(number) for number in range(1, 5001)]  # type: ignore[operator]
    index.take_in(CacheNews(stored=b"".join(hashes)))
    assert len(index) == 5000
    assert all(key in index for key in keys_of(b"".join(hashes)))
    if name is spread:
        assert index.num_bytes <= 32 * 5000
    index.take_in(CacheNews(evicted=b"".join(hashes[::2])))
    assert len(index) == 2500
    assert [key in index for key in keys_of(b"".join(hashes))] == [False, True] * 2500
    index.take_in(CacheNews(is_cleared=True, stored=hashes[0]))
    assert (len(index), keys_of(hashes[0])[0] in index) == (1, True)


@given(num_stored=st.integers(0, 40), others=st.sets(st.integers(41, 80)), length=st.integers(0, 40))
def test_the_blocks_of_a_prompt_are_counted_from_its_beginning(
    num_stored: int, others: set[int], length: int
) -> None:
    index = PrefixIndex()
    index.take_in(CacheNews(stored=b"".join(map(spread, [*range(num_stored), *others]))))
    assert count_leading(keys_of(b"".join(map(spread, range(length)))), index) == min(length, num_stored)


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
