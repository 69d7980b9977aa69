"""The choices of one client's request: one computes the prompt, the others enter when they find it in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from triptych_services.enginecore.request import Request, RequestState
from triptych_services.enginecore.scheduler.running_rows import RunningRows
from triptych_services.enginecore.scheduler.waiting_queue import WaitingQueue, WaitsFor


class SharedPrompts:
    """Holds the choices that wait for another one's prompt. `RequestStates` owns it.

    A prompt that takes several steps would otherwise be computed by several choices side by side.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._leader_to_others: dict[Request, dict[Request, None]] = {}
        """The choice that computes a prompt -> those that are held for it, by arrival; at least one."""
        self._leader_of: dict[Request, Request] = {}
        """The same the other way round."""

    def add(self, choices: Sequence[Request]) -> None:
        """Hold all choices of a new request but the first, unless they have output already."""
        if len(choices) == 1 or any(request.has_emitted for request in choices):
            return
        for request in choices[1:]:
            self._waiting.hold(request, WaitsFor.PROMPT)
        self._lead(choices[0], dict.fromkeys(choices[1:]))

    def note_planned(self, request: Request, num_tokens: int) -> None:
        """Take in that a request's first tokens are computed by the steps planned so far."""
        if self._leader_to_others and num_tokens >= request.num_prompt_tokens:
            self._release(request)

    def release_planned(self, rows: RunningRows) -> None:
        """Let choices enter if the steps planned so far compute their prompt."""
        for request in list(self._leader_to_others):
            if request.state is RequestState.RUNNING:
                self.note_planned(request, int(rows.computed[request.slot]))

    def release_all(self) -> None:
        """Let all choices enter, since it is not known any more which of them may run."""
        for request in list(self._leader_to_others):
            self._release(request)

    def end(self, request: Request) -> None:
        """Take in that a request has ended. The next choice computes the prompt in its place."""
        if (leader := self._leader_of.pop(request, None)) is not None:
            others = self._leader_to_others[leader]
            del others[request]
            if not others:
                del self._leader_to_others[leader]
        elif others := self._leader_to_others.pop(request, {}):
            next_leader = next(iter(others))
            del others[next_leader], self._leader_of[next_leader]
            self._waiting.release(next_leader, WaitsFor.PROMPT)
            self._lead(next_leader, others)

    def check_integrity(self) -> None:
        """Check that all held choices wait for one that lives.

        Raises:
            AssertionError: One does not.
        """
        held = {other: leader for leader, others in self._leader_to_others.items() for other in others}
        assert held == self._leader_of, "choices wait for the wrong prompt"
        assert all(self._leader_to_others.values()), "a prompt is computed for no other choice"
        assert all(leader.state is not RequestState.ENDED for leader in self._leader_to_others)

    def _lead(self, leader: Request, others: dict[Request, None]) -> None:
        if others:
            self._leader_to_others[leader] = others
            self._leader_of.update(dict.fromkeys(others, leader))

    def _release(self, leader: Request) -> None:
        for request in self._leader_to_others.pop(leader, ()):
            del self._leader_of[request]
            self._waiting.release(request, WaitsFor.PROMPT)
