"""Philox4x32-10 in Python integers: the random numbers that every implementation must draw, bit by bit.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

MASK32 = 0xFFFFFFFF
NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, scaled to 2^32

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four u32 from a counter of four u32 and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0 = (k0 + KEY_INCREMENTS[0]) & MASK32
        k1 = (k1 + KEY_INCREMENTS[1]) & MASK32
    return c0, c1, c2, c3


def token_word(seed: int, position: int, token_id: int) -> int:
    """The u32 that belongs to one token at one position under one seed.

    Args:
        seed: u64, or the int64 with its bits.
        position: of the token to be sampled, in its sequence.
    """
    counter = (position & MASK32, (position >> 32) & MASK32, token_id // 4, 0)
    return philox4x32(counter, (seed & MASK32, (seed >> 32) & MASK32))[token_id % 4]
