"""Changes of the prefix cache, for those who must know what is cached here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from triptych.types.kv_transfer import HASH_BYTES
from triptych.types.outputs import CacheNews
from triptych_services.enginecore.kv.groups import GroupRules


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


class _Prefix:
    """A prefix of whole blocks, of which a part is cached."""

    __slots__ = (
        "block_hash",
        "can_hit",
        "children",
        "depth",
        "is_cached",
        "num_useful_children",
        "parent",
        "runs",
    )

    def __init__(self, block_hash: bytes, parent: _Prefix | None, num_groups: int) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.children: dict[bytes, _Prefix] = {}
        self.depth: int = 1 if parent is None else parent.depth + 1
        """Blocks of the smallest size that it has."""
        self.is_cached = [False] * num_groups
        """Whether the block that ends here is cached, of each group that has such a block."""
        self.runs = [0] * num_groups
        """Cached blocks of each group behind each other, up to the last that ends here or before; not counted beyond
        what a hit needs. Of a full group: 1 if all are cached."""
        self.can_hit = False
        self.num_useful_children = 0

    @property
    def is_useful(self) -> bool:
        """Whether a request that begins with it finds at least this much, or would if it went on as another did."""
        return self.can_hit or self.num_useful_children > 0


class CachedPrefixes:
    """The prefixes that a request can find where each needs blocks of several groups. Owned by the block manager.

    Behind a window the cache loses the beginning of a prompt first, and keeps what a prompt that goes on can still
    use. So a block that is cached is no news by itself. Told are the prefixes that every group can serve, and the
    shorter ones that lead there:

        full       a b c d e f        cached
        window           d e f        d e f are enough for the last window
        told       a b c d e f        a request with the same prompt finds all of it

    Frontends look for the longest told prefix of a prompt. One that parts from the others at c is estimated too high.
    """

    def __init__(self, groups: Sequence[GroupRules], block_size: int) -> None:
        """
        Args:
            block_size: Tokens of the blocks that hashes name.
        """
        self._groups = groups
        self._block_size = block_size
        self._ratios = [group.block_size // block_size for group in groups]
        self._prefixes: dict[bytes, _Prefix] = {}
        self._useful: dict[bytes, None] = {}
        self._changes = CacheChanges(self._useful)

    def __bool__(self) -> bool:
        return bool(self._changes)

    def take(self) -> CacheNews:
        """Return the changes since the last call."""
        return self._changes.take()

    def base(self) -> list[bytes]:
        """Return what was told when `take` was last called."""
        return self._changes.base()

    def add_chain(self, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Take in the prefixes that the first `num_blocks` hashes of a table name, before their blocks are cached."""
        first = num_blocks
        while first and hashes[first - 1] not in self._prefixes:
            first -= 1
        parent = self._prefixes[hashes[first - 1]] if first else None
        for block_hash in hashes[first:num_blocks]:
            prefix = _Prefix(block_hash, parent, len(self._groups))
            self._prefixes[block_hash] = prefix
            if parent is not None:
                parent.children[block_hash] = prefix
            self._update(prefix)
            parent = prefix

    def note_stored(self, keys: Iterable[bytes]) -> None:
        """Note that blocks that were not cached are cached."""
        for key in keys:
            self._mark(key, is_cached=True)

    def note_evicted(self, key: bytes) -> None:
        """Note that a block that was cached is not cached any more."""
        prefix = self._mark(key, is_cached=False)
        while not prefix.children and not any(prefix.is_cached):
            del self._prefixes[prefix.block_hash]
            if prefix.parent is None:
                break
            del prefix.parent.children[prefix.block_hash]
            prefix = prefix.parent

    def note_cleared(self) -> None:
        """Note that nothing is cached any more."""
        self._prefixes.clear()
        self._useful.clear()
        self._changes.note_cleared()

    def _mark(self, key: bytes, *, is_cached: bool) -> _Prefix:
        prefix = self._prefixes[key[:HASH_BYTES]]
        index = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
        prefix.is_cached[index] = is_cached
        self._update(prefix)
        return prefix

    def _update(self, prefix: _Prefix) -> None:
        """Bring a prefix up to date, and those behind it that are affected."""
        changed = [prefix]
        while changed:
            each = changed.pop()
            before = each.runs
            each.runs = [
                self._run_of(each, group, ratio)
                for group, ratio in zip(self._groups, self._ratios, strict=True)
            ]
            self._note_hit(each, self._is_served(each))
            if each.runs != before:
                changed += each.children.values()

    def _run_of(self, prefix: _Prefix, group: GroupRules, ratio: int) -> int:
        parent = prefix.parent
        before = parent.runs[group.index] if parent is not None else int(not group.releases)
        if prefix.depth % ratio:
            return before
        if not prefix.is_cached[group.index]:
            return 0
        if not group.releases:
            return before
        return min(before + 1, group.window // group.block_size + 2)

    def _is_served(self, prefix: _Prefix) -> bool:
        """Return whether a request that goes on behind a prefix finds what it needs in every group."""
        num_tokens, num_blocks = prefix.depth * self._block_size, 0
        for group, ratio, run in zip(self._groups, self._ratios, prefix.runs, strict=True):
            if prefix.depth % ratio:
                return False
            num_needed = prefix.depth // ratio - group.first_needed(num_tokens) if group.releases else 1
            if run < num_needed:
                return False
            num_blocks += num_needed
        return num_blocks > 0

    def _note_hit(self, prefix: _Prefix, can_hit: bool) -> None:
        was_useful = prefix.is_useful
        prefix.can_hit = can_hit
        if prefix.is_useful == was_useful:
            return
        each: _Prefix | None = prefix
        while each is not None:
            if was_useful:
                del self._useful[each.block_hash]
                self._changes.note_evicted(each.block_hash)
            else:
                self._useful[each.block_hash] = None
                self._changes.note_stored((each.block_hash,))
            parent = each.parent
            if parent is not None:
                before = parent.is_useful
                parent.num_useful_children += -1 if was_useful else 1
                if parent.is_useful == before:
                    return
            each = parent
