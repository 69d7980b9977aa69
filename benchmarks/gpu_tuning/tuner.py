"""Times the candidates of one choice and takes the fastest whose results are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.gpu_tuning.workload import Case, Workload, problem_of

NUM_FINALISTS = 3
"""Candidates that are timed a second time, longer, beside the default."""
WORTHWHILE = 0.98
"""What is not faster than this part of the default's time may be noise, and the default stays."""
SHORT_S, LONG_S = 0.01, 0.06
"""Seconds of rounds for each workload, at first and of finalists."""

Clock = Callable[[Workload, float], float]
"""(workload, seconds that all rounds shall take) -> seconds of one call"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that must not be chosen."""

    config: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured of one choice."""

    config: Any
    """The fastest, or the default."""
    seconds: float
    """Of one call; the geometric mean over workloads."""
    default_seconds: float
    num_timed: int
    refusals: tuple[Refusal, ...]

    @property
    def speed_up(self) -> float:
        return self.default_seconds / self.seconds


def tune(case: Case, device: torch.device, clock: Clock, refused: Sequence[Refusal] = ()) -> Outcome:
    """Measure one choice.

    A candidate is timed only if each workload's result is the default's, within what rounding explains or, where the
    kernel says so, to the bit.

    Args:
        refused: candidates that did not compile, or to code that is not trusted; they are not tried.
    Raises:
        ValueError: the default itself is refused, or gives NaN or infinity.
    """
    workloads = case.build(device)
    refusals = list(refused)
    default, *others = case.tunable.candidates(*case.key)
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
        except TritonError as error:  # most of all shared memory that does not suffice
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if problem is not None:
            refusals.append(Refusal(config, problem))
    finalists = sorted(config_to_seconds, key=config_to_seconds.__getitem__)[:NUM_FINALISTS]
    default_seconds = time(default, LONG_S)
    seconds, best = min(
        ((time(config, LONG_S), config) for config in finalists if config != default),
        key=lambda pair: pair[0],
        default=(default_seconds, default),
    )
    if seconds > WORTHWHILE * default_seconds:
        seconds, best = default_seconds, default
    return Outcome(best, seconds, default_seconds, len(config_to_seconds), tuple(refusals))


def _first_problem(case: Case, workloads: Sequence[Workload], expected: Sequence[torch.Tensor]) -> str | None:
    for workload, result in zip(workloads, expected, strict=True):
        problem = problem_of(workload.calls[0](), result, same_bits=case.tunable.same_bits)
        if problem is not None:
            return f"{workload.name}: {problem}"
    return None
