"""The blocks that nobody holds, least recently used first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.enginecore.kv.block_table import NULL_BLOCK

_ABSENT = -1


class FreeQueue:
    """A doubly linked list of block ids in two arrays; the null block, never free, is its sentinel.

    Every operation on one block is O(1), wherever it stands: touching a cached block takes it out of
    the middle.
    """

    def __init__(self, num_blocks: int) -> None:
        """Starts with blocks 1 .. num_blocks - 1, in this order."""
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._size = num_blocks - 1

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return block != NULL_BLOCK and self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def take(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used blocks; there must be as many."""
        assert count <= self._size, f"{count} blocks wanted, {self._size} free"
        following, previous = self._next, self._previous
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = previous[block] = _ABSENT
            block = after
        following[NULL_BLOCK] = block
        previous[block] = NULL_BLOCK
        self._size -= count
        return taken

    def remove(self, block: int) -> None:
        """Take one block out, wherever it stands."""
        assert block in self, f"block {block} is not free"
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = _ABSENT
        self._size -= 1

    def append(self, block: int) -> None:
        """Put a block where it is taken last."""
        self._insert(block, before=self._previous[NULL_BLOCK], after=NULL_BLOCK)

    def prepend(self, block: int) -> None:
        """Put a block where it is taken next."""
        self._insert(block, before=NULL_BLOCK, after=self._next[NULL_BLOCK])

    def check_integrity(self, free: Iterable[int]) -> None:
        """The queue holds exactly `free`, and reads the same in both directions."""
        forwards = list(self)
        assert len(forwards) == len(set(forwards)) == self._size, "the free queue lost count"
        assert set(forwards) == set(free), "the free queue is not the set of unreferenced blocks"
        backwards = []
        block = self._previous[NULL_BLOCK]
        while block != NULL_BLOCK:
            backwards.append(block)
            block = self._previous[block]
        assert forwards == backwards[::-1], "the free queue reads differently backwards"

    def _insert(self, block: int, *, before: int, after: int) -> None:
        assert block not in self, f"block {block} is free already"
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._size += 1
