"""Blocks that the worker uses beside its steps: held until they are given back, and each change said once."""

from __future__ import annotations

from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.holds import BlockHolds
from triptych_services.enginecore.kv.manager import BlockManager


def make_holds() -> tuple[BlockManager, BlockHolds[int, str]]:
    blocks = BlockManager(num_blocks=11, block_size=16, enable_prefix_caching=True)
    return blocks, BlockHolds(blocks)


def allocate(blocks: BlockManager, num_blocks: int) -> BlockTable:
    table = BlockTable()
    assert blocks.allocate(table, num_blocks * blocks.block_size) is not None
    return table


def test_work_holds_its_blocks_until_it_ends() -> None:
    blocks, holds = make_holds()
    holds.begin(1, allocate(blocks, 4), "read four")
    holds.begin(2, allocate(blocks, 3), "read three")
    assert (blocks.pool.num_free, len(holds)) == (3, 2)
    assert holds.take_begun() == ("read four", "read three")
    holds.end(1)
    assert (blocks.pool.num_free, len(holds)) == (7, 1)
    blocks.check_integrity(holds.tables)


def test_the_worker_is_told_each_change_once() -> None:
    blocks, holds = make_holds()
    holds.begin(1, allocate(blocks, 1), "read one")
    assert holds.has_orders
    assert holds.take_begun() == ("read one",)
    assert not holds.has_orders
    assert holds.take_begun() == ()
    holds.end(1)
    assert holds.has_orders
    assert holds.take_ended() == (1,)
    assert not holds.has_orders
    assert holds.take_ended() == ()


def test_work_that_ends_before_the_worker_was_told_is_never_mentioned() -> None:
    blocks, holds = make_holds()
    holds.begin(1, allocate(blocks, 1), "read one")
    holds.end(1)
    assert not holds.has_orders
    assert (holds.take_begun(), holds.take_ended()) == ((), ())
    assert blocks.pool.num_free == 10


def test_a_lost_worker_is_told_nothing() -> None:
    blocks, holds = make_holds()
    holds.begin(1, allocate(blocks, 1), "read one")
    holds.begin(2, allocate(blocks, 1))
    holds.end(2)
    holds.forget()
    assert not holds.has_orders
    assert blocks.pool.num_free == 10
