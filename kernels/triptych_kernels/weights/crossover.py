"""From how many rows on quantized products are faster in bfloat16: measured here, on this machine and model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle

import torch

from triptych_kernels.weights.formats import QuantizedFormat
from triptych_kernels.weights.quantized import NEVER, QuantizedWeight

_ROWS = (64, 128, 256, 512)
_ROUNDS = 4  # the fastest counts: others may be at work meanwhile
_ENOUGH_S = 0.02  # what takes that long need not be repeated
_WORTHWHILE = 0.95  # of the other's time: less of a gain may be noise

Kind = tuple[int, int, bool, QuantizedFormat]
"""Weights of which one is as good as another: (out_features, in_features, gated, format)."""


def allow_wide_products(weights: Sequence[QuantizedWeight]) -> dict[Kind, int]:
    """Let these weights multiply many rows in bfloat16 where that is faster; a tenth of a second.

    Whoever records products records this choice, so call it before.

    Returns:
        From how many rows on, of the kinds that ever are.
    """
    kinds: dict[Kind, list[QuantizedWeight]] = {}
    for weight in weights:
        kinds.setdefault(_kind(weight), []).append(weight)
    crossovers = {kind: _find_crossover(alike) for kind, alike in kinds.items()}
    for weight in weights:
        weight.wide_rows = crossovers[_kind(weight)]
    return {kind: rows for kind, rows in crossovers.items() if rows != NEVER}


def _kind(weight: QuantizedWeight) -> Kind:
    return weight.out_features, weight.in_features, weight.gated, weight.format


def _find_crossover(alike: Sequence[QuantizedWeight]) -> int:
    """The fewest rows of `_ROWS` from which on the wide product is the faster one."""
    crossover = NEVER
    for num_rows in reversed(_ROWS):
        if _best_s(alike, num_rows, wide=True) > _WORTHWHILE * _best_s(alike, num_rows, wide=False):
            break
        crossover = num_rows
    return crossover


def _best_s(alike: Sequence[QuantizedWeight], num_rows: int, *, wide: bool) -> float:
    """Of one product, each with another weight if there are several: in a step none is in the caches."""
    x = torch.ones(num_rows, alike[0].in_features, dtype=torch.bfloat16)
    seconds: list[float] = []
    for weight in cycle(alike):
        weight.wide_rows = 1 if wide else NEVER
        started = time.perf_counter()
        weight.multiply(x, torch.bfloat16, "silu" if weight.gated else None)
        seconds.append(time.perf_counter() - started)
        if len(seconds) == _ROUNDS or sum(seconds) > _ENOUGH_S:
            break
    return min(seconds)
