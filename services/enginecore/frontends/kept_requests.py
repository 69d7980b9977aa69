"""Requests that outlive their frontend: which session reads each, and what another one needs to read it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from triptych.errors import NotKept
from triptych.types.outputs import FinishedRequest, RequestFailure
from triptych.types.step import U32
from triptych.types.submit import AttachRequest, SubmitRequest
from triptych_services.enginecore.frontends.kept_logprobs import KeptLogprobs
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.running_rows import Ints

_END_BYTES = 256  # of one choice's end, with its objects


class ChoiceKey(NamedTuple):
    """The name of a choice: where it was submitted, or where it is read."""

    session: int
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceEnd:
    """One choice that has ended."""

    token_ids: U32
    """All of its output."""
    outcome: FinishedRequest | RequestFailure
    """With the number that it was submitted under."""


@dataclass(slots=True, eq=False)
class KeptRequest:
    """One request with all its choices. Its names in the scheduler stay those that it was submitted under."""

    submit: SubmitRequest
    session: int
    """Session that it was submitted on."""
    deadline: float | None
    """Seconds on the engine's clock; None if it may take any time."""
    reader: int
    """Session that its outputs go to. 0: none."""
    numbers: list[int]
    """[num_choices] names of the choices in the reader's session, or in the last one that there was."""
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    """Number that a choice was submitted under -> its end."""
    expires_at: float = math.inf
    """Seconds on the engine's clock until which it is kept; inf while it runs and is read."""
    held_bytes: int = 0
    """Bytes that count against the limit of what is kept."""

    @property
    def has_ended(self) -> bool:
        return len(self.ends) == self.submit.num_choices

    @property
    def keys(self) -> list[ChoiceKey]:
        """The names of its choices in the scheduler."""
        return [ChoiceKey(self.session, number) for number in self.submit.numbers.tolist()]

    @property
    def num_bytes(self) -> int:
        return self.submit.num_bytes + sum(_END_BYTES + end.token_ids.nbytes for end in self.ends.values())


class KeptRequests:
    """Owned by `FrontendRequests`. It decides nothing about requests that run: the engine aborts what is dropped here.

    submitted -> read by its session -- detach --> read by none -- attach --> read by another session, …
                      | ended                           | ended
                      '-------> kept for `keep_ms` <----'
    """

    def __init__(self, clock: Callable[[], float], max_bytes: int = 0) -> None:
        """
        Args:
            clock: Monotonic time in seconds.
            max_bytes: Limit of what requests without a reader and ended ones hold. 0: nothing is kept.
        """
        self._clock = clock
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._key_to_request: dict[ChoiceKey, KeptRequest] = {}
        """By the names of submission."""
        self._digest_to_request: dict[bytes, KeptRequest] = {}
        self._moved: dict[ChoiceKey, ChoiceKey | None] = {}
        """Name of submission of a choice that its own session does not read any more -> where it is read; None:
        nowhere."""
        self._readers: dict[ChoiceKey, ChoiceKey] = {}
        """The same for those that are read, the other way round."""
        self._session_to_num_moved: Counter[int] = Counter()
        """Session -> number of its choices in `_moved`. No entry is 0."""
        self._moved_sessions: Ints = np.empty(0, np.int64)
        """The same sessions."""
        self._expiries: list[tuple[float, int, KeptRequest]] = []
        """A heap of all that expire, with some that have been attached meanwhile."""
        self._order = itertools.count()
        self.logprobs = KeptLogprobs()
        """The log-probabilities of all that are kept and have asked for them."""

    def __len__(self) -> int:
        """Return how many requests are kept or may be."""
        return len(self._digest_to_request)

    @property
    def held_bytes(self) -> int:
        """Bytes of the requests that have ended or that no frontend reads."""
        return self._held_bytes

    @property
    def next_expiry_at(self) -> float:
        """When `take_expired` may have something to yield; inf: nothing is kept that expires."""
        if not self._digest_to_request or not self._expiries:
            return math.inf
        return self._expiries[0][0] if self._held_bytes <= self._max_bytes else -math.inf

    @property
    def num_unread(self) -> int:
        """Number of requests that run and that no frontend reads."""
        return sum(not kept.reader and not kept.has_ended for kept in self._digest_to_request.values())

    def add(self, session: int, submit: SubmitRequest, deadline: float | None) -> None:
        """Note a request that was queued, if it wants to be kept."""
        digest = _digest(submit.resume_secret)
        if not submit.keep_ms or not self._max_bytes or digest in self._digest_to_request:
            return
        kept = KeptRequest(submit, session, deadline, session, submit.numbers.tolist())
        self._digest_to_request[digest] = kept
        self._key_to_request.update(dict.fromkeys(kept.keys, kept))
        if _has_logprobs(kept):
            self.logprobs.add(kept.keys)

    def of(self, key: ChoiceKey) -> KeptRequest | None:
        """Return the request that a choice was submitted with; None if it is not kept."""
        return self._key_to_request.get(key)

    def find(self, attach: AttachRequest) -> KeptRequest:
        """Return the request that a frontend asks to read.

        Its secret is looked up by a digest, so that the time it takes reveals nothing about the secrets that there are.

        Raises:
            NotKept: There is no such request.
        """
        kept = self._digest_to_request.get(_digest(attach.secret))
        if (
            kept is None
            or kept.expires_at <= self._clock()
            or attach.tenant not in (None, kept.submit.head.tenant)
            or attach.num_choices != kept.submit.num_choices
        ):
            raise NotKept(
                "no such stream is kept here: it is over, its client has left, or its time has passed"
            )
        return kept

    def reader_of(self, key: ChoiceKey) -> ChoiceKey | None:
        """Return where the outputs of a choice go; None: nowhere."""
        return self._moved.get(key, key) if self._moved else key

    def submitted_as(self, key: ChoiceKey) -> ChoiceKey | None:
        """Return the name under which the choice was submitted that a session reads under this one.

        None: it does not read it any more.
        """
        if key in self._readers:
            return self._readers[key]
        return None if key in self._moved else key

    def to_readers(self, sessions: Ints, numbers: U32) -> tuple[Ints, U32]:
        """Return where the tokens of a step go, given the names of submission. Session 0 reads nothing."""
        if not self._moved:
            return sessions, numbers
        places = np.flatnonzero(np.isin(sessions, self._moved_sessions))
        if not len(places):
            return sessions, numbers
        sessions, numbers = sessions.copy(), numbers.copy()
        for place in places.tolist():
            key = ChoiceKey(int(sessions[place]), int(numbers[place]))
            reader = self._moved.get(key, key)
            sessions[place], numbers[place] = (0, 0) if reader is None else reader
        return sessions, numbers

    def attach(self, kept: KeptRequest, session: int, numbers: Sequence[int]) -> None:
        """Give a request a new reader."""
        self._set_reader(kept, session, numbers)
        kept.expires_at = math.inf
        self._settle(kept)

    def read_by(self, session: int) -> list[KeptRequest]:
        """Return the requests that a session reads."""
        return [kept for kept in self._digest_to_request.values() if kept.reader == session]

    def detach(self, kept: KeptRequest, lost_for_s: float = 0.0) -> None:
        """Note that a request lost its reader `lost_for_s` ago. It expires unless another session attaches it."""
        self._set_reader(kept, 0, kept.numbers)
        self._settle(kept, lost_for_s)

    def note_end(self, request: Request, outcome: FinishedRequest | RequestFailure) -> None:
        """Keep the end of a choice."""
        kept = self._key_to_request.get(ChoiceKey(request.session, request.number))
        if kept is not None:
            output = np.array(request.token_ids[request.num_prompt_tokens :], np.uint32)
            kept.ends[request.number] = ChoiceEnd(output, outcome)
            self._settle(kept)

    def forget(self, kept: KeptRequest) -> None:
        """Keep a request no more. Its choices, if they still run, are named as their reader knows them."""
        if self._digest_to_request.pop(_digest(kept.submit.resume_secret), None) is None:
            return
        for key in kept.keys:
            del self._key_to_request[key]
            if key.number in kept.ends or not kept.reader:
                self._unmove(key)
        self._held_bytes -= kept.held_bytes
        kept.expires_at = math.inf
        self.logprobs.forget(kept.keys)

    def forget_all_of(self, key: ChoiceKey) -> None:
        """Forget the request that a choice was submitted with, if it is kept."""
        if (kept := self._key_to_request.get(key)) is not None:
            self.forget(kept)

    def forget_choice(self, key: ChoiceKey) -> None:
        """Forget where a choice was read that has ended and is not kept."""
        if self._moved:
            self._unmove(key)

    def take_expired(self) -> Iterator[KeptRequest]:
        """Yield the requests that have expired, and while all together hold too many bytes the next to expire."""
        now = self._clock()
        while self._expiries:
            expires_at, _, kept = self._expiries[0]
            is_current = expires_at == kept.expires_at
            if is_current and expires_at > now and self._held_bytes <= self._max_bytes:
                return
            heappop(self._expiries)
            if is_current:
                yield kept

    def _set_reader(self, kept: KeptRequest, session: int, numbers: Sequence[int]) -> None:
        kept.reader, kept.numbers = session, list(numbers)
        for key, number in zip(kept.keys, kept.numbers, strict=True):
            self._unmove(key)
            reader = ChoiceKey(session, number) if session else None
            if reader != key:
                self._moved[key] = reader
                self._count_moved(key.session, 1)
                if reader is not None:
                    self._readers[reader] = key

    def _unmove(self, key: ChoiceKey) -> None:
        if key in self._moved:
            reader = self._moved.pop(key)
            self._count_moved(key.session, -1)
            if reader is not None:
                del self._readers[reader]

    def _count_moved(self, session: int, change: int) -> None:
        """Count the moved choices of a session, and note when there is the first or no more."""
        before = self._session_to_num_moved[session]
        self._session_to_num_moved[session] += change
        if before + change == 0:
            del self._session_to_num_moved[session]
        if before == 0 or before + change == 0:
            self._moved_sessions = np.array(list(self._session_to_num_moved), np.int64)

    def _settle(self, kept: KeptRequest, lost_for_s: float = 0.0) -> None:
        """Let a request expire if no frontend reads it or it has ended, and count its bytes then."""
        is_held = kept.has_ended or not kept.reader
        held_bytes = kept.num_bytes if is_held else 0
        self._held_bytes += held_bytes - kept.held_bytes
        kept.held_bytes = held_bytes
        expires_at = self._clock() - lost_for_s + kept.submit.keep_ms / 1000
        if is_held and expires_at < kept.expires_at:  # its end does not prolong the wait for a reader
            kept.expires_at = expires_at
            heappush(self._expiries, (expires_at, next(self._order), kept))


def _has_logprobs(kept: KeptRequest) -> bool:
    sampling = kept.submit.sampling
    return sampling.logprobs is not None or bool(sampling.logprob_token_ids)


def _digest(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=16).digest()
