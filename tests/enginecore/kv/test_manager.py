"""Free queue, pool and manager of KV blocks."""

from __future__ import annotations

from array import array

import pytest

from triptych.prefix_hash import root_hash
from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.manager import BlockManager
from triptych_services.enginecore.kv.pool import BlockPool, FreeQueue

SIZE = 4


def tokens(*values: int) -> array[int]:
    return array("I", values)


def make_manager(num_blocks: int = 11, *, enable_prefix_caching: bool = True) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=SIZE, enable_prefix_caching=enable_prefix_caching)


def fill(
    manager: BlockManager, token_ids: array[int], extras: dict[int, tuple[bytes, ...]] | None = None
) -> BlockTable:
    """A table that holds `token_ids`, with its full blocks cached."""
    table = BlockTable(extras=extras or {})
    hits = manager.get_computed_blocks(table, token_ids)
    assert manager.allocate(table, len(token_ids), hits) is not None
    manager.cache_full_blocks([(table, token_ids, len(token_ids))])
    return table


def free_order(manager: BlockManager) -> list[int]:
    return list(manager.pool.snapshot().free)


def test_the_free_queue_gives_the_least_recently_used_first() -> None:
    queue = FreeQueue(6)
    assert len(queue) == 0
    for block in (3, 4, 5, 1):
        queue.append(block)
    queue.prepend(2)
    queue.remove(4)
    assert list(queue) == [2, 3, 5, 1]
    queue.check_integrity([1, 2, 3, 5])
    assert queue.take(4) == [2, 3, 5, 1]
    assert len(queue) == 0
    queue.append(4)
    assert queue.take(1) == [4]


def test_the_null_block_is_never_allocated() -> None:
    manager = make_manager(4)
    table = BlockTable()
    assert manager.allocate(table, 3 * SIZE) == [1, 2, 3]
    assert manager.allocate(table, 3 * SIZE + 1) is None


def hashes_of(
    values: list[int], extras: dict[int, tuple[bytes, ...]] | None = None, salt: bytes = b""
) -> list[bytes]:
    table = BlockTable(root_hash(salt), extras or {})
    table.extend_hashes(tokens(*values), len(values) // SIZE, SIZE)
    return table.hashes


def test_a_hash_names_the_whole_prefix() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert len(one) == 2
    assert all(len(block_hash) == 16 for block_hash in one)
    assert one[0] != other[0]
    assert one[1] != other[1], "equal blocks after different prefixes"
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == one, "a partial block has no hash"


def test_a_hash_depends_on_the_salt_and_on_extras() -> None:
    one = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8], salt=b"") == one
    salted = hashes_of([1, 2, 3, 4, 5, 6, 7, 8], salt=b"salt")
    assert salted[0] != one[0]
    assert salted[1] != one[1], "the salt reaches every block through the chain"
    image = hashes_of([1, 2, 3, 4, 5, 6, 7, 8], {1: (b"image",)})
    assert (image[0], image[1] != one[1]) == (one[0], True)


LISTS_OF_EXTRAS = [(), (b"",), (b"", b""), (b"a", b"bc"), (b"ab", b"c"), (b"abc",), (b"abc", b"")]


def test_extras_do_not_run_into_each_other() -> None:
    roots = {root_hash(*extras) for extras in LISTS_OF_EXTRAS}
    firsts = {hashes_of([1, 2, 3, 4], {0: extras})[0] for extras in LISTS_OF_EXTRAS}
    assert len(roots) == len(firsts) == len(LISTS_OF_EXTRAS)


def test_choices_share_hashes_until_one_goes_on() -> None:
    manager = make_manager(30)
    prompt = tokens(*range(3 * SIZE + 2))
    first, second = BlockTable(root_hash(b"salt")), BlockTable(root_hash(b"salt"))
    manager.hash_prompt([first, second], prompt, len(prompt))
    assert first.hashes is second.hashes
    longer = tokens(*prompt, 8, 9)
    assert manager.allocate(first, len(longer)) is not None
    manager.cache_full_blocks([(first, longer, len(longer))])
    assert (len(first.hashes), len(second.hashes)) == (4, 3)
    alone = hashes_of(longer.tolist(), salt=b"salt")
    assert first.hashes == alone
    assert second.hashes == alone[:3]


def test_hashing_in_parts_is_hashing_at_once() -> None:
    ids = tokens(*range(4 * SIZE + 3))
    in_parts = BlockTable()
    for num_blocks in (0, 1, 1, 3, 4):
        in_parts.extend_hashes(ids, num_blocks, SIZE)
    assert in_parts.hashes == hashes_of(ids.tolist())


def test_a_tail_is_evicted_before_its_head() -> None:
    manager = make_manager(8)
    first = fill(manager, tokens(*range(2 * SIZE + 1)))  # blocks 1, 2 full, 3 partial
    second = fill(manager, tokens(*range(100, 100 + 2 * SIZE)))  # 4, 5
    manager.free(second)
    manager.free(first)
    assert free_order(manager) == [3, 6, 7, 5, 4, 2, 1]
    assert manager.pool.num_cached_free == 4


def test_taking_a_block_evicts_its_content() -> None:
    manager = make_manager(4)
    ids = tokens(*range(3 * SIZE))
    manager.free(fill(manager, ids))
    table = BlockTable()
    assert manager.allocate(table, SIZE) == [3]
    assert manager.get_computed_blocks(BlockTable(), ids) == [1, 2]
    assert manager.pool.num_cached_free == 2


def test_touching_a_cached_block_takes_it_out_of_the_queue() -> None:
    manager = make_manager(6)
    ids = tokens(*range(3 * SIZE))
    manager.free(fill(manager, ids))
    table = BlockTable()
    hits = manager.get_computed_blocks(table, ids)
    assert hits == [1, 2, 3]
    assert manager.allocate(table, len(ids) + 1, hits) == [1, 2, 3, 4]
    assert free_order(manager) == [5]
    manager.check_integrity([table])


def test_a_shared_block_is_free_only_when_its_last_holder_leaves() -> None:
    manager = make_manager()
    ids = tokens(*range(2 * SIZE))
    one, other = fill(manager, ids), fill(manager, ids)
    assert one.block_ids == other.block_ids == [1, 2]
    manager.check_integrity([one, other])
    manager.free(one)
    assert manager.pool.num_held == 2
    manager.free(other)
    assert manager.pool.num_held == 0


def test_hits_that_no_request_holds_count_as_capacity() -> None:
    manager = make_manager(5)  # four blocks
    ids = tokens(*range(3 * SIZE))
    manager.free(fill(manager, ids))
    table = BlockTable()
    hits = manager.get_computed_blocks(table, tokens(*range(2 * SIZE), 9, 9, 9, 9))
    assert hits == [1, 2]
    assert manager.budget.num_lacking(4 * SIZE, hits) <= 0
    assert manager.budget.num_lacking(4 * SIZE + 1, hits) > 0
    holder = fill(manager, tokens(*range(2 * SIZE)))
    assert manager.budget.num_lacking(4 * SIZE, hits) <= 0, "held hits cost nothing more"
    assert manager.pool.num_free == 2
    manager.free(holder)


@pytest.mark.parametrize("num_tokens", [4 * SIZE + 1, 9 * SIZE])
def test_a_failed_allocation_changes_nothing_at_all(num_tokens: int) -> None:
    manager = make_manager(6)
    ids = tokens(*range(2 * SIZE))
    manager.free(fill(manager, ids))
    holder = BlockTable()
    manager.allocate(holder, SIZE)
    before = manager.pool.snapshot()
    table = BlockTable()
    hits = manager.get_computed_blocks(table, ids)
    assert manager.allocate(table, num_tokens, hits) is None
    assert manager.budget.num_lacking(num_tokens, hits) > 0
    assert (table.block_ids, table.num_hits, table.num_cached) == ([], 0, 0)
    assert manager.pool.snapshot() == before


def test_of_equal_blocks_only_one_is_cached() -> None:
    manager = make_manager()
    ids = tokens(*range(SIZE))
    one, other = BlockTable(), BlockTable()
    manager.allocate(one, SIZE)
    manager.allocate(other, SIZE)
    manager.cache_full_blocks([(one, ids, SIZE)])
    manager.cache_full_blocks([(other, ids, SIZE)])
    assert manager.get_computed_blocks(BlockTable(), ids) == one.block_ids
    manager.check_integrity([one, other])
    manager.free(one)
    manager.free(other)
    assert manager.pool.num_cached_free == 1


def test_only_full_computed_blocks_are_cached() -> None:
    manager = make_manager()
    ids = tokens(*range(3 * SIZE))
    table = BlockTable()
    manager.allocate(table, len(ids))
    manager.cache_full_blocks([(table, ids, 2 * SIZE - 1)])
    assert manager.get_computed_blocks(BlockTable(), ids) == [1]
    manager.cache_full_blocks([(table, ids, 3 * SIZE)])
    assert manager.get_computed_blocks(BlockTable(), ids) == [1, 2, 3]


def test_an_uncached_block_is_taken_next() -> None:
    manager = make_manager(6)
    ids = tokens(*range(2 * SIZE))
    table = fill(manager, ids)
    assert manager.take_newly_cached() == [1, 2]
    assert manager.take_newly_cached() == []
    manager.uncache([2])
    assert manager.get_computed_blocks(BlockTable(), ids) == [1]
    manager.free(table)
    manager.uncache([1, 2])
    assert manager.get_computed_blocks(BlockTable(), ids) == []
    assert manager.pool.num_cached_free == 0
    assert free_order(manager)[0] == 1
    manager.check_integrity([])


def test_reset_is_refused_while_a_block_is_in_use() -> None:
    manager = make_manager()
    ids = tokens(*range(2 * SIZE))
    table = fill(manager, ids)
    assert not manager.reset()
    assert manager.get_computed_blocks(BlockTable(), ids) == [1, 2]
    manager.free(table)
    assert manager.reset()
    assert manager.get_computed_blocks(BlockTable(), ids) == []
    assert manager.pool.num_cached_free == 0
    manager.check_integrity([])


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(enable_prefix_caching=False)
    ids = tokens(*range(2 * SIZE))
    table = fill(manager, ids)
    assert manager.get_computed_blocks(BlockTable(), ids) == []
    assert table.hashes == []
    manager.free(table)
    assert manager.pool.num_cached_free == 0


def test_the_integrity_check_notices_a_lost_reference() -> None:
    manager = make_manager()
    fill(manager, tokens(*range(SIZE)))
    with pytest.raises(AssertionError, match="block 1 has 1 references, 0 requests hold it"):
        manager.check_integrity([])


def test_a_block_is_not_released_more_often_than_held() -> None:
    pool = BlockPool(3)
    pool.release(pool.take(1))
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release([1])
