"""Which members hold which blocks, in some 20 bytes for each block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from triptych.types.step import U64

_SET_BITS = 20  # of an entry, the lower ones, say which members hold the block
_SET_MASK = (1 << _SET_BITS) - 1
_MOST_SETS = _SET_MASK
_KEY_MASK = (1 << 64) - 1 - _SET_MASK  # of an entry, the upper ones, are those of the block's key
_TABLE_SHIFT, _TABLE_MASK = 12, (1 << 8) - 1  # bits of a key, the lowest that depend on all of the secret
_FIRST_SIZE = 16
_SPARE = 16  # places behind the last home
_NO_ENTRIES = np.empty(0, np.uint64)


class BlockHolders:
    """The blocks that members hold. A set of members is a number with their bits. The prefix index owns it.

    An entry is 8 bytes: 44 bits of the key, and the number of the set of those who hold the block. So a block takes 16
    to 32 bytes, by whomever it is held, and a set an eighth of a byte for each member, and some 200 bytes beside. There
    are a million sets at most. Where a block would need one more, it is taken to have fewer holders than it has.

    Keys are 64 bits, of which 52 count: two of a million blocks are one here with a probability of 1e-4.
    """

    def __init__(self) -> None:
        self._sets = _Sets()
        self._tables = [_Table(_NO_ENTRIES)] * (_TABLE_MASK + 1)
        """The blocks by their table, so that none takes long to grow. All that have no block yet are one."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return sum(len(table.entries()) for table in self._tables)

    @property
    def num_tables(self) -> int:
        """Tables that there are, each with a number from 0."""
        return len(self._tables)

    def at(self, key: int) -> int:
        """Return the members that hold a block, given its key."""
        table = self._tables[key >> _TABLE_SHIFT & _TABLE_MASK]
        places, place = table.places, key >> table.shift
        while entry := places[place]:
            if entry ^ key <= _SET_MASK:
                return self._sets.members[entry & _SET_MASK]
            place += 1
        return 0

    def add(self, member: int, keys: Iterable[int]) -> int:
        """Take in that a member holds blocks. Return how many it did not."""
        tables, sets, members, bit = self._tables, self._sets, self._sets.members, 1 << member
        own = sets.number_of(bit)
        num_new = num_more = 0
        for key in keys if own else ():
            table = tables[key >> _TABLE_SHIFT & _TABLE_MASK]
            places, place = table.places, key >> table.shift
            while (entry := places[place]) and entry ^ key > _SET_MASK:
                place += 1
            if not entry:
                num_new += 1
                if table.num_free and place + 1 < len(places):
                    places[place] = key & _KEY_MASK | own
                    table.num_free -= 1
                else:
                    entries = np.append(table.entries(), np.uint64(key & _KEY_MASK | own))
                    tables[key >> _TABLE_SHIFT & _TABLE_MASK] = _Table(entries)
            elif not members[before := entry & _SET_MASK] & bit and (
                after := sets.number_of(members[before] | bit)
            ):
                places[place] = entry ^ before ^ after
                sets.use(after, 1)
                sets.use(before, -1)
                num_more += 1
        sets.use(own, num_new)
        return num_new + num_more

    def discard(self, member: int, keys: Iterable[int]) -> int:
        """Take in that a member holds blocks no more. Return how many it did."""
        tables, sets, bit = self._tables, self._sets, 1 << member
        own = sets.number_of(bit)
        num_own = num_others = 0
        for key in keys:
            table = tables[key >> _TABLE_SHIFT & _TABLE_MASK]
            places, place = table.places, key >> table.shift
            while (entry := places[place]) and entry ^ key > _SET_MASK:
                place += 1
            before = entry & _SET_MASK
            if entry and before == own:
                table.take_out(place)
                num_own += 1
            elif (holders := sets.members[before]) & bit:
                if after := sets.number_of(holders ^ bit):
                    places[place] = entry ^ before ^ after
                    sets.use(after, 1)
                else:
                    table.take_out(place)
                sets.use(before, -1)
                num_others += 1
        sets.use(own, -num_own)
        return num_own + num_others

    def forget(self, members: int, number: int) -> int:
        """Take members out of the table of a number. Return how many blocks that table had.

        It takes a sixth of the time that it took to add these blocks.
        """
        entries = self._tables[number].entries()
        if not len(entries):
            return 0
        sets = entries & np.uint64(_SET_MASK)
        before, num_blocks = np.unique(sets, return_counts=True)
        pairs = zip(before.tolist(), num_blocks.tolist(), strict=True)
        after = [self._sets.move(each, num, members) for each, num in pairs]
        if after != before.tolist():
            moved = np.zeros(int(before[-1]) + 1, np.uint64)
            moved[before] = after
            sets = moved[sets]
            self._tables[number] = _Table((entries & np.uint64(_KEY_MASK) | sets)[sets != 0])
        return len(entries)


class _Table:
    """The entries of one table, sorted by their homes, which their upper bits say, each as near to its home as those
    before it let it be. A place without an entry is 0.

        home    0    1    2    3    4    5   …
        entry   a0        b2   c2   d3       …
    """

    __slots__ = ("num_free", "places", "shift")

    def __init__(self, entries: U64) -> None:
        """`entries`: [n] in any order. There is room for as many, up to three times as many."""
        size = max(_FIRST_SIZE, 1 << (2 * len(entries)).bit_length()) if len(entries) else 1
        self.num_free = size // 2 - len(entries)
        """Further entries for which there is room."""
        self.shift = 64 - (size.bit_length() - 1)
        """An entry shifted by so much to the right is its home."""
        entries = np.sort(entries)
        # An entry is at its home or behind the entry before it: place[i] = max(home[i], place[i - 1] + 1).
        homes = (entries >> np.uint64(self.shift)).astype(np.int64)
        order = np.arange(len(entries))
        taken = np.maximum.accumulate(homes - order) + order
        places = np.zeros(max([size, *taken[-1:]]) + _SPARE, np.uint64)
        places[taken] = entries
        self.places = array("Q", places.tobytes())
        """The last place is free: it ends every search."""

    def entries(self) -> U64:
        """Return a copy of the entries."""
        places: U64 = np.frombuffer(self.places, np.uint64)
        return places[places != 0]

    def take_out(self, hole: int) -> None:
        """Take out the entry at a place, and move those behind it nearer to their homes."""
        places, shift = self.places, self.shift
        place = hole + 1
        while entry := places[place]:
            if entry >> shift <= hole:
                places[hole] = entry
                hole = place
            place += 1
        places[hole] = 0
        self.num_free += 1


class _Sets:
    """The sets of members who hold a block together, each once, with a number from 1 while there is such a block."""

    def __init__(self) -> None:
        self.members = [0]
        """Number of a set -> its members, as bits. Always the same list."""
        self._num_blocks = [0]
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []

    def number_of(self, members: int) -> int:
        """Return the number of a set. 0: there are too many. The caller says with `use` that a block has it."""
        number = self._numbers.get(members)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.members[number] = members
            elif len(self.members) > _MOST_SETS:
                return 0
            else:
                number = len(self.members)
                self.members.append(members)
                self._num_blocks.append(0)
            self._numbers[members] = number
        return number

    def use(self, number: int, num_blocks: int) -> None:
        """Take in that so many more blocks have a set; below 0: so many fewer. One that none has is forgotten."""
        self._num_blocks[number] += num_blocks
        if number and not self._num_blocks[number]:
            del self._numbers[self.members[number]]
            self.members[number] = 0
            self._free.append(number)

    def move(self, number: int, num_blocks: int, left: int) -> int:
        """Move blocks of a set to that without the members that have left. Return its number; 0: no member is in it."""
        members = self.members[number]
        if not members & left:
            return number
        after = self.number_of(members & ~left) if members & ~left else 0
        self.use(after, num_blocks)
        self.use(number, -num_blocks)
        return after
