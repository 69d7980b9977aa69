"""The exchange between the processes of one frontend, and what holds for all of them together.

It lives in the supervisor, which ends only when all of them do: so a limit that is counted here, or a request id that
is held here, outlives any process that serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from triptych.errors import RateLimited
from triptych_services.frontend.access.rate_limits import RateLimits
from triptych_services.frontend.siblings.link import Link, LinkClosed

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Time for a process to answer another one. All that is asked takes a millisecond; a scrape some tens of them."""


class Answers(NamedTuple):
    """The answers of other processes to a question."""

    packed: list[bytes]
    silent: list[int]
    """Numbers of those that have not answered in time."""


class Refusal(NamedTuple):
    """A limit that a key has used up; see `RateLimited`."""

    message: str
    retry_after_s: float
    metadata: dict[str, str]


@dataclass(slots=True, eq=False)
class Member:
    """One process, as long as it lives."""

    index: int
    link: Link
    has_joined: bool = False
    """Whether it serves; one that is being started does not count yet, unless it is one of the first."""
    is_ready: bool = False


class Hub:
    """The state that the processes share. Owned by the supervisor. Bound to one event loop."""

    def __init__(self, count: int, on_joined: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            count: Number of processes.
            on_joined: Called when all serve for the first time.
        """
        self.members: dict[int, Member] = {}
        """Number of a process -> the process; none while it is dead."""
        self.has_started = False
        """Whether all have joined once."""
        self._count = count
        self._on_joined = on_joined
        self._limits = RateLimits()
        """Windows of API keys. They are those of the host, whichever process a request comes to."""
        self._holders: dict[tuple[str, str], list[int]] = {}
        """Tenant and request id that a client has chosen -> the processes where it is alive, newest last."""
        self._calls: dict[str, Callable[..., Any]] = {
            "join": self._join,
            "say_ready": self._note_ready,
            "ask_others": self._ask_others,
            "ask_one": self._ask_one,
            "claim": self._claim,
            "claim_again": self._claim_again,
            "release": self._release,
            "admit": lambda index, caller: _refusal_of(self._limits.admit(caller)),
            "admit_tokens": lambda index, caller: _refusal_of(self._limits.admit_tokens(caller)),
            "check_guess": lambda index, caller: _refusal_of(self._limits.check_guess(caller)),
            "note_guess": lambda index, caller: self._limits.note_guess(caller),
            "charge": lambda index, caller, num_tokens: self._limits.charge(caller, num_tokens),
        }
        """Name -> what a process may tell or ask. Takes its number first."""
        self._said_ready = False

    def create_link(self, index: int) -> Link:
        """Return the supervisor's end for a process that is being started."""
        link = Link(partial(self._handle, index))
        self.members[index] = Member(index, link)
        return link

    def remove(self, index: int) -> None:
        """Forget a process that has died: its requests are alive no more."""
        del self.members[index]
        for key, holders in list(self._holders.items()):
            self._holders[key] = [holder for holder in holders if holder != index]
            if not self._holders[key]:
                del self._holders[key]
        self._announce()

    @property
    def have_any_joined(self) -> bool:
        """Whether any process serves now."""
        return any(member.has_joined for member in self.members.values())

    @property
    def are_ready(self) -> bool:
        """Whether all that serve are ready, which at the start are all that there are to be."""
        joined = [member for member in self.members.values() if member.has_joined]
        return self.has_started and bool(joined) and all(member.is_ready for member in joined)

    def _handle(self, index: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._calls[method](index, *arguments)

    def _join(self, index: int) -> None:
        """A process has bound its ports."""
        member = self.members[index]
        member.has_joined = True
        member.link.tell("note_ready", self.are_ready)
        if not self.has_started and sum(member.has_joined for member in self.members.values()) == self._count:
            self.has_started = True
            self._on_joined()
        self._announce()

    def _note_ready(self, index: int, is_ready: bool) -> None:
        self.members[index].is_ready = is_ready
        self._announce()

    def _announce(self) -> None:
        """Let all processes know if it has changed whether they are ready together."""
        if self.are_ready != self._said_ready:
            self._said_ready = self.are_ready
            for member in self.members.values():
                member.link.tell("note_ready", self._said_ready)

    async def _ask_others(self, index: int, method: str, packed: bytes) -> Answers:
        others = [member for member in self.members.values() if member.has_joined and member.index != index]
        answers = await asyncio.gather(*(_ask(member, method, packed) for member in others))
        found = [answer for answer in answers if answer is not None]
        silent = [each.index for each, answer in zip(others, answers, strict=True) if answer == _SILENT]
        return Answers([answer for answer in found if answer != _SILENT], silent)

    async def _ask_one(self, index: int, other: int, method: str, packed: bytes) -> Answers:
        member = self.members.get(other)
        answer = None if member is None else await _ask(member, method, packed)
        if answer == _SILENT:
            return Answers([], [other])
        return Answers([] if answer is None else [answer], [])

    def _claim(self, index: int, tenant: str, request_id: str) -> int | None:
        """Hold an id for a new request. Return the process that has it, or None: it is held now."""
        holders = self._holders.setdefault((tenant, request_id), [])
        if holders:
            return holders[-1]
        holders.append(index)
        return None

    def _claim_again(self, index: int, tenant: str, request_id: str) -> None:
        """Hold the id of a stream that goes on in this process; the one where it began holds it, too, until it ends."""
        self._holders.setdefault((tenant, request_id), []).append(index)

    def _release(self, index: int, tenant: str, request_id: str) -> None:
        holders = self._holders[tenant, request_id]
        holders.remove(index)
        if not holders:
            del self._holders[tenant, request_id]


_SILENT = b""  # no pickle is empty


async def _ask(member: Member, method: str, packed: bytes) -> bytes | None:
    """Return the answer of a process; None if it has died, `_SILENT` if it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_S):
            answer: bytes = await member.link.ask("answer", method, packed)
            return answer
    except LinkClosed:
        return None
    except TimeoutError:
        log.warning("frontend/%d has not answered %s within %g s", member.index, method, ANSWER_S)
        return _SILENT


async def _refusal_of(admission: Coroutine[Any, Any, None]) -> Refusal | None:
    """Return why a caller is not admitted; None if it is."""
    try:
        await admission
    except RateLimited as error:
        return Refusal(error.message, error.retry_after_s, error.metadata)
    return None
