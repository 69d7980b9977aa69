"""The blocks that one engine caches, as the engine reports them, and prompts as keys to look up there."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Container, Sequence

import numpy as np

from triptych.prefix_hash import hash_blocks, root_of_request
from triptych.types.outputs import CacheNews
from triptych.types.step import U32, U64

_SECRET = np.uint64(secrets.randbits(64) | 1)
_FIRST_SIZE = 1024
_SPARE = (
    256  # places behind the last home: the longest row of taken places is far shorter while half are free
)


class RoutedPrompt:
    """A prompt, and the keys of its blocks. Made once for each request, before an engine is chosen."""

    def __init__(self, token_ids: U32, cache_salt: str = "", adapter_digest: str = "") -> None:
        self.num_tokens = len(token_ids)
        self._token_ids = token_ids
        self._root = root_of_request(cache_salt, adapter_digest)
        self._keys: dict[int, Sequence[int]] = {}
        """Block size to keys."""
        self._first_keys: dict[int, int] = {}
        """Block size to the key of the first block."""

    def keys(self, block_size: int) -> Sequence[int]:
        """Return the keys of the full blocks: of the first, of the first two, and so on. Takes 0.8 us for each."""
        if (known := self._keys.get(block_size)) is None:
            known = self._keys[block_size] = keys_of(b"".join(self._hash(self._token_ids, block_size)))
        return known

    def is_hashed(self, block_size: int) -> bool:
        """Return whether `keys` are known."""
        return block_size in self._keys

    def first_key(self, block_size: int) -> int:
        """Return the first of `keys`, without hashing the other blocks. 0: there is none."""
        if (known := self._first_keys.get(block_size)) is None:
            hashes = self._hash(self._token_ids[:block_size], block_size)
            known = self._first_keys[block_size] = _key_of(hashes[0]) if hashes else 0
        return known

    def _hash(self, token_ids: U32, block_size: int) -> list[bytes]:
        return hash_blocks(self._root, token_ids.astype("<u4", copy=False).tobytes(), block_size)


def keys_of(hashes: bytes) -> list[int]:
    """Return 8 bytes of each hash as a number above 0, mixed so that no client can choose prompts with similar keys."""
    keys = np.frombuffer(hashes, "<u8")[::2] * _SECRET
    return np.maximum(keys, 1).tolist()


def _key_of(block_hash: bytes) -> int:
    """Return the only one of `keys_of`, in less time."""
    return max(int.from_bytes(block_hash[:8], "little") * int(_SECRET) % (1 << 64), 1)


def count_leading(keys: Sequence[int], blocks: Container[int], guess: int = 0) -> int:
    """Return how many of a prompt's blocks are in a set that has no block without those before it.

    `guess`: A number that is likely, which is tried before others are. 0: none is.

    So it is with an engine's cache, which loses the end of a prompt before its beginning. Two requests that compute
    the same at the same time may leave a gap; then a few blocks too many are counted.
    """
    if not keys or keys[0] not in blocks:
        return 0
    low, high = 1, len(keys)  # the first `low` are there; those behind the first `high` are not
    if 0 < guess <= high:
        if keys[guess - 1] not in blocks:
            high = guess - 1
        elif guess < high and keys[guess] in blocks:
            low = guess + 1
        else:
            return guess
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in blocks:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """A set of blocks. It is exact, since the stream that carries it is numbered and resumed, and it has no more
    entries than the engine has blocks. The session with the engine owns it.

    An entry is 8 bytes of a hash, so among a million blocks any two agree with a probability of 3e-8. A table has 16 to
    32 bytes per block. Entries are sorted by their homes, which their upper bits say, each as near to its home as those
    before it let it be:

        home    0    1    2    3    4    5   …
        entry   a0        b2   c2   d3       …
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._num_entries

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, int):
            return False
        places, place = (
            self._places,
            key >> self._shift,
        )  # as `_find`, without a call: every choice asks all engines
        while (entry := places[place]) != key:
            if not entry:
                return False
            place += 1
        return True

    @property
    def table(self) -> tuple[array[int], int]:
        """Return the entries by their places, and by how many bits a key is shifted to the place where it is at home.

        Both are others when it has been filled or cleared. A place is 0 where there is no entry, and then no key that
        is at home there is in the set.
        """
        return self._places, self._shift

    @property
    def num_bytes(self) -> int:
        """Size of the table."""
        return len(self._places) * self._places.itemsize

    def take_in(self, news: CacheNews) -> None:
        """Follow the engine's cache."""
        if news.is_cleared:
            self.clear()
        for key in keys_of(news.evicted):
            self._discard(key)
        for key in keys_of(news.stored):
            self._add(key)

    def clear(self) -> None:
        """Forget all blocks."""
        self._num_entries = 0
        self._make_table(_FIRST_SIZE, np.empty(0, np.uint64))

    def _make_table(self, size: int, entries: U64) -> None:
        """Make a table of `size` homes, a power of two, with [n] sorted entries."""
        self._shift = 64 - (size.bit_length() - 1)
        self._size = size
        # An entry is at its home or behind the entry before it: place[i] = max(home[i], place[i - 1] + 1).
        homes = (entries >> np.uint64(self._shift)).astype(np.int64)
        order = np.arange(len(entries))
        taken = np.maximum.accumulate(homes - order) + order
        places = np.zeros(max([size, *taken[-1:]]) + _SPARE, np.uint64)
        places[taken] = entries
        self._places = array("Q", places.tobytes())

    def _find(self, key: int) -> int:
        """Return the place of a key; -1 if it is not here."""
        places, place = self._places, key >> self._shift
        while (entry := places[place]) != key:
            if not entry:
                return -1
            place += 1
        return place

    def _add(self, key: int) -> None:
        if 2 * self._num_entries >= self._size:
            self._remake(2 * self._size)
        places, place = self._places, key >> self._shift
        while entry := places[place]:
            if entry == key:
                return
            place += 1
        if place == len(places) - 1:  # the last place stays free: it ends every search
            self._remake(self._size)
            self._add(key)
            return
        places[place] = key
        self._num_entries += 1

    def _discard(self, key: int) -> None:
        """Take a key out, and move those behind it nearer to their homes."""
        hole = self._find(key)
        if hole < 0:
            return
        places, shift = self._places, self._shift
        place = hole + 1
        while entry := places[place]:
            if entry >> shift <= hole:
                places[hole] = entry
                hole = place
            place += 1
        places[hole] = 0
        self._num_entries -= 1

    def _remake(self, size: int) -> None:
        table: U64 = np.frombuffer(self._places, np.uint64)
        self._make_table(size, np.sort(table[table != 0]))
