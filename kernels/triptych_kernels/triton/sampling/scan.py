"""Helpers of a first pass over logits: values compared as integers, and the best of each chunk and group.

A row is read in chunks, one program each, so that a single row keeps the device busy. Groups are small runs of tokens;
later passes read only the groups with large maxima.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 4096
"""Tokens of one program, 16 KB."""
GROUP = 32
"""Tokens of one maximum: a line of the cache."""

LOWEST = tl.constexpr(-3.4028234663852886e38)  # a bound of what is more than -inf
INF_KEY = tl.constexpr(0x7F800000)
MINUS_INF_KEY = tl.constexpr(-0x7F800001)
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x):
    """Return int32 keys in the order of float32 values, equal for equal values; NaN is above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    """Return the float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, token):
    """Pack keys and tokens into int64 in the order of keys, of equal keys the lowest token first."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def packed_key(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def packed_token(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def is_usable(best_key):
    """Return whether a row has probabilities if its largest logit has this key: no NaN, and a finite maximum."""
    return (best_key > MINUS_INF_KEY) & (best_key < INF_KEY)


@triton.jit
def usable_value(best_key, otherwise):
    """Return the largest logit, to be subtracted from others, or `otherwise` if there are no probabilities."""
    return tl.where(is_usable(best_key), value_of(best_key), otherwise)


@triton.jit
def store_group_maxima(group_maxima, x, row, chunk, num_chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Store the maxima of a chunk `x` of any shape to its part of [num_rows, num_chunks * CHUNK / GROUP]."""
    num_groups: tl.constexpr = CHUNK // GROUP
    maxima = tl.max(tl.reshape(x, (num_groups, GROUP)), axis=1)
    tl.store(group_maxima + (row * num_chunks + chunk) * num_groups + tl.arange(0, num_groups), maxima)


@triton.jit
def best_of_chunks(chunk_best, row, num_chunks, NUM_CHUNKS: tl.constexpr):
    """Return the best of a row, packed."""
    chunk = tl.arange(0, NUM_CHUNKS)
    return tl.max(tl.load(chunk_best + row * num_chunks + chunk, mask=chunk < num_chunks, other=-(2**63)))
