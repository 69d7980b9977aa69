"""Metrics of the steps that a worker computes."""

from __future__ import annotations

from triptych.observe.metrics import WorkerMetrics
from triptych.types.step import StepResult, VerifiedGuesses

_STAGES = ("prepare", "forward", "sample", "idle")  # of `StepTimings`


class StepCounter:
    """Counts the results of one process."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        # looked up once: labels cost more than the counting
        self._stage_to_seconds = {stage: metrics.stage_seconds.labels(stage) for stage in _STAGES}

    def count(self, result: StepResult) -> None:
        """Count one step's result."""
        timings = result.timings
        self._metrics.steps.inc()
        for stage, seconds in self._stage_to_seconds.items():
            seconds.inc(getattr(timings, f"{stage}_ns") / 1e9)
        if timings.mask_ns:
            self._metrics.mask_seconds.observe(timings.mask_ns / 1e9)
        for guesses in result.guesses:
            self._count_guesses(guesses)
        if timings.gap_ns:
            self._metrics.step_gap_seconds.observe(timings.gap_ns / 1e9)

    def _count_guesses(self, guesses: VerifiedGuesses) -> None:
        metrics = (
            (self._metrics.guesses, guesses.verified),
            (self._metrics.accepted_guesses, guesses.accepted),
        )
        for metric, counts in metrics:
            for place, count in enumerate(counts.tolist(), 1):
                metric.labels(guesses.proposer, str(place)).inc(count)
