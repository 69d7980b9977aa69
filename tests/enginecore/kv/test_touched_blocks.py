"""Which blocks take memory: the soft limit of the KV cache."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from random import Random

import pytest

from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.manager import BlockManager

SIZE = 4


def make_manager(num_blocks: int, soft_num_blocks: int | None) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks, block_size=SIZE, enable_prefix_caching=True, soft_num_blocks=soft_num_blocks
    )


def fill(manager: BlockManager, *token_ids: int) -> BlockTable:
    """Return a table that holds these tokens, with its full blocks cached."""
    table, ids = BlockTable(), array("I", token_ids)
    assert manager.allocate(table, len(ids), manager.get_computed_blocks(table, ids)) is not None
    manager.cache_full_blocks([(table, ids, len(ids))])
    return table


def num_hits(manager: BlockManager, *token_ids: int) -> int:
    return len(manager.get_computed_blocks(BlockTable(), array("I", token_ids)))


@pytest.mark.parametrize(("soft_num_blocks", "num_touched"), [(None, 6), (4, 4), (0, 2)])
def test_above_the_limit_cached_blocks_are_taken_before_untouched_ones(
    soft_num_blocks: int | None, num_touched: int
) -> None:
    manager = make_manager(11, soft_num_blocks)
    for start in (0, 100, 200):
        manager.free(fill(manager, *range(start, start + 2 * SIZE)))
        manager.check_integrity([])
    assert manager.pool.num_touched == num_touched
    assert manager.pool.num_free == 10
    assert num_hits(manager, *range(200, 200 + 2 * SIZE)) == 2, "the latest is kept"
    assert num_hits(manager, *range(2 * SIZE)) == (0 if num_touched < 6 else 2)


def test_running_requests_touch_what_they_need() -> None:
    manager = make_manager(11, 2)
    first, second = fill(manager, *range(3 * SIZE)), fill(manager, *range(100, 100 + 4 * SIZE))
    assert manager.pool.num_touched == 7
    manager.free(first)
    third = fill(manager, *range(200, 200 + 6 * SIZE))
    assert manager.pool.num_touched == 10, "three are taken from the cache"
    manager.check_integrity([second, third])
    assert manager.allocate(BlockTable(), 1) is None


def test_what_is_computed_again_raises_the_limit() -> None:
    manager = make_manager(11, 2)
    manager.free(fill(manager, *range(2 * SIZE)))
    manager.free(fill(manager, *range(100, 100 + 2 * SIZE)))  # takes the first one's blocks
    assert manager.pool.num_touched == 2
    manager.free(fill(manager, *range(2 * SIZE)))
    manager.free(fill(manager, *range(100, 100 + 2 * SIZE)))
    assert manager.pool.num_touched == 4
    assert num_hits(manager, *range(2 * SIZE)) == num_hits(manager, *range(100, 100 + 2 * SIZE)) == 2
    manager.check_integrity([])


def test_what_a_reset_forgets_is_not_missed() -> None:
    manager = make_manager(11, 2)
    manager.free(fill(manager, *range(2 * SIZE)))
    manager.free(fill(manager, *range(100, 100 + 2 * SIZE)))
    assert manager.reset()
    for _ in range(2):
        manager.free(fill(manager, *range(2 * SIZE)))
    assert manager.pool.num_touched == 2


def serve(requests: Iterator[list[int]], soft_num_blocks: int | None, count: int) -> tuple[int, list[int]]:
    """Serve requests, four at a time; return the number of touched blocks and the hits of each request."""
    manager, running, hits = make_manager(4001, soft_num_blocks), deque[BlockTable](), []
    for _ in range(count):
        if len(running) == 4:
            manager.free(running.popleft())
        running.append(fill(manager, *next(requests)))
        hits.append(running[-1].num_hits)
    manager.check_integrity(running)
    return manager.pool.num_touched, hits


def unrelated(random: Random) -> Iterator[list[int]]:
    """Requests of 8 to 60 tokens; one in fifty begins with a prefix of two blocks that others have."""
    while True:
        shared = [random.randrange(3)] * 2 * SIZE if random.random() < 0.02 else []
        yield shared + random.choices(range(1 << 30), k=random.randint(8, 60))


def questions(random: Random) -> Iterator[list[int]]:
    """Requests about one of thirty texts of 30 blocks each, 900 blocks in all."""
    texts = [random.choices(range(1 << 30), k=30 * SIZE) for _ in range(30)]
    while True:
        yield random.choice(texts) + random.choices(range(1 << 30), k=random.randint(1, 20))


def test_an_hour_with_few_shared_prefixes_stays_near_the_limit() -> None:
    num_requests = 3600
    assert serve(unrelated(Random(1)), None, num_requests)[0] == 4000, "without the limit it takes all"
    assert serve(unrelated(Random(1)), 400, num_requests)[0] <= 500


def test_prefixes_that_come_again_are_kept_as_without_a_limit() -> None:
    _, unlimited = serve(questions(Random(2)), None, 1500)
    num_touched, limited = serve(questions(Random(2)), 200, 1500)
    assert num_touched < 2500
    assert sum(limited[500:]) > 0.99 * sum(unlimited[500:]) > 0
    assert serve(questions(Random(2)), None, 1500)[0] == 4000
