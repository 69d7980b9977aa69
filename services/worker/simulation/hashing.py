"""Numbers that a simulation draws in place of computing."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

BASE = np.uint64(0x5851F42D4C957F2D)
"""Factor between the terms of two tokens in a hash of a prefix: the multiplier of Knuth's MMIX generator."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""splitmix64's step."""
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # its finalizer


def mix(bits: U64) -> U64:
    """Mix as splitmix64's finalizer does: every bit of the result depends on every bit given."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def salt_of(adapter: str) -> np.uint64:
    """Return the number that an adapter changes all hashes by. 0: there is no adapter.

    Args:
        adapter: Its digest; empty for none.
    """
    if not adapter:
        return np.uint64(0)
    return np.frombuffer(hashlib.blake2b(adapter.encode(), digest_size=8).digest(), "<u8")[0]
