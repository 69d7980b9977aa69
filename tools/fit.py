"""Fit the simulated worker's step times to a recorded run, and write them to a file.

  triptych serve MODEL --journal.path journals               record a run, under a load of your own
  python -m tools.fit journals --output times.json           fit
  triptych serve MODEL --sim --simulation.profile times.json replay its speed, without its hardware

Record prompts and outputs of different lengths and a changing number of requests: steps that are all alike do
not tell what a token, a row and a context cost. The fit is a linear model without negative coefficients.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.replay.journal_rows import read_measured_steps
from triptych.config.step_times import StepTimeModel, write_step_time_profile
from triptych.errors import ConfigError, TriptychError

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
    """Median over the steps of |measured - predicted| / predicted."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 means that the journal cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("journal", type=Path, help="a step journal, or a directory: its newest one is read")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the JSON profile to write"
    )
    arguments = parser.parse_args(argv)
    try:
        fit_journal(arguments.journal, arguments.output)
    except TriptychError as error:
        print(f"tools.fit: {error}", file=sys.stderr)
        return 2
    return 0


def fit_journal(journal: Path, output: Path) -> None:
    """Fit the steps of `journal`, write the profile to `output`, print how well it fits."""
    steps = [step for step in read_measured_steps(journal) if step.work.num_context_tokens]
    works = np.array([astuple(step.work) for step in steps], np.int64).reshape(-1, 3)
    fit = fit_step_times(works, np.array([step.compute_ns for step in steps]) / 1e9)
    about = {
        "journal": str(journal),
        "num_steps": fit.num_steps,
        "median_error": round(fit.median_error, 4),
        "p90_error": round(fit.p90_error, 4),
    }
    write_step_time_profile(output, fit.model, about)
    print(_report(fit, output))


def _report(fit: StepTimeFit, output: Path) -> str:
    model = fit.model
    return f"""\
{fit.num_steps} steps, predicted within {fit.median_error:.1%} at the median and {fit.p90_error:.1%} for nine in ten:

  base            {model.base_ms:10.3f} ms
  prefill token   {model.prefill_token_us:10.3f} us
  decode row      {model.decode_row_us:10.3f} us
  context token   {model.context_token_ns:10.3f} ns

Written to {output}; use it with --simulation.profile {output}"""


if __name__ == "__main__":
    raise SystemExit(main())
