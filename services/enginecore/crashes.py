"""Finds the request that kills workers, so that it fails alone and all others go on.

One crash is bad luck: everything is computed again. Whoever is in flight at a second one soon after is
suspect, and the suspects are tried in halves with nobody else beside them, until a half survives or the one
that crashes alone is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.enginecore.request import Request, RequestState

_PROBATION_STEPS = 32
"""Completed steps after which whoever took part is cleared."""


class CrashInquiry:
    """Owned by the engine core, which lets nobody but those `on_trial` into the worker."""

    def __init__(self) -> None:
        self._suspects: set[Request] = set()
        """In flight at the last crash."""
        self._groups: deque[list[Request]] = deque()
        """Suspects still to be tried; the first group is on trial."""
        self._num_steps = 0
        """Completed since the last crash, or since the trial of this group began."""

    @property
    def is_open(self) -> bool:
        return bool(self._suspects)

    @property
    def on_trial(self) -> list[Request] | None:
        """Who alone may be admitted; None: everybody."""
        return self._groups[0] if self._groups else None

    def note_crash(self, in_flight: Sequence[Request]) -> Request | None:
        """A worker has died with these in flight; the culprit, if that is certain now."""
        in_flight = [request for request in in_flight if request.state is not RequestState.ENDED]
        is_trial = bool(self._groups)
        accused = set(self._groups[0]) if is_trial else self._suspects
        candidates = [request for request in in_flight if request in accused]
        if not candidates:
            if not is_trial:  # a first crash, or one of other requests than the last
                self._suspects, self._num_steps = set(in_flight), 0
            return None
        self._num_steps = 0
        if is_trial:
            self._groups.popleft()
        if len(candidates) > 1:
            half = (len(candidates) + 1) // 2
            self._groups.extendleft((candidates[half:], candidates[:half]))
            return None
        if not is_trial and len(in_flight) > 1:
            self._groups.append(candidates)  # others were beside it: once more, alone
            return None
        self._close()
        return candidates[0]

    def note_step(self) -> None:
        """A step was completed: nobody in it has killed the worker yet."""
        if not self._suspects:
            return
        self._num_steps += 1
        if self._num_steps >= _PROBATION_STEPS:
            self._acquit()

    def review(self) -> None:
        """Cross out who has ended meanwhile."""
        while self._groups:
            self._groups[0] = [r for r in self._groups[0] if r.state is not RequestState.ENDED]
            if self._groups[0]:
                return
            self._acquit()

    def _acquit(self) -> None:
        """Of the group on trial, or of all after a single crash."""
        self._num_steps = 0
        if self._groups:
            self._groups.popleft()
        if not self._groups:
            self._close()

    def _close(self) -> None:
        self._suspects = set()
        self._groups.clear()
