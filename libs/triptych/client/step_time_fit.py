"""The step times of a recorded run as a linear model with no coefficient below zero."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError
from triptych.types.step_time import StepTimeModel

F64 = NDArray[np.float64]

_PARTS = ("base", "prefill tokens", "decode rows", "context tokens")
_NUM_ROUNDS = 30  # of reweighting: the coefficients settle within ten
_EXACT = 1e-3  # a relative error below this is none: weights stay finite
_LEAST_S = 1e-6  # no step is shorter, so that no weight is infinite
_UNITS = (1e3, 1e6, 1e6, 1e9)  # seconds to those of the coefficients: ms, us, us, ns


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """The model that fits best, and how well it does."""

    model: StepTimeModel
    num_steps: int
    median_error: float
    """Of |measured - predicted| / predicted, over the steps."""
    p90_error: float


def fit_step_times(works: NDArray[np.integer], seconds: F64) -> StepTimeFit:
    """Fit the four coefficients so that the sum of the relative errors is least.

    Relative to what is predicted, since a decode step of 5 ms counts as much as a prefill of 500 ms. Errors and
    not their squares (by iteratively reweighted least squares), since now and then something holds a step up.

    Args:
        works: [num_steps, 3], prefill tokens, decode rows and context tokens, as in `StepWork`.
        seconds: [num_steps], > 0.
    Raises:
        ConfigError: the steps are too few or too alike to tell the four parts apart; says what is missing.
    """
    parts = np.column_stack((np.ones(len(works)), works))  # [num_steps, 4]
    _check_variety(parts)
    scale = np.linalg.norm(parts, axis=0)  # columns differ by six orders of magnitude
    columns, predicted, errors = parts / scale, np.full(len(works), np.median(seconds)), np.ones(len(works))
    for _ in range(_NUM_ROUNDS):
        weights = 1 / (predicted * np.sqrt(np.maximum(errors, _EXACT)))
        best = _non_negative_least_squares(columns * weights[:, None], seconds * weights)
        predicted = np.maximum(columns @ best, _LEAST_S)
        errors = np.abs(seconds / predicted - 1)
    base, prefill, decode, context = (best / scale * _UNITS).tolist()
    return StepTimeFit(
        model=StepTimeModel(
            base_ms=base, prefill_token_us=prefill, decode_row_us=decode, context_token_ns=context
        ),
        num_steps=len(works),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
    )


def _non_negative_least_squares(columns: F64, target: F64) -> F64:
    """The x >= 0 with the least |columns x - target|: exact, by trying every set of columns that x may use."""
    width = columns.shape[1]
    best, least = np.zeros(width), np.inf
    for used in _subsets(width):
        x = np.zeros(width)
        x[used] = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        distance = float(np.linalg.norm(columns @ x - target))
        if (x >= 0).all() and distance < least:
            best, least = x, distance
    return best


def _check_variety(parts: F64) -> None:
    advice = "record a run with prompts and outputs of different lengths and changing numbers of requests"
    missing = [name for name, column in zip(_PARTS[1:], parts.T[1:], strict=True) if not column.any()]
    if missing:
        raise ConfigError(f"the {len(parts)} recorded steps hold no {' and no '.join(missing)}; {advice}")
    if np.linalg.matrix_rank(parts / np.linalg.norm(parts, axis=0)) < len(_PARTS):
        raise ConfigError(
            f"the {len(parts)} recorded steps are too alike to tell apart what {', '.join(_PARTS)} cost; {advice}"
        )


def _subsets(size: int) -> list[list[int]]:
    """All but the empty one."""
    return [
        list(chosen)
        for length in range(1, size + 1)
        for chosen in itertools.combinations(range(size), length)
    ]
