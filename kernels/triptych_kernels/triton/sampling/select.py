"""The smallest logit that a filter keeps, found without sorting, by one program per row.

    list      the groups of tokens with maxima large enough to hold it; mostly a few hundred of thousands
    narrow    passes over these groups, each with three pivots, until few tokens are left between two bounds
    gather    these few into registers
    bisect    there, bit by bit

Keys of logits are compared, so equal logits are kept together. Masses are integers, so sums do not depend on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triptych_kernels.triton.sampling.race import load_quads, rates
from triptych_kernels.triton.sampling.scan import INF_KEY, MINUS_INF_KEY, key_of, value_of

TILE_GROUPS = 128
"""Groups that are read at a time."""
MAX_GATHERED = 4096
"""Tokens that are bisected in registers."""

MASS_OF_BEST = tl.constexpr(2.0**40)  # of the largest logit; the sum of 2^23 such fits int64
_NO_GROUP = tl.constexpr(2**26 - 1)  # past the end of any row
# Steps that are even in value, 4,096 of them in all; then even in keys, which comes to an end also near 0.
_VALUE_PASSES = tl.constexpr(6)


@triton.jit
def bound_of_largest(keys, num_needed, num_tolerated):
    """Return a key that at least `num_needed` of `keys` reach, and at most `num_tolerated` unless those are all equal.

    If too few keys are above that of -inf, it is the smallest key above it. `num_tolerated` >= `num_needed`.
    """
    low = tl.full((), MINUS_INF_KEY + 1, tl.int64)
    high = tl.full((), INF_KEY, tl.int64)
    num_reaching = tl.sum((keys >= low.to(tl.int32)).to(tl.int32))
    while (high - low > 1) & (num_reaching > num_tolerated):
        middle = (low + high) >> 1
        num_here = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        num_reaching = tl.where(num_here >= num_needed, num_here, num_reaching)
        low = tl.where(num_here >= num_needed, middle, low)
        high = tl.where(num_here >= num_needed, high, middle)
    return low.to(tl.int32)


@triton.jit
def list_where(listed, index, chosen, num_before):
    """Append the chosen of `index` to `listed` behind `num_before` others, in order, and return their new number."""
    place = num_before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + place, index, mask=chosen)
    return num_before + tl.sum(chosen.to(tl.int32))


@triton.jit
def load_maxima(group_maxima, num_groups, NUM_GROUPS: tl.constexpr):
    """Load [NUM_GROUPS] maxima, -inf past the row's own; reloaded at each use, as they take many registers."""
    group = tl.arange(0, NUM_GROUPS)
    return tl.load(group_maxima + group, mask=group < num_groups, other=-float("inf"))


@triton.jit
def list_groups(groups, group_maxima, num_groups, bound, NUM_GROUPS: tl.constexpr):
    """List the groups of a row that hold a logit of at least `bound`, more than -inf, and return their number."""
    tl.debug_barrier()  # the list before it may still be read
    reaches = load_maxima(group_maxima, num_groups, NUM_GROUPS) >= bound
    num_listed = list_where(groups, tl.arange(0, NUM_GROUPS), reaches, 0)
    tl.debug_barrier()
    return num_listed


@triton.jit
def listed_quads(groups, first, num_listed, TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return [TILE_GROUPS * GROUP / 4] quads of the listed groups from `first` on, past the row's end if too few."""
    index = first + tl.arange(0, TILE_GROUPS)
    group = tl.load(groups + index, mask=index < num_listed, other=_NO_GROUP)
    quads = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
    return tl.reshape(quads, (TILE_GROUPS * GROUP // 4,))


@triton.jit
def _weights(x, best, temperature, by_mass):
    """Return the int64 weight of logits: their probability if the best's is `MASS_OF_BEST`, or 1 each."""
    mass = (rates(x, best, temperature) * MASS_OF_BEST).to(tl.int64)
    return tl.where(by_mass, mass, 1)


@triton.jit
def weigh(
    logits, groups, num_listed, vocab_size, bound, best, temperature, by_mass,
    TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return weight, number and smallest key of the logits of at least `bound`."""
    weight = tl.zeros((TILE_GROUPS * GROUP // 4,), tl.int64)
    # whole numbers in float32, as sums of bits make the compiler go through memory
    number = tl.zeros((TILE_GROUPS * GROUP // 4,), tl.float32)
    smallest = tl.full((TILE_GROUPS * GROUP // 4,), INF_KEY, tl.int32)
    for first in range(0, num_listed, TILE_GROUPS):
        x = load_quads(logits, listed_quads(groups, first, num_listed, TILE_GROUPS, GROUP), vocab_size)
        weight += tl.sum(tl.where(x >= bound, _weights(x, best, temperature, by_mass), 0), axis=1)
        number += tl.sum(tl.where(x >= bound, 1.0, 0.0), axis=1)
        smallest = tl.minimum(smallest, tl.min(tl.where(x >= bound, key_of(x), INF_KEY), axis=1))
    return tl.sum(weight), tl.sum(number).to(tl.int32), tl.min(smallest)


@triton.jit
def _weigh_pivots(
    logits, groups, num_listed, vocab_size, pivot0, pivot1, pivot2, best, temperature, by_mass,
    TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return weights and numbers of the logits that reach each of three pivots."""
    weight0 = tl.zeros((TILE_GROUPS * GROUP // 4,), tl.int64)
    weight1, weight2 = weight0, weight0
    number0 = tl.zeros((TILE_GROUPS * GROUP // 4,), tl.float32)
    number1, number2 = number0, number0
    for first in range(0, num_listed, TILE_GROUPS):
        x = load_quads(logits, listed_quads(groups, first, num_listed, TILE_GROUPS, GROUP), vocab_size)
        keys, mass = key_of(x), _weights(x, best, temperature, by_mass)
        weight0 += tl.sum(tl.where(keys >= pivot0, mass, 0), axis=1)
        weight1 += tl.sum(tl.where(keys >= pivot1, mass, 0), axis=1)
        weight2 += tl.sum(tl.where(keys >= pivot2, mass, 0), axis=1)
        number0 += tl.sum(tl.where(keys >= pivot0, 1.0, 0.0), axis=1)
        number1 += tl.sum(tl.where(keys >= pivot1, 1.0, 0.0), axis=1)
        number2 += tl.sum(tl.where(keys >= pivot2, 1.0, 0.0), axis=1)
    return (
        tl.sum(weight0), tl.sum(weight1), tl.sum(weight2),
        tl.sum(number0).to(tl.int32), tl.sum(number1).to(tl.int32), tl.sum(number2).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _pivot(low, high, quarter: tl.constexpr, by_value):
    """Return the key a quarter, half or three quarters of the way between two keys, strictly between them."""
    low_value = value_of(low.to(tl.int32)).to(tl.float64)
    high_value = value_of((high - 1).to(tl.int32)).to(tl.float64)
    value = (low_value + (high_value - low_value) * (quarter / 4)).to(tl.float32)
    key = tl.where(by_value, key_of(value).to(tl.int64), low + (high - low) * quarter // 4)
    return tl.minimum(tl.maximum(key, low + 1), high - 1).to(tl.int32)


@triton.jit
def _may_be_several(low, weight, best, temperature, by_mass):
    """Return whether logits of this weight, with keys of at least `low`, can be more than one."""
    return 2 * weight > 3 * _weights(value_of(low.to(tl.int32)), best, temperature, by_mass)


@triton.jit
def _replace(is_closer, pivot, pivot_weight, pivot_number, key, weight, number):
    """Return a bound with the weight and number of logits that reach it, or the pivot instead."""
    return (
        tl.where(is_closer, pivot, key),
        tl.where(is_closer, pivot_weight, weight),
        tl.where(is_closer, pivot_number, number),
    )


@triton.jit
def find_threshold(
    logits, groups, gathered, group_maxima, num_groups, vocab_size, bound, lowest_bound, needed, best_key,
    temperature, by_mass,
    NUM_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr, MAX_GATHERED: tl.constexpr,
):  # fmt: skip
    """Return the key of the smallest of the fewest largest logits that together weigh `needed`, equal ones together.

    If all logits of at least `lowest_bound` weigh less, it is the smallest of these.

    Args:
        logits: Pointer to the row.
        groups: Scratch for a list of all groups.
        gathered: Scratch for `MAX_GATHERED` logits.
        group_maxima: [num_groups], maxima of the row's groups.
        bound: Bound to search from first; `lowest_bound` is the second.
        needed: int64, in probability or, unless `by_mass`, in tokens.
    """
    best = value_of(best_key)
    high = best_key.to(tl.int64) + 1
    weight_above = tl.zeros((), tl.int64)
    num_above = tl.zeros((), tl.int32)
    num_listed = list_groups(groups, group_maxima, num_groups, bound, NUM_GROUPS)
    weight, number, smallest = weigh(
        logits, groups, num_listed, vocab_size, bound, best, temperature, by_mass, TILE_GROUPS, GROUP
    )
    if (weight < needed) & (bound > lowest_bound):
        high, weight_above, num_above = smallest.to(tl.int64), weight, number
        num_listed = list_groups(groups, group_maxima, num_groups, lowest_bound, NUM_GROUPS)
        weight, number, smallest = weigh(
            logits, groups, num_listed, vocab_size, lowest_bound, best, temperature, by_mass,
            TILE_GROUPS, GROUP,
        )  # fmt: skip
    low = smallest.to(tl.int64)
    passes = 0
    while (number - num_above > MAX_GATHERED) & (high - low > 1):
        pivot0 = _pivot(low, high, 1, passes < _VALUE_PASSES)
        pivot1 = _pivot(low, high, 2, passes < _VALUE_PASSES)
        pivot2 = _pivot(low, high, 3, passes < _VALUE_PASSES)
        weight0, weight1, weight2, number0, number1, number2 = _weigh_pivots(
            logits, groups, num_listed, vocab_size, pivot0, pivot1, pivot2, best, temperature, by_mass,
            TILE_GROUPS, GROUP,
        )  # fmt: skip
        # from below: a pivot that is reached becomes the lower bound; from above: one that is not, the upper
        low, weight, number = _replace(weight0 >= needed, pivot0, weight0, number0, low, weight, number)
        low, weight, number = _replace(weight1 >= needed, pivot1, weight1, number1, low, weight, number)
        low, weight, number = _replace(weight2 >= needed, pivot2, weight2, number2, low, weight, number)
        high, weight_above, num_above = _replace(
            weight2 < needed, pivot2, weight2, number2, high, weight_above, num_above
        )
        high, weight_above, num_above = _replace(
            weight1 < needed, pivot1, weight1, number1, high, weight_above, num_above
        )
        high, weight_above, num_above = _replace(
            weight0 < needed, pivot0, weight0, number0, high, weight_above, num_above
        )
        passes += 1
    if high - low > 1:
        num_gathered = tl.zeros((), tl.int32)
        for first in range(0, num_listed, TILE_GROUPS):
            x = load_quads(logits, listed_quads(groups, first, num_listed, TILE_GROUPS, GROUP), vocab_size)
            keys = tl.reshape(key_of(x), (TILE_GROUPS * GROUP,))
            between = (keys >= low.to(tl.int32)) & (keys <= (high - 1).to(tl.int32))
            num_gathered = list_where(gathered, keys, between, num_gathered)
        tl.debug_barrier()
        place = tl.arange(0, MAX_GATHERED)
        keys = tl.load(gathered + place, mask=place < num_gathered, other=MINUS_INF_KEY)
        mass = _weights(value_of(keys), best, temperature, by_mass)
        weight_ungathered = weight_above
        while (high - low > 1) & _may_be_several(low, weight - weight_above, best, temperature, by_mass):
            middle = (low + high) >> 1
            weight_here = weight_ungathered + tl.sum(tl.where(keys >= middle.to(tl.int32), mass, 0))
            low, weight, _ = _replace(weight_here >= needed, middle, weight_here, 0, low, weight, 0)
            high, weight_above, _ = _replace(
                weight_here < needed, middle, weight_here, 0, high, weight_above, 0
            )
        tl.debug_barrier()  # the room may be wanted again
    return value_of(low.to(tl.int32))
