"""What a frontend knows of one engine's queue, so that it can refuse at once what the engine would refuse."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from triptych.errors import QueueFull
from triptych.types.outputs import OutputBatch

_REMEMBERED_S = 1.0
"""A refusal is taken to hold for so long while the queue stays full: later the queue may take what it has refused."""
_MOST_REMEMBERED = 1024


class QueueView:
    """Owned by the session with the engine.

    The engine reports its free places in each output batch, and as soon as there are some after it reported none. A
    full queue may still take a request of another tenant or priority (`Admission.displace_for`), so only what the
    engine has refused just now is refused here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic time in seconds."""
        self._clock = clock
        self._num_free_places: int | None = None
        """As last reported; None: not yet."""
        self._unanswered: dict[int, tuple[int, str]] = {}
        """Number of a choice that the engine has neither admitted nor refused -> its priority and tenant."""
        self._refusals: dict[tuple[int, str], tuple[float, float]] = {}
        """Priority and tenant -> until when the engine's last refusal holds, and its retry time in seconds."""

    def note_submitted(self, numbers: Iterable[int], priority: int, tenant: str) -> None:
        self._unanswered.update(dict.fromkeys(numbers, (priority, tenant)))

    def note_aborted(self, number: int) -> None:
        self._unanswered.pop(number, None)

    def note_batch(self, batch: OutputBatch) -> None:
        """Take in what the engine has admitted and refused, and how much room it has left."""
        unanswered = self._unanswered
        if unanswered:
            for number in batch.admitted.tolist():
                unanswered.pop(number, None)
            for failure in batch.failures:
                refused = unanswered.pop(failure.number, None)
                if refused is not None and failure.code == QueueFull.code:
                    self._remember(refused, failure.retry_after_ms / 1000)
        if batch.num_free_places is not None:
            self._num_free_places = batch.num_free_places

    def refuses(self, priority: int, tenant: str) -> float | None:
        """Return in how many seconds a request that the engine would refuse now may come back; None if it may take it.

        The times of requests that are refused together differ, so that they do not come back together.
        """
        if self._num_free_places is None or self._num_free_places > len(self._unanswered):
            return None
        until, retry_after_s = self._refusals.get((priority, tenant), (0.0, 0.0))
        return retry_after_s * random.uniform(1.0, 2.0) if self._clock() < until else None

    def _remember(self, who: tuple[int, str], retry_after_s: float) -> None:
        now = self._clock()
        if len(self._refusals) >= _MOST_REMEMBERED:
            self._refusals = {key: refusal for key, refusal in self._refusals.items() if refusal[0] > now}
        if len(self._refusals) < _MOST_REMEMBERED:
            self._refusals[who] = now + _REMEMBERED_S, retry_after_s
