"""Which requests may be computed while the engine is paused, or looks for a request that kills workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych_services.enginecore.request import Request, RequestState

_PROBATION = 32
"""Tokens beyond its position that clear a suspect; each takes a step."""
_LONG_PROBATION = 256
"""The same in a test of requests that were cleared between all of their crashes."""
_MAX_CRASHES = 5
"""Crashes in a row that a request may be in flight at before it is tested, even if it was cleared between them."""
_NUM_GROUPS = 3
"""Parts that suspects are tested in. Three find one of 49 with the fewest crashes beside the fewest tests."""


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator's pause, from the call of Pause to the call of Resume."""

    may_finish: Sequence[Request] = ()
    """Requests that had started and are still computed. No other request is admitted."""
    is_frozen: bool = False
    """Whether nothing is computed at all."""

    def is_settled(self, num_in_flight: int) -> bool:
        """Return whether nothing that the pause lets finish is left.

        Args:
            num_in_flight: Number of steps in flight.
        """
        has_ended = all(request.state is RequestState.ENDED for request in self.may_finish)
        return not num_in_flight and (self.is_frozen or has_ended)


class Restrictions:
    """The current pause and the current crash investigation. The engine core owns it."""

    def __init__(self) -> None:
        self.pause: Pause | None = None
        """The current pause; None while the engine is not paused."""
        self.crashes = CrashBisect()

    @property
    def may_compute(self) -> bool:
        """Whether running requests may compute."""
        return self.pause is None or not self.pause.is_frozen

    @property
    def admissible(self) -> Sequence[Request] | None:
        """The only requests that may be admitted; None if any may.

        If the pause keeps the whole group under test from being admitted, the test waits for the end of the pause, and
        what the pause lets finish is computed.
        """
        under_test = self.crashes.under_test
        if self.pause is None:
            return under_test
        may_finish = self.pause.may_finish
        if under_test is None:
            return may_finish
        return [request for request in under_test if request in may_finish] or may_finish


class CrashBisect:
    """Finds the request that kills workers, so that it fails and no other one does.

    After a single crash everything is computed again. A request that is in flight at a crash is a suspect until it has
    gone 32 tokens further than it had come. Computing the same tokens again clears no suspect:

        known at the crash          in flight                   cleared
        ├───────────────────────────┼───────┼─── 32 tokens ────┤
                                            └ position: the most that the dead worker can have computed

    The suspects that are in flight at a second crash are tested in thirds, with no other suspect beside them, until a
    third is cleared or the request that crashes by itself is found. A request that gets further than 32 tokens each
    time is found by its count: five crashes in a row start a test as well, with a longer way to go.
    """

    def __init__(self) -> None:
        self._suspects: dict[Request, int] = {}
        """In flight at a crash and not cleared -> the number of known tokens that clears it."""
        self._groups: deque[list[Request]] = deque()
        """Suspects still to be tested. The first group is under test."""
        self._crash_counts: dict[tuple[int, int], int] = {}
        """Session and number of each request in flight at the last crash -> crashes in a row up to that one."""
        self._probation = _PROBATION

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    @property
    def under_test(self) -> Sequence[Request] | None:
        """The only requests that may be admitted; None if any may."""
        return self._groups[0] if self._groups else None

    def suspect(self, requests: Sequence[Request]) -> None:
        """Suspect requests that were in flight when another engine died: one crash more, and they are tested."""
        for request in requests:
            self._suspects[request] = len(request.token_ids) + self._probation

    def note_crash(self, in_flight: Mapping[Request, int]) -> Request | None:
        """Take in that a worker has died, and return the request that kills workers if it is certain now.

        Args:
            in_flight: Each request that the worker may have died of, and its position: the number of its known tokens
                and of those in flight.
        """
        alive = [request for request in in_flight if request.state is not RequestState.ENDED]
        if not alive:
            return None
        is_test = bool(self._groups)
        candidates = self._candidates(alive)
        for request in alive:
            self._suspects[request] = in_flight[request] + self._probation
        if not candidates:
            return None
        self._groups = deque(rest for group in self._groups if (rest := _without(group, candidates)))
        if len(candidates) > 1:
            self._groups.extendleft(reversed(_split(candidates)))
            return None
        if not is_test and len(alive) > 1:
            self._groups.append(candidates)  # others were beside it: test it once more by itself
            return None
        self._close()
        return candidates[0]

    def review(self) -> None:
        """Clear the suspects that have ended or come far enough, and drop groups that have no suspects left."""
        cleared = [r for r, clears_at in self._suspects.items() if _is_cleared(r, clears_at)]
        if not cleared:
            return
        for request in cleared:
            del self._suspects[request]
        self._groups = deque(
            rest for group in self._groups if (rest := [r for r in group if r in self._suspects])
        )
        if not self._groups:
            self._probation = _PROBATION

    def _candidates(self, alive: Sequence[Request]) -> list[Request]:
        """Return the requests that may have caused this crash and an earlier one, the least advanced first."""
        counts = self._crash_counts
        self._crash_counts = {_name(request): counts.get(_name(request), 0) + 1 for request in alive}
        if self._groups:
            group = self._groups.popleft()
            if candidates := [request for request in alive if request in group]:
                return sorted(candidates, key=self._progress)  # the rest of the group was not in flight
            self._groups.appendleft(group)  # something keeps it from being admitted, such as a pause
        if candidates := [request for request in alive if request in self._suspects]:
            return sorted(candidates, key=self._progress)
        candidates = [request for request in alive if self._crash_counts[_name(request)] >= _MAX_CRASHES]
        if candidates:
            self._probation = _LONG_PROBATION
        return candidates

    def _progress(self, request: Request) -> int:
        """Return a number that compares how far suspects have come since they were last in flight at a crash."""
        return len(request.token_ids) - self._suspects[request]

    def _close(self) -> None:
        """Forget everything, because the request that killed the workers is found."""
        self._suspects.clear()
        self._groups.clear()
        self._crash_counts.clear()
        self._probation = _PROBATION


def _name(request: Request) -> tuple[int, int]:
    return request.session, request.number


def _is_cleared(request: Request, clears_at: int) -> bool:
    """Return whether a suspect has ended or come far enough.

    `token_ids` may lag behind by an open block; then it takes a few more tokens.
    """
    return request.state is RequestState.ENDED or len(request.token_ids) >= clears_at


def _without(group: Sequence[Request], others: Sequence[Request]) -> list[Request]:
    return [request for request in group if request not in others]


def _split(candidates: Sequence[Request]) -> list[list[Request]]:
    size = -(-len(candidates) // _NUM_GROUPS)
    return [list(candidates[start : start + size]) for start in range(0, len(candidates), size)]
