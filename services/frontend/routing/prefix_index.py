"""The blocks that engines cache, as they report them, and prompts as keys to look up there."""

from __future__ import annotations

import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from triptych.prefix_hash import HASH_BYTES, hash_blocks, root_of_request
from triptych.types.outputs import CacheNews
from triptych.types.step import U32
from triptych_services.frontend.routing.holders import BlockHolders

_SECRET = np.uint64(secrets.randbits(64) | 1)
_ALL_BITS = (1 << 64) - 1
_FEW_HASHES = 32
"""Up to so many hashes numpy takes longer."""
_PARTS = [struct.Struct("<" + "Q8x" * num) for num in range(_FEW_HASHES + 1)]
EXPECTED_S = 2.0
"""A prompt's blocks are expected in the cache of its engine for so long, at least, until the engine reports them."""
_SWEPT_PER_KEY, _SWEPT_PER_NEWS, _SWEPT_PER_MEMBER = 4, 64, 1 << 14
"""Blocks that are looked at for members that have left, for each that is added, for each call, for each member that
comes. So what such members held is soon less than what is held, and no turn of the event loop takes long."""
_LEAST_SWEPT = 16  # blocks that a table without any counts as


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
    if len(hashes) <= _FEW_HASHES * HASH_BYTES:
        secret, parts = int(_SECRET), _PARTS[len(hashes) // HASH_BYTES].unpack(hashes)
        return [part * secret & _ALL_BITS or 1 for part in parts]
    keys = np.frombuffer(hashes, "<u8")[::2] * _SECRET
    return np.maximum(keys, 1).tolist()


def _key_of(block_hash: bytes) -> int:
    """Return the only one of `keys_of`, in less time."""
    return int.from_bytes(block_hash[:8], "little") * int(_SECRET) & _ALL_BITS or 1


_Unhashed = dict[int, list[tuple[RoutedPrompt, int, int]]]
"""Key of a first block -> prompts that begin so, each with its block size and its member's bit."""


class PrefixIndex:
    """Which engines hold which blocks: those that they cache, as they report it, and those that they are expected to.

    Owned by the app, for all engines, so that a look-up takes as long for a thousand as for one. Engines are members,
    and a set of them is a number with their bits.

    What is cached is exact, since the stream that carries it is numbered and resumed.

    What is expected are the blocks of prompts that were sent within the last 2 to 4 s, or 6 s where few prompts come.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic time in seconds."""
        self.clock = clock
        self._cached = BlockHolders()
        self._num_members = 0
        self._free_members: list[int] = []
        self._left = 0
        """Members that have left, of which something may still be here."""
        self._swept = 0
        """Those of them that are being taken out of what is cached, table by table."""
        self._next_swept = 0
        self._to_sweep = 0
        """Blocks that are to be looked at for this."""
        self._taken_out: tuple[int, int] = (0, 0)
        """Those that are not in what is cached any more, but may be in both of `_expected`, or in the second."""
        self._expected: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Key -> the members that are expected to have it: of prompts that were sent lately, and of those before."""
        self._unhashed: tuple[_Unhashed, _Unhashed] = ({}, {})
        """Key of a first block -> prompts that are not hashed until another one begins so. As `_expected`."""
        self._expected_since = 0.0

    def join(self) -> int:
        """Return the number of a new member. It holds nothing."""
        self._forget_expected()
        self._sweep(_SWEPT_PER_MEMBER)
        if self._free_members:
            return self._free_members.pop()
        self._num_members += 1
        return self._num_members - 1

    def leave(self, member: int) -> None:
        """Forget a member. What it held counts no more at once, and is taken out little by little."""
        self._left |= 1 << member

    def add(self, member: int, keys: Sequence[int]) -> int:
        """Take in that a member caches blocks. Return how many it did not."""
        num_added = self._cached.add(member, keys)
        self._sweep(_SWEPT_PER_NEWS + _SWEPT_PER_KEY * len(keys))
        return num_added

    def discard(self, member: int, keys: Iterable[int]) -> int:
        """Take in that a member caches blocks no more. Return how many it did."""
        return self._cached.discard(member, keys)

    def cached_at(self, key: int) -> int:
        """Return the members that cache a block, given its key."""
        return self._cached.at(key) & ~self._left

    def expect(self, member: int, prompt: RoutedPrompt, block_size: int) -> None:
        """Take in that a prompt, of at least one block, is being sent to a member."""
        self._forget_expected()
        if prompt.is_hashed(block_size):
            _mark(self._expected[0], prompt.keys(block_size), 1 << member)
        else:
            sent = self._unhashed[0].setdefault(prompt.first_key(block_size), [])
            sent.append((prompt, block_size, 1 << member))

    def find(self, prompt: RoutedPrompt, block_size: int, among: int = -1) -> list[tuple[int, int]]:
        """Return how many of a prompt's blocks members hold, and which do. Those that hold none are left out.

        A cache loses the end of a prompt before its beginning, so a member that has a block is taken to have those
        before it. Two requests that compute the same at the same time may leave a gap; then a few too many are counted.

        Args:
            among: Only these members. -1: all.
        """
        self._forget_expected()
        first_key = prompt.first_key(block_size)
        if not first_key:
            return []
        for expected, unhashed in zip(self._expected, self._unhashed, strict=True):
            for sent, its_size, bit in unhashed.pop(first_key, ()):
                _mark(expected, sent.keys(its_size), bit)
        holders = self._holders(first_key) & among
        return self._split(prompt.keys(block_size), holders) if holders else []

    def _holders(self, key: int) -> int:
        lately, before = self._expected
        return (self._cached.at(key) | lately.get(key, 0) | before.get(key, 0)) & ~self._left

    def _split(self, keys: Sequence[int], holders: int) -> list[tuple[int, int]]:
        """Return what `find` does, given all keys and the holders of the first."""
        found: list[tuple[int, int]] = []
        parts = [(1, holders, len(keys) + 1, 0)]
        """Numbers of blocks, with the members that hold so many: of the lower number, and of the higher."""
        while parts:
            low, of_low, high, of_high = parts.pop()
            if of_low == of_high:
                continue
            if high - low == 1:
                found.append((low, of_low & ~of_high))
                continue
            middle = (low + high) // 2
            of_middle = of_high | of_low & self._holders(keys[middle - 1])
            parts += (low, of_low, middle, of_middle), (middle, of_middle, high, of_high)
        return found

    def _forget_expected(self) -> None:
        """Forget the earlier prompts; those that were sent lately become the earlier ones, unless they are as old."""
        now = self.clock()
        if now - self._expected_since <= EXPECTED_S:
            return
        is_old = now - self._expected_since > 2 * EXPECTED_S
        self._expected = ({}, {} if is_old else self._expected[0])
        self._unhashed = ({}, {} if is_old else self._unhashed[0])
        self._expected_since = now
        lately, before = self._taken_out
        forgotten, self._taken_out = (lately | before, (0, 0)) if is_old else (before, (0, lately))
        self._free_members += _members_of(forgotten)
        self._left ^= forgotten

    def _sweep(self, num_blocks: int) -> None:
        """Go on with taking out members that have left: look at so many blocks, or up to a table more."""
        if not self._left:
            return
        if not self._next_swept:
            lately, before = self._taken_out
            self._swept, self._to_sweep = self._left & ~lately & ~before, 0
        self._to_sweep += num_blocks
        while self._swept and self._to_sweep > 0:
            self._to_sweep -= max(self._cached.forget(self._swept, self._next_swept), _LEAST_SWEPT)
            self._next_swept = (self._next_swept + 1) % self._cached.num_tables
            if not self._next_swept:
                self._taken_out = (self._taken_out[0] | self._swept, self._taken_out[1])
                self._swept = 0


class CachedBlocks:
    """The blocks that one engine caches, or is expected to: a member of the index. Owned by the session with it."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.member = -1
        """Its number. -1: it has held nothing yet."""
        self._num_blocks = 0
        self._leave: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        """Return the number of blocks that are cached."""
        return self._num_blocks

    def __contains__(self, key: object) -> bool:
        return (
            isinstance(key, int) and self.member >= 0 and bool(self.index.cached_at(key) >> self.member & 1)
        )

    def take_in(self, news: CacheNews) -> None:
        """Follow the engine's cache."""
        if news.is_cleared:
            self.clear()
        if news.evicted and self.member >= 0:
            self._num_blocks -= self.index.discard(self.member, keys_of(news.evicted))
        if news.stored:
            self._join()
            self._num_blocks += self.index.add(self.member, keys_of(news.stored))

    def clear(self) -> None:
        """Forget all blocks, and all that are expected unless none is cached."""
        if self._num_blocks:
            self.leave()

    def leave(self) -> None:
        """Hold nothing any more, as the session is over."""
        self._leave()
        self.member, self._num_blocks = -1, 0

    def expect(self, prompt: RoutedPrompt, block_size: int) -> None:
        """Take in that a prompt, of at least one block, is being sent there."""
        self._join()
        self.index.expect(self.member, prompt, block_size)

    def count(self, prompt: RoutedPrompt, block_size: int) -> int:
        """Return how many of a prompt's blocks are cached, or will be."""
        if self.member < 0:
            return 0
        found = self.index.find(prompt, block_size, 1 << self.member)
        return found[0][0] if found else 0

    def _join(self) -> None:
        if self.member < 0:
            self.member = self.index.join()
            self._leave = weakref.finalize(self, self.index.leave, self.member)


def _members_of(holders: int) -> list[int]:
    members = []
    while holders:
        lowest = holders & -holders
        members.append(lowest.bit_length() - 1)
        holders ^= lowest
    return members


def _mark(expected: dict[int, int], keys: Iterable[int], bit: int) -> None:
    for key in keys:
        before = expected.get(key)
        expected[key] = bit if before is None else before | bit  # most keys share one number
