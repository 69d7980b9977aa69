"""Times the candidates of one choice and takes the fastest with right results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from tools.tune.cases import Case
from tools.tune.workloads import Workload

NUM_FINALISTS = 3
"""Candidates that are timed a second time, longer, beside the default."""
WORTHWHILE = 0.98
"""Part of the default's time; what is not below it may be noise, and the default stays."""
SHORT_S, LONG_S = 0.01, 0.06
"""Seconds of rounds for each workload, at first and of finalists."""
TOLERANCE = 2.0**-6
"""Part of a row's length; roundings of bfloat16 in other places come to less, a lost key of 4,000 to more."""

Clock = Callable[[Workload, float], float]
"""(workload, seconds that all rounds shall take) -> seconds of one call"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that must not be chosen."""

    config: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The choice that was made."""

    config: Any
    """The fastest, or the default."""
    seconds: float
    """Seconds of one call; the geometric mean over workloads."""
    default_seconds: float
    num_timed: int
    refusals: tuple[Refusal, ...]

    @property
    def speed_up(self) -> float:
        return self.default_seconds / self.seconds


def tune(case: Case, device: torch.device, clock: Clock, refused: Sequence[Refusal] = ()) -> Outcome:
    """Measure one choice.

    A candidate is timed only if each workload's result is the default's, within what rounding explains or, if the
    kernel says so, to the bit.

    Args:
        refused: Candidates that did not compile, or to code that is not trusted; they are not tried.
    Raises:
        ValueError: The default itself is refused, or gives NaN or infinity.
    """
    workloads = case.build(device)
    refusals = list(refused)
    default, *others = case.candidates
    for refusal in refused:
        if refusal.config == default:
            raise ValueError(f"{case.title}: the default: {refusal.reason}")

    def time(config: Any, round_s: float) -> float:
        with case.tunable.forced(device, case.key, config):
            return geometric_mean([clock(workload, round_s) for workload in workloads])

    with case.tunable.forced(device, case.key, default):
        expected = [workload.calls[0]().clone() for workload in workloads]
    if not all(bool(result.isfinite().all()) for result in expected):
        raise ValueError(f"{case.title}: the default's results are not finite")
    config_to_seconds = {default: time(default, SHORT_S)}
    for config in others:
        if any(refusal.config == config for refusal in refused):
            continue
        try:
            with case.tunable.forced(device, case.key, config):
                problem = _first_problem(case, workloads, expected)
            if problem is None:
                config_to_seconds[config] = time(config, SHORT_S)
        except TritonError as error:  # most of all too little shared memory
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if problem is not None:
            refusals.append(Refusal(config, problem))
    default_s = time(default, LONG_S)
    finalists = sorted(config_to_seconds, key=config_to_seconds.__getitem__)[:NUM_FINALISTS]
    timed = [(time(config, LONG_S), config) for config in finalists if config != default]
    seconds, best = min(timed, key=lambda pair: pair[0], default=(default_s, default))
    if seconds > WORTHWHILE * default_s:
        seconds, best = default_s, default
    return Outcome(best, seconds, default_s, len(config_to_seconds), tuple(refusals))


def _first_problem(case: Case, workloads: Sequence[Workload], expected: Sequence[Tensor]) -> str | None:
    for workload, result in zip(workloads, expected, strict=True):
        problem = problem_of(workload.calls[0](), result, same_bits=case.tunable.same_bits)
        if problem is not None:
            return f"{workload.name}: {problem}"
    return None


def problem_of(result: Tensor, expected: Tensor, *, same_bits: bool) -> str | None:
    """Return what is wrong with a candidate's result beside the default's, or None.

    Args:
        result: [rows, ...], like `expected`.
        same_bits: See `Tunable`.
    """
    if same_bits:
        num_other = int((result != expected).sum())
        return f"{num_other} numbers do not have the default's bits" if num_other else None
    error = (result.double() - expected.double()).flatten(1).norm(dim=1)
    worst = (error / expected.double().flatten(1).norm(dim=1)).max()
    if worst <= TOLERANCE:
        return None
    return f"a row differs from the default's by {float(worst):.2g} of its length, more than {TOLERANCE:.2g}"
