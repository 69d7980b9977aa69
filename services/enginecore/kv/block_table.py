"""One request's KV blocks, in the order of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.enginecore.kv.hashing import Extras

NULL_BLOCK = 0  # padding in block tables: never handed out, never written, never read


@dataclass(slots=True, eq=False)
class BlockTable:
    """Owned by a request, written by `BlockManager` alone.

    tokens      0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 51        block size 16
    block_ids      7         2          9         4
    hashes         a         b          c                       full blocks alone
                <- hits ->
                <------ offered ----->                          may be found by others
    """

    extras: Extras = field(default_factory=dict)
    """The cache salt, if there is one, in block 0."""
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of the leading full blocks, as far as anyone asked. They depend on tokens and extras alone, so they
    outlive the blocks: a preempted request finds its prefix again without hashing it again."""
    shares_hashes: bool = False
    """Whether `hashes` belongs to all choices of one prompt, and must be copied to grow."""
    num_hits: int = 0
    """Leading blocks that another request computed."""
    num_cached: int = 0
    """Leading blocks whose hashes stand in the prefix cache, hits included."""
