"""How many steps to keep in flight, so that the worker never waits for the network."""

from __future__ import annotations

import math

from triptych.types.step import StepTimings

MAX_STEPS_IN_FLIGHT = 64
"""Steps in flight that are ever asked for. A worker grants as many as pay: more than it computes at a time, and so few
that a stop comes back in time to save work."""

_WEIGHT = 0.1  # of the latest step in the moving averages
_STEPS_PER_LOOK = 16
_TOLERATED_IDLE = 0.01  # share of its time that the worker may spend waiting while work is queued


class PipelineDepth:
    """Starts from the measured overhead of a step, and grows while the worker reports gaps. It never shrinks
    within a session: one step more in flight costs a token per stop, one too few costs a part of every step."""

    def __init__(self, fixed: int) -> None:
        """`fixed`: what the operator wants; 0: measure."""
        self._fixed = fixed
        self._cap = self.size = self._least = 1
        self._overhead_s = self._busy_s = 0.0
        self._num_looked_at = 0
        self._idle_ns = self._total_ns = 0

    def start(self, granted: int, num_stages: int = 1) -> None:
        """Begin a session.

        Args:
            granted: Steps that the worker takes at most.
            num_stages: Steps that it computes at the same time. One more waits for the first of them to end.
        """
        self._cap, self._least = granted, num_stages + 1
        self.size = min(self._fixed or self._least, granted)
        self._overhead_s = self._busy_s = 0.0
        self._forget_gaps()

    def note(self, timings: StepTimings, turnaround_s: float, *, was_alone: bool) -> None:
        """One step has come back, `turnaround_s` after it was sent; `was_alone`: to a worker with nothing to do."""
        busy_ns = timings.prepare_ns + timings.forward_ns + timings.sample_ns
        busy_s = busy_ns / 1e9
        self._busy_s = _average(self._busy_s, busy_s)
        if self._fixed:
            return
        if was_alone:
            self._overhead_s = _average(self._overhead_s, max(turnaround_s - busy_s, 0.0))
            self._grow_to(1 + math.ceil(self._overhead_s / self._busy_s) if self._busy_s else self._least)
            return
        self._num_looked_at += 1
        self._idle_ns += timings.idle_ns
        self._total_ns += timings.idle_ns + busy_ns
        if self._num_looked_at == _STEPS_PER_LOOK:
            if self._idle_ns > _TOLERATED_IDLE * self._total_ns:
                self._grow_to(self.size + 1)
            self._forget_gaps()

    def _grow_to(self, size: int) -> None:
        self.size = min(max(size, self.size), self._cap)

    def _forget_gaps(self) -> None:
        self._num_looked_at = self._idle_ns = self._total_ns = 0


def _average(average: float, latest: float) -> float:
    return average + _WEIGHT * (latest - average) if average else latest
