"""Hashes that name KV blocks by their content. Engines cache blocks by them, and frontends find engines by them.

A hash names a full block together with everything before it:

    hash(-1) = H(extras of the request: cache salt, ...)            the root of the chain
    hash(i)  = H(hash(i - 1), tokens of block i, extras of block i)

An extra is something beside the tokens that KV depends on. Each is hashed with its length before it, so no two lists of
extras have the same bytes. A parent's hash and the tokens have fixed lengths, so appending extras is unambiguous.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

from triptych.types.kv_transfer import HASH_BYTES as HASH_BYTES
from triptych.types.submit import PrefixHash

TOKEN_BYTES = 4
_NAME = "blake2b-16/le32/v1"

Extras = Mapping[int, Sequence[bytes]]
"""Block index to what the block's KV depends on beside its tokens, in a fixed order of kinds."""
_NO_EXTRAS: Extras = MappingProxyType({})


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


def root_of_request(cache_salt: str, adapter_digest: str = "") -> bytes:
    """Return the hash that begins the chain of a client's request."""
    if adapter_digest:
        return root_hash(cache_salt.encode(), adapter_digest.encode())
    return root_hash(cache_salt.encode()) if cache_salt else PLAIN_ROOT_HASH


def hash_block(parent: bytes, content: bytes) -> bytes:
    """Return the hash of a full block without extras; the arguments are those of `hash_blocks`."""
    return blake2b(parent + content, digest_size=HASH_BYTES).digest()


def hash_next_blocks(parents: Iterable[bytes], contents: Iterable[bytes]) -> list[bytes]:
    """Return the hashes of full blocks of several prompts, without extras.

    Args:
        parents: Hash of the block before each, or its root.
        contents: The tokens of each, 4 bytes each, little-endian.
    """
    pairs = zip(parents, contents, strict=True)
    return [blake2b(parent + content, digest_size=HASH_BYTES).digest() for parent, content in pairs]


def hash_blocks(
    parent: bytes,
    content: bytes,
    block_size: int,
    extras: Extras = _NO_EXTRAS,
    first_block: int = 0,
) -> list[bytes]:
    """Return the hashes of the full blocks in a part of a prompt.

    Args:
        parent: Hash of the block before the part, or the root.
        content: The part's tokens, 4 bytes each, little-endian.
        block_size: Tokens per block.
        extras: Extras of the blocks.
        first_block: Index of the part's first block.
    """
    hashes: list[bytes] = []
    block_bytes = block_size * TOKEN_BYTES
    for start in range(0, len(content) - block_bytes + 1, block_bytes):
        block = parent + content[start : start + block_bytes]
        if extras and (own := extras.get(first_block + len(hashes))):
            block += _packed(own)
        parent = blake2b(block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def describe_hash(block_size: int) -> PrefixHash:
    """Return the name of the hash, and a hash of fixed tokens, for the other side to compare.

    The tokens are those of this machine, in its order of bytes.
    """
    tokens = array("I", range(2 * block_size)).tobytes()
    return PrefixHash(_NAME, block_size, hash_blocks(root_hash(b"test"), tokens, block_size)[-1])


def why_unknown(told: PrefixHash) -> str:
    """Return why the hashes that an engine reports mean nothing here; empty: they are those of this module."""
    if told.name != _NAME:
        return f"it names blocks by {told.name!r}, which is not {_NAME!r}"
    if told.block_size <= 0 or told != describe_hash(told.block_size):
        return f"its {_NAME} of known tokens differs from the one here"
    return ""
