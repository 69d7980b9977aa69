"""Blocks that the worker uses beside its steps: who holds them, and what the next step says about it."""

from __future__ import annotations

from typing import Generic, TypeVar

from triptych_services.enginecore.kv.block_table import BlockTable
from triptych_services.enginecore.kv.manager import BlockManager

NameT = TypeVar("NameT", int, bytes)
OrderT = TypeVar("OrderT")


class BlockHolds(Generic[NameT, OrderT]):
    """Blocks that the worker reads or writes beside its steps, and that no request needs to hold meanwhile.

        step 3 says: begin       notices: so far, so far, done       step 9 says: end
              |<──────────────── the table holds the blocks ────────────────>|

    The caller that begins such work puts its blocks here, takes in the worker's notices, and ends it: when a notice
    says that it is done, when it takes too long, or when the blocks are needed. Nothing waits for the worker to agree:

    - A beginning may name blocks that steps in flight still use. The worker waits for the results of those steps.
    - An end gives the blocks back at once. The worker takes it in before it computes the step that says so, which is
      the first one that can use them for something else.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._tables: dict[NameT, BlockTable] = {}
        self._begun: dict[NameT, OrderT] = {}
        """Beginnings that the worker has not been sent."""
        self._ended: list[NameT] = []
        """Ends that the worker has not been sent."""

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks that are held."""
        return [*self._tables.values()]

    @property
    def has_orders(self) -> bool:
        """Whether the next step has something to say, even if it computes nothing."""
        return bool(self._begun or self._ended)

    def begin(self, name: NameT, table: BlockTable, order: OrderT | None = None) -> None:
        """Hold blocks for work that begins.

        Args:
            name: Never used twice.
            table: Its blocks, which may still grow.
            order: What the next step says; None: the caller orders each part of the work itself.
        """
        self._tables[name] = table
        if order is not None:
            self._begun[name] = order

    def end(self, name: NameT) -> None:
        """Give back the blocks of work that is done or cancelled."""
        self._blocks.free(self._tables.pop(name))
        if self._begun.pop(name, None) is None:
            self._ended.append(name)

    def take_begun(self) -> tuple[OrderT, ...]:
        """Return what a step that is planned now says of work that begins."""
        begun, self._begun = tuple(self._begun.values()), {}
        return begun

    def take_ended(self) -> tuple[NameT, ...]:
        """Return the names of the work that has ended, for a step that is planned now."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def forget(self) -> None:
        """Give back all blocks: the worker is gone."""
        for table in self._tables.values():
            self._blocks.free(table)
        self._tables.clear()
        self._begun.clear()
        self._ended.clear()
