"""How many steps to keep in flight, and when to plan the next one, so that the worker never waits for the network.

A request that comes in joins the next step that is planned. So a step is planned as late as it may be:

    worker   ────── step 7 ──────┬────── step 8 ──────┬────── step 9
                                 │                    │
    engine          result of 6  │        plan of 9 ──┘ arrives shortly before 8 has ended
                    no plan yet  └ result of 7
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import NamedTuple

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

_NUM_DURATIONS = 16  # latest steps of a size, of which the shortest counts
_LEAST_DURATIONS = 4  # of a size, before anything is said of it
_SIZE_BITS = 3  # leading bits of the sizes that are alike, which differ by a quarter at most
_TIMER_S = 0.001  # what uvloop's timers resolve
_MARGIN_S = 0.001  # in which a plan is made and encoded
_MARGIN_SHARE = 1 / 32  # of what is expected to be computed meanwhile
_DECAY = 1 / 128  # of the allowance for gaps, with each step
_MOST_OF_GAP = 1 / 16  # of a step, by which a gap raises the allowance at most: a pause is soon forgotten


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

    @property
    def overhead_s(self) -> float | None:
        """The time of a step outside the worker, to there and back; None: it was not measured."""
        return min(self._overheads_s, default=None)

    def note(
        self, timings: StepTimings, turnaround_s: float, *, was_alone: bool, was_held: bool = False
    ) -> None:
        """Take in a step's times.

        Args:
            turnaround_s: From when the step was sent until its result was received.
            was_alone: Whether the worker had nothing else to do when the step was sent. What it waited before is no
                gap then.
            was_held: Whether it was planned late, so that a gap says nothing of the number of steps.
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
        has_gap = timings.idle_ns > _TOLERATED_IDLE * (timings.idle_ns + busy_s * 1e9)
        self._num_gaps += has_gap and not was_held
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


class StepDurations:
    """The shortest durations of the latest steps, by their number of tokens.

    The shortest counts because the worker waits where a step ends before it is expected to. A step of a size that
    is not known takes as long as one of the next smaller size that is, at least.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        """Class of sizes -> seconds of its latest steps."""
        self._shortest: dict[int, float] = {}
        """Class of sizes -> the least of these, of the classes with enough of them."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in the time that the worker was busy with a step."""
        key = _class_of(num_tokens)
        latest = self._latest.get(key)
        if latest is None:
            latest = self._latest[key] = deque(maxlen=_NUM_DURATIONS)
        latest.append(seconds)
        if len(latest) >= _LEAST_DURATIONS:
            self._shortest[key] = min(latest)

    def least(self, num_tokens: int) -> float | None:
        """Return the seconds that a step of so many tokens takes at least; None: nothing is known."""
        if not num_tokens:
            return 0.0
        key = _class_of(num_tokens)
        if key not in self._shortest:
            key = max((smaller for smaller in self._shortest if smaller < key), default=-1)
        return self._shortest.get(key)


class SentStep(NamedTuple):
    """A step in flight. Times are of the monotonic clock, in seconds."""

    at: float
    """When it was sent."""
    num_tokens: int
    was_alone: bool
    """Whether the worker had nothing else to do."""
    was_held: bool
    """Whether its plan was held back for a while."""


class SentSteps:
    """The steps in flight, by the time at which they were sent. The engine loop owns them.

    They tell when the next step is to be planned. The worker is busy with all that it has been sent until

        ends_at = latest result received, or first step sent + overhead      whichever is later
                  + the shortest durations of the steps in flight

    as seen from here, and the next step is planned when `ends_at` is nearer than

        overhead of a step + the worker's preparation + a margin + an allowance

    The allowance is learned. Each gap that the worker reports before a step that was held back raises it by as much,
    and each step lowers it by a 128th. So in the long run the worker waits for at most a 128th of the allowance per
    step, which is never longer than the step, whatever makes the durations and the network vary.

    A step is planned at once where nothing is known, where the operator has fixed the number of steps in flight, and
    where a model is computed in stages.
    """

    def __init__(self, num_fixed: int, wake: asyncio.Event) -> None:
        """
        Args:
            num_fixed: Steps in flight that the operator wants; 0: as many as are needed.
            wake: Set when a plan is due that was held back.
        """
        self.depth = PipelineDepth(num_fixed)
        """How many there may be."""
        self._wake = wake
        self._may_hold = False
        self._is_fixed = num_fixed > 0
        self._steps: deque[SentStep] = deque()
        self._durations = StepDurations()
        self._prepare_s = 0.0
        self._allowance_s = 0.0
        self._received_at = -math.inf
        """When the latest result was received."""
        self._plan_at: float | None = None
        """When the next step is to be planned. None: not reckoned since the last step was sent or came back."""
        self._is_held = False
        """Whether the next plan has been held back."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest_at(self) -> float | None:
        """When the oldest step was sent; None: there is none."""
        return self._steps[0].at if self._steps else None

    def start(self, granted: int, num_stages: int) -> None:
        """Begin a session; as `PipelineDepth.start`."""
        self.clear()
        self.depth.start(granted, num_stages)
        self._may_hold = num_stages == 1 and not self._is_fixed
        self._durations, self._prepare_s, self._allowance_s = StepDurations(), 0.0, 0.0
        self._received_at = -math.inf

    def clear(self) -> None:
        """Forget all steps, for which no results will come."""
        self._steps.clear()
        self._plan_at, self._is_held = None, False
        self.stop()

    def stop(self) -> None:
        """Wake the loop no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def may_plan(self) -> bool:
        """Return whether a step may be planned now. If only later, the loop is woken then."""
        if len(self._steps) >= self.depth.size:
            return False
        if not (self._steps and self._may_hold):
            return True
        if self._plan_at is None:
            self._plan_at = self._latest_time()
        wait_s = self._plan_at - time.monotonic()
        if wait_s < _TIMER_S:
            return True
        self._is_held = True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s - _TIMER_S / 2, self._end_hold)
        return False

    def note_nothing(self) -> None:
        """Note that there was nothing to plan."""
        self._is_held = False

    def push(self, num_tokens: int) -> None:
        """Note that a step is sent."""
        self.stop()
        self._steps.append(SentStep(time.monotonic(), num_tokens, not self._steps, self._is_held))
        self._plan_at, self._is_held = None, False

    def pop(self, timings: StepTimings, received_at: float) -> SentStep:
        """Note that the result of the oldest step was received, and return the step."""
        self.stop()
        step = self._steps.popleft()
        since_s = received_at - max(step.at, self._received_at)
        self._received_at, self._plan_at = received_at, None
        if not step.num_tokens:  # it held orders only: its time says nothing of others
            return step
        self.depth.note(timings, received_at - step.at, was_alone=step.was_alone, was_held=step.was_held)
        if self._may_hold:
            self._measure(step, timings, since_s)
        return step

    def _measure(self, step: SentStep, timings: StepTimings, since_s: float) -> None:
        """Learn from the times of a step. `since_s`: since it was sent or the result before it was received."""
        forward_s, prepare_s = timings.forward_ns / 1e9, timings.prepare_ns / 1e9
        # On an asynchronous device the host prepares a step while others are computed.
        busy_s = max(min(forward_s + prepare_s + timings.sample_ns / 1e9, since_s), forward_s)
        self._durations.note(step.num_tokens, busy_s)
        self._prepare_s = _average(self._prepare_s, prepare_s)
        self._allowance_s -= _DECAY * self._allowance_s
        if step.was_held:
            gap_s = max(timings.idle_ns, timings.gap_ns) / 1e9
            self._allowance_s = min(self._allowance_s + min(gap_s, _MOST_OF_GAP * busy_s), busy_s)

    def _latest_time(self) -> float:
        """Return when the next step is to be planned, beside those in flight; -inf: at once."""
        overhead_s = self.depth.overhead_s
        durations_s = [self._durations.least(step.num_tokens) for step in self._steps]
        known_s = [each for each in durations_s if each is not None]
        if overhead_s is None or len(known_s) < len(durations_s):
            return -math.inf
        rest_s = sum(known_s)
        lead_s = overhead_s + self._prepare_s + _MARGIN_S + _MARGIN_SHARE * rest_s + self._allowance_s
        return max(self._received_at, self._steps[0].at + overhead_s) + rest_s - lead_s

    def _end_hold(self) -> None:
        self._timer = None
        self._wake.set()


def _class_of(num_tokens: int) -> int:
    """Return the class of sizes that a step belongs to; those of larger steps are higher."""
    shift = max(num_tokens.bit_length() - _SIZE_BITS, 0)
    return (shift << _SIZE_BITS) + (num_tokens >> shift)


def _average(average: float, latest: float) -> float:
    return average + _WEIGHT * (latest - average) if average else latest
