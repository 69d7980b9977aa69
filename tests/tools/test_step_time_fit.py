"""Step times from a recorded run: what is found again, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import numpy as np
import pytest

from tools.fit import fit_step_times
from triptych.config.step_times import StepTimeModel, StepWork
from triptych.errors import ConfigError

TRUE = StepTimeModel(base_ms=4.5, prefill_token_us=21, decode_row_us=6.5, context_token_ns=48)


def recorded(model: StepTimeModel = TRUE, num_steps: int = 300, seed: int = 1):
    """Works and seconds of a mixed run: half of the steps decode alone."""
    rng = np.random.default_rng(seed)
    prefill = rng.integers(0, 2000, num_steps) * rng.integers(0, 2, num_steps)
    rows = rng.integers(1, 256, num_steps)
    works = np.column_stack((prefill, rows, rows * rng.integers(50, 3000, num_steps)))
    seconds = np.array([model.step_ns(StepWork(*work)) for work in works.tolist()]) / 1e9
    return works, seconds


def test_exact_times_give_the_model_that_made_them():
    fit = fit_step_times(*recorded())
    assert np.allclose(astuple(fit.model), astuple(TRUE), rtol=1e-6)
    assert fit.num_steps == 300
    assert fit.p90_error < 1e-6


def test_noise_and_a_few_steps_held_up_leave_the_model_about_where_it_was():
    works, seconds = recorded()
    rng = np.random.default_rng(2)
    seconds *= rng.normal(1, 0.03, seconds.size)
    seconds[:3] *= 50
    seconds[3:6] /= 50
    fit = fit_step_times(works, seconds)
    predicted = np.array([fit.model.step_ns(StepWork(*work)) for work in works.tolist()])
    truth = np.array([TRUE.step_ns(StepWork(*work)) for work in works.tolist()])
    assert np.abs(predicted / truth - 1).max() < 0.02
    assert 0.01 < fit.median_error < 0.04


def test_no_coefficient_falls_below_zero_and_the_rest_is_the_best_without_it():
    works, seconds = recorded(StepTimeModel(5, 20, 0, 50))
    seconds -= works[:, 1] * 1e-6  # rows that make a step shorter: nothing to extrapolate
    fit = fit_step_times(works, seconds)
    assert fit.model.decode_row_us == 0
    assert min(astuple(fit.model)) >= 0
    parts = np.column_stack((np.ones(len(works)), works[:, [0, 2]])) * [1e-3, 1e-6, 1e-9]
    found = np.array([fit.model.base_ms, fit.model.prefill_token_us, fit.model.context_token_ns])
    scale = parts @ found
    least = np.abs((parts @ found - seconds) / scale).sum()
    for change in itertools.product((0.98, 1, 1.02), repeat=3):
        assert np.abs((parts @ (found * change) - seconds) / scale).sum() >= least * 0.999


@pytest.mark.parametrize(
    ("works", "says"),
    [
        ([], "the 0 recorded steps hold no prefill tokens and no decode rows"),
        ([(0, 4, 50), (0, 5, 70)], "the 2 recorded steps hold no prefill tokens; record"),
        ([(7, 1, 20)] * 50, "the 50 recorded steps are too alike"),
        ([(rows, rows, rows * 30) for rows in range(1, 50)], "too alike to tell apart"),
    ],
)
def test_a_run_that_does_not_tell_the_parts_apart_is_refused(works, says):
    with pytest.raises(ConfigError) as caught:
        fit_step_times(np.array(works, np.int64).reshape(-1, 3), np.full(len(works), 0.01))
    assert says in str(caught.value)
