"""Names for the content of full blocks: a chain of hashes, so that one name stands for a whole prefix.

hash(0) = H(zeros, tokens of block 0, extras of block 0)
hash(i) = H(hash(i - 1), tokens of block i, extras of block i)

An extra is a part of a block's content beside its tokens. Each is hashed with its length before it, so that no two
lists of extras read alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

HASH_BYTES = 16
ROOT_HASH = bytes(HASH_BYTES)

Extras = Mapping[int, Sequence[bytes]]
"""Block index to what distinguishes that block's content beside its tokens, in a fixed order of kinds."""


def extend_hashes(
    hashes: list[bytes],
    token_ids: array[int],
    num_blocks: int,
    block_size: int,
    extras: Extras,
) -> None:
    """Grow `hashes` in place until it names `num_blocks` leading blocks of `token_ids`.

    A parent and the tokens have fixed lengths, so appending extras is unambiguous. The bytes are those of this machine:
    hashes never leave the process.
    """
    first = len(hashes)
    if first >= num_blocks:
        return
    with memoryview(token_ids) as view:
        content = view[first * block_size : num_blocks * block_size].tobytes()
    block_bytes = block_size * token_ids.itemsize
    parent = hashes[-1] if hashes else ROOT_HASH
    for index, start in enumerate(range(0, len(content), block_bytes), first):
        block = parent + content[start : start + block_bytes]
        if index in extras:
            block += _packed(extras[index])
        parent = blake2b(block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
