"""Guesses are charged with the fastest sum of the ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from triptych_services.worker.runner.drafting import ranks
from triptych_services.worker.runner.drafting.ranks import SharedGuesses
from triptych_services.worker.runner.request_rows import StepRows


def test_the_wait_for_a_rank_that_is_behind_is_no_price_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait within the step otherwise. A machine may keep one rank behind for many steps in a row."""
    noted, now = list[float](), 0.0
    durations = iter([0.5, 0.25, *[0.75] * 20])

    def all_reduce(numbers: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += next(durations)
        return numbers

    own = SimpleNamespace(
        guess=lambda step: step, note_wait=lambda num_rows, seconds: noted.append(seconds), state_layers=()
    )
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: now)
    shared = SharedGuesses(None, SimpleNamespace(all_reduce=all_reduce), own)  # type: ignore[arg-type]
    one = np.ones(1, np.int64)
    step = StepRows(np.zeros(1, np.int64), one, one, np.ones(1, np.bool_), sample_limits=np.full(1, 4))
    for _ in range(22):
        assert shared.guess(step) is step
    assert noted == [0.5, *[0.25] * 21]
