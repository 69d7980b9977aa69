"""How many steps to keep in flight, so that the worker never waits for the network."""

from __future__ import annotations

import math
from collections import deque

from triptych.types.step import StepTimings

MAX_STEPS_IN_FLIGHT = 64
"""Steps in flight that are ever asked for. A worker grants as many as pay: more than it computes at a time, and so few
that a stop comes back in time to save work."""

_WEIGHT = 0.1  # of the latest step in the moving average
_TOLERATED_IDLE = 0.01  # share of a step's time that the worker may wait before it
_STEPS_PER_LOOK = 16
_MANY_GAPS = (
    3  # of the steps of a look: the network is too slow for the size. Fewer are pauses, of whatever length
)
_FIRST_PATIENCE = 4  # looks without many gaps before the size shrinks: 64 steps
_MAX_PATIENCE = 64
_NUM_OVERHEADS = 8  # latest steps that were sent to an idle worker


class PipelineDepth:
    """Starts from the measured overhead of a step, grows while the worker reports gaps, and shrinks when they stop.

    A new request's first step is behind all steps in flight, so a size that is too large costs every first token. One
    that is too small costs a part of every step. The size is judged once for each *look* of 16 steps:

        many gaps                                  one more
        `patience` looks without many gaps         one less, but not below the measured need
        many gaps in the looks after that          one more again, and `patience` doubles

    So a pause of any length counts once, a burst of gaps is forgotten after some seconds, and a size that is needed
    is questioned ever more rarely.
    """

    def __init__(self, fixed: int) -> None:
        """`fixed`: what the operator wants; 0: measure."""
        self._fixed = fixed
        self.start(1, 1)

    def start(self, granted: int, num_stages: int = 1) -> None:
        """Begin a session.

        Args:
            granted: Steps that the worker takes at most.
            num_stages: Steps that it computes at the same time. One more waits for the first of them to end.
        """
        self._cap, self._least = granted, num_stages + 1
        self.size = min(self._fixed or self._least, granted)
        """Steps to keep in flight."""
        self._busy_s = 0.0
        self._overheads_s: deque[float] = deque(maxlen=_NUM_OVERHEADS)
        self._num_looked_at = self._num_gaps = 0
        self._num_good_looks = 0
        """Looks without many gaps since the size has changed."""
        self._patience = _FIRST_PATIENCE
        self._has_shrunk = False
        """Whether the last change was to one step less."""

    def note(self, timings: StepTimings, turnaround_s: float, *, was_alone: bool) -> None:
        """Take in a step's times.

        Args:
            turnaround_s: From when the step was sent until its result was received.
            was_alone: Whether the worker had nothing else to do when the step was sent. What it waited before is no
                gap then.
        """
        busy_s = (timings.prepare_ns + timings.forward_ns + timings.sample_ns) / 1e9
        self._busy_s = _average(self._busy_s, busy_s)
        if self._fixed:
            return
        if was_alone:
            self._overheads_s.append(max(turnaround_s - busy_s, 0.0))
            self.size = max(self.size, self._need)
            return
        self._num_looked_at += 1
        self._num_gaps += timings.idle_ns > _TOLERATED_IDLE * (timings.idle_ns + busy_s * 1e9)
        if self._num_looked_at == _STEPS_PER_LOOK:
            self._judge(has_many_gaps=self._num_gaps >= _MANY_GAPS)
            self._num_looked_at = self._num_gaps = 0

    @property
    def _need(self) -> int:
        """The steps that hide the network by the measured overhead. The least of the latest ones counts, because a
        pause of either process makes single ones longer."""
        if not self._overheads_s or not self._busy_s:
            return min(self._least, self._cap)
        return min(max(self._least, 1 + math.ceil(min(self._overheads_s) / self._busy_s)), self._cap)

    def _judge(self, *, has_many_gaps: bool) -> None:
        """Judge the size by a look."""
        if has_many_gaps:
            if self._has_shrunk:
                self._patience = min(2 * self._patience, _MAX_PATIENCE)
            self._has_shrunk, self._num_good_looks = False, 0
            self.size = min(self.size + 1, self._cap)
            return
        self._num_good_looks += 1
        if self._num_good_looks < self._patience:
            return
        if self._has_shrunk:  # one step less has been enough for as long as that
            self._patience = max(self._patience // 2, _FIRST_PATIENCE)
        self._has_shrunk, self._num_good_looks = self.size > self._need, 0
        if self._has_shrunk:
            self.size -= 1


def _average(average: float, latest: float) -> float:
    return average + _WEIGHT * (latest - average) if average else latest
