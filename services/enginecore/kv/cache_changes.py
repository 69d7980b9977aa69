"""Changes of the prefix cache, for those who must know what is cached here."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from triptych.types.outputs import CacheNews


class CacheChanges:
    """The changes since `take` was last called, without those that have cancelled out. Owned by the block pool.

    There are never more than the cache has blocks, times two.
    """

    def __init__(self, cached: Collection[bytes]) -> None:
        """`cached`: the hashes that are cached, at any time. A reader that gets a new cache must forget an old one."""
        self._cached = cached
        self._is_cleared = True
        """The cache was emptied, before everything else here."""
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return self._is_cleared or bool(self._stored) or bool(self._evicted)

    def note_stored(self, block_hashes: Iterable[bytes]) -> None:
        """Note that hashes that were not cached are cached."""
        stored, evicted = self._stored, self._evicted
        for block_hash in block_hashes:
            if block_hash in evicted:
                del evicted[block_hash]
            else:
                stored[block_hash] = None

    def note_evicted(self, block_hash: bytes) -> None:
        """Note that a hash that was cached is not cached any more."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = None

    def note_cleared(self) -> None:
        """Note that nothing is cached any more."""
        self._stored.clear()
        self._evicted.clear()
        self._is_cleared = True

    def take(self) -> CacheNews:
        """Return the changes since the last call."""
        changes = CacheNews(self._is_cleared, b"".join(self._stored), b"".join(self._evicted))
        self._is_cleared = False
        self._stored.clear()
        self._evicted.clear()
        return changes

    def base(self) -> list[bytes]:
        """Return what was cached when `take` was last called, to which the changes since are still to come."""
        if self._is_cleared:
            return []
        return [block_hash for block_hash in self._cached if block_hash not in self._stored] + list(
            self._evicted
        )
