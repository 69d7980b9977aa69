"""One request's KV blocks, and the hashes that name their content.

A hash names a full block together with everything before it:

    hash(-1) = H(extras of the request: cache salt, ...)            the root of the chain
    hash(i)  = H(hash(i - 1), tokens of block i, extras of block i)

An extra is something beside the tokens that KV depends on. Each is hashed with its length before it, so no two lists of
extras have the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

NULL_BLOCK = 0  # padding in block tables: never allocated, never written, never read
HASH_BYTES = 16

Extras = Mapping[int, Sequence[bytes]]
"""Block index to what the block's KV depends on beside its tokens, in a fixed order of kinds."""


def _packed(extras: Sequence[bytes]) -> bytes:
    return b"".join(len(extra).to_bytes(4, "little") + extra for extra in extras)


def root_hash(*extras: bytes) -> bytes:
    """Return the hash that begins the chain of a request.

    Args:
        extras: What all of the request's KV depends on beside its tokens, in a fixed order of kinds.
    """
    return blake2b(_packed(extras), digest_size=HASH_BYTES).digest()


PLAIN_ROOT_HASH = root_hash(b"")
"""Root of requests without a cache salt."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in the order of its tokens. The request owns it; only `BlockManager` writes to it.

    tokens      0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 51        block size 16
    block_ids      7         2          9         4
    hashes         a         b          c                       of full blocks only
                <- hits ->
                <------ cached ------>                          others may find them
    """

    root_hash: bytes = PLAIN_ROOT_HASH
    """Begins the chain of hashes; two requests with different roots share no blocks."""
    extras: Extras = field(default_factory=dict)
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the leading full blocks, as far as they were needed. They depend only on tokens, root and extras, so
    they outlive the blocks: a preempted request finds its prefix again without hashing it again."""
    shares_hashes: bool = False
    """Whether `hashes` belongs to all choices of one prompt, and must be copied before it grows."""
    is_shared: bool = False
    """Whether all choices of one prompt share blocks though there is no prefix caching. Their root is their own."""
    num_hits: int = 0
    """Leading blocks that another request computed."""
    num_cached: int = 0
    """Leading blocks that are in the prefix cache, hits included."""

    def extend_hashes(self, token_ids: array[int], num_blocks: int, block_size: int) -> None:
        """Hash further leading blocks of `token_ids` until `num_blocks` have a hash.

        A parent's hash and the tokens have fixed lengths, so appending extras is unambiguous. The bytes of tokens are
        those of this machine: hashes never leave the process.
        """
        first = len(self.hashes)
        if first >= num_blocks:
            return
        if self.shares_hashes:
            self.hashes, self.shares_hashes = self.hashes[:], False
        hashes, extras = self.hashes, self.extras
        with memoryview(token_ids) as view:
            content = view[first * block_size : num_blocks * block_size].tobytes()
        block_bytes = block_size * token_ids.itemsize
        parent = hashes[-1] if hashes else self.root_hash
        for start in range(0, len(content), block_bytes):
            block = parent + content[start : start + block_bytes]
            if extras and (own := extras.get(len(hashes))):
                block += _packed(own)
            parent = blake2b(block, digest_size=HASH_BYTES).digest()
            hashes.append(parent)
