"""Philox4x32-10 over int64 tensors that hold u32 values.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from torch import Tensor

MASK32 = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Four u32 from each counter and key; all int64 tensors that broadcast against each other.

    What is constant along an axis may have size 1 there and costs nothing in the first rounds.
    A product of two u32 wraps around in int64 without losing a bit: its high word is read by an
    arithmetic shift, whose copies of the sign the next mask takes away. Words 1 and 3 go unmasked
    until the end, since xor never carries.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ (c1 ^ k0)) & MASK32, product1
        c2, c3 = ((product0 >> 32) ^ (c3 ^ k1)) & MASK32, product0
        k0 = (k0 + _KEY_INCREMENTS[0]) & MASK32
        k1 = (k1 + _KEY_INCREMENTS[1]) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32
