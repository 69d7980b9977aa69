"""Changes of the prefix cache, for those who must know what is cached here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from triptych.types.facts import KvKind
from triptych.types.kv_transfer import HASH_BYTES
from triptych.types.outputs import CacheNews
from triptych_services.enginecore.kv.groups import GroupRules


class CacheChanges:
    """The changes since `take` was last called, without those that have cancelled out. Owned by the block pool.

    There are never more than the cache has blocks, times two.
    """

    def __init__(self, cached: Iterable[bytes]) -> None:
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
        if not evicted:
            stored.update(dict.fromkeys(block_hashes))
            return
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
    """A prefix of whole blocks, of which a part is cached. Made by `_create_prefix`."""

    __slots__ = (
        "block_hash",
        "cached",
        "can_hit",
        "depth",
        "first_child",
        "next_sibling",
        "num_useful_children",
        "parent",
        "previous_sibling",
        "runs",
    )

    block_hash: bytes
    parent: _Prefix | None
    depth: int
    """Its length, in blocks of `block_size` tokens."""
    cached: int
    """Bit i: the block of group i that ends here is cached."""
    runs: tuple[int, ...]
    """Cached blocks of each group behind each other, up to the last that ends here or before; not counted beyond
    what a hit needs. Of a full group: 1 if all are cached."""
    can_hit: bool
    num_useful_children: int
    first_child: _Prefix | None
    """The youngest of the prefixes that are a block longer; None: there are none."""
    next_sibling: _Prefix | None
    """The next older one of those that go on from the same prefix."""
    previous_sibling: _Prefix | None

    @property
    def is_useful(self) -> bool:
        """Whether a request that begins with it finds at least this much, or would if it went on as another did."""
        return self.can_hit or self.num_useful_children > 0

    def children(self) -> Iterator[_Prefix]:
        """Iterate over the prefixes that are a block longer."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    def leave(self) -> None:
        """Take it, which has no children, from those of its parent."""
        before, after = self.previous_sibling, self.next_sibling
        if after is not None:
            after.previous_sibling = before
        if before is not None:
            before.next_sibling = after
        elif self.parent is not None:
            self.parent.first_child = after


def _create_prefix(
    block_hash: bytes, parent: _Prefix | None, runs: tuple[int, ...], cached: int, can_hit: bool
) -> _Prefix:
    """Return a prefix that is a block longer than its parent.

    It is no constructor, which a class of Python 3.11 calls by way of C.
    """
    prefix = _Prefix()
    prefix.block_hash, prefix.parent = block_hash, parent
    prefix.runs, prefix.cached, prefix.can_hit = runs, cached, can_hit
    prefix.num_useful_children = 0
    prefix.first_child = prefix.next_sibling = prefix.previous_sibling = None
    if parent is None:
        prefix.depth = 1
    else:
        prefix.depth = parent.depth + 1
        if (sibling := parent.first_child) is not None:
            prefix.next_sibling, sibling.previous_sibling = sibling, prefix
        parent.first_child = prefix
    return prefix


class _Useful(Iterable[bytes]):
    """The hashes of the useful ones among some prefixes."""

    def __init__(self, prefixes: Mapping[bytes, _Prefix]) -> None:
        self._prefixes = prefixes

    def __iter__(self) -> Iterator[bytes]:
        return (prefix.block_hash for prefix in self._prefixes.values() if prefix.is_useful)


class _Need:
    """The blocks of one group that a hit needs, in numbers that are at hand."""

    __slots__ = (
        "_block_size",
        "_group",
        "bit",
        "first_run",
        "is_chunk",
        "num_needed_at_most",
        "ratio",
        "window_blocks",
    )

    def __init__(self, group: GroupRules, block_size: int) -> None:
        self._group = group
        self._block_size = block_size
        self.bit = 1 << group.index
        """The group's bit in `_Prefix.cached`."""
        self.ratio = 1 if group.is_state else group.block_size // block_size
        self.first_run = 0 if group.releases else 1
        """Run before the first block."""
        self.is_chunk = group.kind is KvKind.CHUNK
        """Whether the number depends on the place in the chunk."""
        self.num_needed_at_most = 1
        self.window_blocks = 0
        """The longest run that is counted. 0: a full group, of which it is 1 where nothing is missing."""
        if group.is_state:  # the page of this very length
            self.window_blocks = 1
        elif group.releases:
            end = 2 * group.window * group.block_size  # any that is far enough from the beginning
            self.num_needed_at_most = max(end // group.block_size - group.first_needed(end), 1)
            self.window_blocks = group.window // group.block_size + 2

    def num_needed(self, depth: int) -> int:
        """Return the blocks that a hit needs of this group, by its length in blocks of `block_size` tokens."""
        num_tokens = depth * self._block_size
        return num_tokens // self._group.block_size - self._group.first_needed(num_tokens)


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
        self._needs = [_Need(group, block_size) for group in groups]
        self._all_cached = (1 << len(groups)) - 1
        self._is_even = all(need.ratio == 1 for need in self._needs)
        """Whether all groups have blocks of one size."""
        self._no_runs = (0,) * len(groups)
        self._first_runs = tuple(need.first_run for need in self._needs)
        """Before the first block."""
        self._longest_runs = tuple(need.window_blocks or 1 for need in self._needs)
        """The runs of a prefix behind which every group can serve whatever follows. They are this very tuple there."""
        self._prefixes: dict[bytes, _Prefix] = {}
        self._changes = CacheChanges(_Useful(self._prefixes))

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
            prefix = _create_prefix(block_hash, parent, self._no_runs, 0, False)
            self._prefixes[block_hash] = prefix
            if not self._is_even:
                before = self._first_runs if parent is None else parent.runs
                prefix.runs = tuple(
                    run if prefix.depth % need.ratio else 0  # goes on from the block before
                    for run, need in zip(before, self._needs, strict=True)
                )
            parent = prefix

    def note_stored(self, keys: Iterable[bytes]) -> None:
        """Note that blocks that were not cached are cached."""
        prefixes, changed = self._prefixes, dict[_Prefix, None]()
        for key in keys:
            if len(key) > HASH_BYTES:
                prefix = prefixes[key[:HASH_BYTES]]
                prefix.cached |= 1 << key[HASH_BYTES]
            else:
                prefix = prefixes[key]
                prefix.cached |= 1
            changed[prefix] = None
        for prefix in changed:
            self._update(prefix)

    def note_stored_whole(self, chains: Iterable[tuple[Sequence[bytes], int, int]]) -> None:
        """Note that blocks of all groups are cached that were not, where all have blocks of one size.

        Args:
            chains: The hashes of a table, and the first and the end of its blocks that are cached. They need no
                `add_chain` before.
        """
        prefixes, longest, all_cached = self._prefixes, self._longest_runs, self._all_cached
        news: list[bytes] = []
        for hashes, first, end in chains:
            parent = prefixes.get(hashes[first - 1]) if first else None
            for at in range(first, end):
                block_hash = hashes[at]
                if (
                    parent is None
                    or parent.runs is not longest
                    or not parent.can_hit
                    or block_hash in prefixes
                ):
                    self.add_chain(hashes, at + 1)
                    parent = prefixes[block_hash]
                    parent.cached = all_cached
                    self._update(parent)
                    continue
                parent.num_useful_children += 1  # it is told already, as while rows decode
                parent = prefixes[block_hash] = _create_prefix(block_hash, parent, longest, all_cached, True)
                news.append(block_hash)
        self._changes.note_stored(news)

    def note_next_stored(self, chains: Iterable[Sequence[bytes]]) -> None:
        """Do as `note_stored_whole` does, for the block of the last hash of each table."""
        prefixes, longest, all_cached = self._prefixes, self._longest_runs, self._all_cached
        news, others = list[bytes](), list[tuple[Sequence[bytes], int, int]]()
        for hashes in chains:
            block_hash, num_hashes = hashes[-1], len(hashes)
            parent = prefixes.get(hashes[-2]) if num_hashes > 1 else None
            if parent is None or parent.runs is not longest or not parent.can_hit or block_hash in prefixes:
                others.append((hashes, num_hashes - 1, num_hashes))
                continue
            parent.num_useful_children += 1
            prefixes[block_hash] = _create_prefix(block_hash, parent, longest, all_cached, True)
            news.append(block_hash)
        self._changes.note_stored(news)
        if others:
            self.note_stored_whole(others)

    def note_evicted(self, key: bytes) -> None:
        """Note that a block that was cached is not cached any more."""
        prefix = self._prefixes[key[:HASH_BYTES]]
        prefix.cached &= ~(1 << key[HASH_BYTES] if len(key) > HASH_BYTES else 1)
        self._update(prefix)
        while prefix.first_child is None and not prefix.cached:
            del self._prefixes[prefix.block_hash]
            prefix.leave()
            if prefix.parent is None:
                break
            prefix = prefix.parent

    def note_cleared(self) -> None:
        """Note that nothing is cached any more."""
        self._prefixes.clear()
        self._changes.note_cleared()

    def _update(self, prefix: _Prefix) -> None:
        """Bring a prefix up to date, and those behind it that are affected."""
        changed = [prefix]
        while changed:
            each = changed.pop()
            before = self._first_runs if each.parent is None else each.parent.runs
            if each.cached == self._all_cached and before is self._longest_runs and self._is_even:
                runs, can_hit = before, True  # as while rows decode
            else:
                runs, can_hit = self._runs_of(each, before)
            if can_hit is not each.can_hit:
                self._note_hit(each, can_hit)
            if runs != each.runs:
                each.runs = runs
                changed += each.children()

    def _runs_of(self, prefix: _Prefix, before: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Return the runs of a prefix, and whether it can be hit.

        Args:
            before: Runs of the prefix that is a block shorter.
        """
        depth, runs, can_hit, num_blocks = prefix.depth, list[int](), True, 0
        for run, need in zip(before, self._needs, strict=True):
            if depth % need.ratio:
                can_hit = False
            elif not prefix.cached & need.bit:
                run = 0
            elif need.window_blocks:
                run = min(run + 1, need.window_blocks)
            num_needed = (
                need.num_needed(depth) if need.is_chunk else min(need.num_needed_at_most, depth // need.ratio)
            )
            can_hit = can_hit and run >= num_needed
            num_blocks += num_needed
            runs.append(run)
        all_runs = tuple(runs)
        return self._longest_runs if all_runs == self._longest_runs else all_runs, can_hit and num_blocks > 0

    def _note_hit(self, prefix: _Prefix, can_hit: bool) -> None:
        was_useful = prefix.is_useful
        prefix.can_hit = can_hit
        if (can_hit or prefix.num_useful_children > 0) is was_useful:
            return
        each: _Prefix | None = prefix
        while each is not None:
            if was_useful:
                self._changes.note_evicted(each.block_hash)
            else:
                self._changes.note_stored((each.block_hash,))
            parent = each.parent
            if parent is not None:
                before = parent.is_useful
                parent.num_useful_children += -1 if was_useful else 1
                if parent.is_useful == before:
                    return
            each = parent
