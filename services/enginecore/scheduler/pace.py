"""The time of steps by their size, and the part of it that texts get which become vectors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from itertools import pairwise
from math import inf

import numpy as np

from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.running_rows import Ints, RunningRows, Slots

_STEP_WEIGHT = 0.1  # of the latest step among those of its size
_LEAST_TOKENS = (
    16  # of texts in a step: one tile of a matrix product, which costs little more than its weights
)
_TIMES_OWN = 1.75  # the time of a step with texts, over that of the rows which generate; gaps vary up to 2
_MAX_ALONE_S = 0.25  # of a step of texts only: a request that comes to generate waits for those in flight
_LEAST_ALONE = (
    256  # tokens of such a step, however slow it is: on a CPU smaller ones cost a tenth of the throughput
)
_RECENT_S = 10.0  # since a row has generated: another one is expected


class StepPace:
    """The time of a step by its number of tokens: averages by size, in classes of doubling width, with straight lines
    between them. Common sizes do not push out the measurements of rare ones."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._classes: dict[int, tuple[float, float]] = {}
        """bit length of the size -> average size, average seconds"""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of one step."""
        self.num_steps += 1
        key = num_tokens.bit_length()
        size, average = self._classes.get(key, (num_tokens, seconds))
        self._classes[key] = (
            size + _STEP_WEIGHT * (num_tokens - size),
            average + _STEP_WEIGHT * (seconds - average),
        )

    @property
    def largest(self) -> float:
        """Tokens of the largest steps that were measured; 0: none was."""
        return max((size for size, _ in self._classes.values()), default=0.0)

    def size_within(self, seconds: float, least: int) -> float:
        """Return the tokens of the largest step that is expected to take at most so long.

        For sizes above those that were measured, the line through the smallest and the largest one goes on, up to
        twice the largest. Nothing is known of larger steps.

        Args:
            least: Steps of fewer tokens are not looked at, however long they took.
        """
        points = [point for point in sorted(self._classes.values()) if point[0] >= least]
        for (low, low_s), (high, high_s) in pairwise(points):
            if high_s > seconds:
                return (
                    low + (high - low) * max(seconds - low_s, 0.0) / (high_s - low_s)
                    if high_s > low_s
                    else low
                )
        if not points:
            return 0.0
        (low, low_s), (high, high_s) = points[0], points[-1]
        if len(points) == 1:
            low, low_s = 0.0, 0.0
        slope = (high_s - low_s) / (high - low)
        return min(high + (seconds - high_s) / slope, 2 * high) if slope > 0 else 2 * high

    def seconds(self, num_tokens: int) -> float:
        """Return the expected seconds of a step of `num_tokens` tokens. At least one step must have been measured.

        For sizes above those that were measured, the line through the smallest and the largest one goes on. If one
        size is known, every size takes as long.
        """
        points = sorted(self._classes.values())
        above = bisect_left(points, (num_tokens, 0.0))
        if above == 0:
            return points[0][1]
        (low, low_s), (high, high_s) = (
            (points[0], points[-1]) if above == len(points) else (points[above - 1], points[above])
        )
        slope = (high_s - low_s) / (high - low) if high > low else 0.0
        return low_s + max(slope, 0.0) * (num_tokens - low)


class PooledShare:
    """Bounds the tokens of texts that become vectors in a step, while other rows generate.

    The reader of a stream sees the length of each step, and that of a vector sees only its end. So texts get three
    quarters of the time of one token of each row that generates, also beside prompts of such rows. Where there are
    none of these, a step takes a quarter of a second at most, since the next one that comes waits for the steps in
    flight. Where there was one in the last ten seconds, the next one is expected, and a step takes as long as one token
    of one row:

        seconds
       1.75 x own |- - - - - - - - - /
                  |               /  :
                  |            /     :
              own |- - - - /         :
                  |____/___:_________:________
                          own        own and the tokens of texts

    The sizes come from the steps that were measured. It is an admission limit, too: no further text is admitted while
    those that run want all that there is, and requests that generate pass those that wait.
    """

    def __init__(self, pace: Callable[[], StepPace], max_tokens: int, clock: Callable[[], float]) -> None:
        """
        Args:
            pace: Returns the times of steps that were measured so far.
            max_tokens: Tokens of a step.
            clock: Monotonic time in seconds.
        """
        self._pace = pace
        self._max_tokens = max_tokens
        self._clock = clock
        self._generated_at = -inf
        self.num_left = max_tokens
        """Tokens of further texts that the step which is being planned may compute."""

    def limit(self, rows: RunningRows, slots: Slots, wanted: Ints) -> Ints:
        """Return how many tokens each row may compute in the step to be planned, [len(slots)].

        Args:
            rows: The counters of all rows.
            slots: [r] rows in the order of their admission.
            wanted: [r] tokens that each could compute.
        """
        is_pooled = rows.is_pooled[slots]
        num_own = len(slots) - rows.num_pooled
        if num_own:
            self._generated_at = self._clock()
            self.num_left = self._most_within(_TIMES_OWN, num_own)
        else:
            self.num_left = self._most_alone()
        if not rows.num_pooled:
            return wanted
        of_texts = wanted[is_pooled]
        shares = np.clip(self.num_left - (of_texts.cumsum() - of_texts), 0, of_texts)
        limited = wanted.copy()
        limited[is_pooled] = shares
        self.num_left -= int(shares.sum())
        return limited

    def group_of(self, request: Request) -> Hashable | None:
        return "pooled" if request.is_pooled else None

    def begin_step(self, rows: RunningRows, slots: Slots) -> None:
        """Do nothing: `limit` has counted the rows that run."""

    def has_room(self, group: Hashable) -> bool:
        return self.num_left > 0

    def note_admitted(self, request: Request, num_to_compute: int) -> None:
        if request.is_pooled:
            self.num_left -= num_to_compute

    def _most_within(self, times_own: float, num_own: int) -> int:
        """Return the tokens of texts beside one token of `num_own` rows, in a step of `times_own` their time."""
        pace = self._pace()
        if not pace.num_steps:
            return _LEAST_TOKENS
        size = pace.size_within(times_own * pace.seconds(num_own), num_own)
        return max(int(size) - num_own, _LEAST_TOKENS)

    def _most_alone(self) -> int:
        """Return the tokens of texts in a step without rows that generate."""
        if self._clock() - self._generated_at < _RECENT_S:
            return self._most_within(1.0, 1)
        size = int(self._pace().size_within(_MAX_ALONE_S, 0))
        return min(max(size, _LEAST_ALONE), self._max_tokens)
