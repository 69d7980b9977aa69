"""From how many rows on quantized products are faster in bfloat16: measured here, on this machine and model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from triptych_kernels.cpu.quantized_weight import NEVER, QuantizedWeight

_ROWS = (16, 32, 64, 128, 256)
_ROUNDS = 5  # the fastest counts: others may be at work meanwhile
_WORTHWHILE = 0.95  # of the other's time: less of a gain may be noise


def allow_wide_products(weights: Sequence[QuantizedWeight]) -> int | None:
    """Let these weights multiply many rows in bfloat16 where that is faster; a few milliseconds.

    Whoever records products records this choice, so call it before.

    Returns:
        From how many rows on; None: never, or there are no weights.
    """
    if not weights:
        return None
    crossover = _find_crossover(sorted(weights, key=lambda weight: weight.num_elements)[len(weights) // 2])
    for weight in weights:
        weight.wide_rows = crossover
    return None if crossover == NEVER else crossover


def _find_crossover(weight: QuantizedWeight) -> int:
    """The fewest rows of `_ROWS` from which on the wide product is the faster one."""
    crossover = NEVER
    for num_rows in reversed(_ROWS):
        if _best_s(weight, num_rows, wide=True) > _WORTHWHILE * _best_s(weight, num_rows, wide=False):
            break
        crossover = num_rows
    return crossover


def _best_s(weight: QuantizedWeight, num_rows: int, *, wide: bool) -> float:
    x = torch.ones(num_rows, weight.in_features, dtype=torch.bfloat16)
    weight.wide_rows = 1 if wide else NEVER
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        weight.multiply(x, torch.bfloat16, "silu" if weight.gated else None)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
