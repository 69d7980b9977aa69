"""The calls that turn texts into vectors: one request of the generator for each text, a bounded number at a time.

    texts ──► in flight, at most as many as the engines take ──► vectors, in the order of the texts

A text that finds the engines' queues full waits for another one of its call. The call fails if none is in flight.

Vectors that have come are counted until their answer is sent, since clients may ask for more than they read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from triptych.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidRequest,
    QueueFull,
    RateLimited,
    WrongState,
)
from triptych.types.events import DeltaEvent, Event, FinishedEvent
from triptych.types.step import F32
from triptych_services.frontend.access.caller import current_payer, set_tenant
from triptych_services.frontend.requests.parse import MAX_DEADLINE_S
from triptych_services.frontend.requests.raw import RawRequest, with_remaining_time
from triptych_services.frontend.routing.router import Router

MAX_INPUTS = 2048
"""Texts of one call, as many as OpenAI takes."""
MAX_CALL_BYTES = 16 << 20
"""Bytes of the vectors of one call, as many as an engine takes for one text: 2,048 vectors of 2,048 numbers."""
_MIN_IN_FLIGHT = 256
_RETRY_AFTER_S = 1.0
_TENANT_PARTS = 4  # of all unsent bytes, one is the most that one tenant may have


@dataclass(frozen=True, slots=True, eq=False)
class PooledText:
    """The answer to one text."""

    vectors: F32
    """[num_vectors, num_columns]: one vector, or one of each token."""
    num_tokens: int
    num_cached_tokens: int = 0


class Requests(Protocol):
    """The requests of a call, each made when its turn comes."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> RawRequest: ...


class Window:
    """The places of one call's texts in flight. Bound to one event loop."""

    def __init__(self, size: int, turns: asyncio.Lock) -> None:
        """
        Args:
            size: Texts in flight.
            turns: Lets one text of all calls begin in a turn of the event loop. Each is tokenized as it begins, and
                hundreds that come at once would hold up all streams for as long as that takes.
        """
        self.size = size
        """Texts in flight at most."""
        self._turns = turns
        self._places = asyncio.Semaphore(size)
        self._num_in_flight = 0
        self._has_ended = asyncio.Event()
        """Set when a text ends; cleared by one that waits for that."""

    async def compute(
        self, once: Callable[[], AsyncGenerator[Event]], ends_at: float | None = None
    ) -> PooledText:
        """Return the vectors of one text, as soon as there is a place.

        Args:
            ends_at: When the time of the text is over, by `time.monotonic`. None: never.

        Raises:
            TriptychError: What ends the request. `QueueFull` only if no other text of the call is in flight.
            DeadlineExceeded: Its time was over while it waited.
        """
        await _wait(self._places.acquire(), ends_at)
        try:
            if self._num_in_flight:
                async with self._turns:
                    await asyncio.sleep(0)
            return await self._compute(once, ends_at)
        finally:  # an error is an end, too
            self._places.release()
            self._has_ended.set()

    async def _compute(self, once: Callable[[], AsyncGenerator[Event]], ends_at: float | None) -> PooledText:
        while True:
            self._num_in_flight += 1
            try:
                return await _vectors_of(once())
            except (RateLimited, DeadlineUnreachable):
                raise
            except QueueFull:
                if self._num_in_flight == 1:
                    raise
            finally:
                self._num_in_flight -= 1
            self._has_ended.clear()
            await _wait(self._has_ended.wait(), ends_at)


class PooledCalls:
    """Owned by the generator, with which it shares limits, tenants, deadlines and moves. Bound to one event loop."""

    def __init__(
        self, generate: Callable[[RawRequest], AsyncGenerator[Event]], router: Router, max_bytes: int
    ) -> None:
        """
        Args:
            generate: As `Generator.generate`.
            max_bytes: Bytes that all answers together may have until they are sent.
        """
        self._generate = generate
        self._router = router
        self._unsent = _UnsentBytes(max_bytes)
        self._turns = asyncio.Lock()

    def open_answer(self) -> AnswerBytes:
        """Return the bytes of a new answer, none yet, which its caller closes when it is sent or given up."""
        return AnswerBytes(self._unsent)

    def open_window(self, model: str) -> Window:
        """Return the places of a call's texts: enough to have the next ones waiting, and no more than are taken."""
        size = max(_MIN_IN_FLIGHT, 2 * self._router.max_running(model))
        limit = self._router.max_choices(model)
        return Window(min(size, limit) if limit else size, self._turns)

    async def compute(
        self, raws: Requests, answer: AnswerBytes, window: Window | None = None
    ) -> list[PooledText]:
        """Return the vectors of texts, in their order. The first error ends all.

        Args:
            raws: One request for each text, with `pooling`.
            answer: Counts the vectors.
            window: The places of the call, if others share them. None: it has its own.

        Raises:
            TriptychError: What ends one of the requests.
            InvalidRequest: The vectors of all texts together are too large.
            QueueFull: The unsent answers of all calls are.
        """
        if not len(raws):
            return []
        first = raws[0]
        window = window or self.open_window(first.model)
        set_tenant(first.head.tenant)
        answer.payer = current_payer()
        arrived = time.monotonic()
        ends_at = _end_of(first.deadline_s, arrived)
        if len(raws) == 1:
            pooled = await window.compute(
                lambda: self._generate(with_remaining_time(first, arrived)), ends_at
            )
            answer.add(pooled.vectors.nbytes)
            return [pooled]
        places, answers = iter(range(len(raws))), dict[int, PooledText]()

        async def compute_next() -> None:
            for place in places:
                answers[place] = await self._compute_one(raws, place, arrived, ends_at, window, answer)

        tasks = [asyncio.create_task(compute_next()) for _ in range(min(len(raws), window.size))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [answers[place] for place in range(len(raws))]

    async def _compute_one(
        self,
        raws: Requests,
        place: int,
        arrived: float,
        ends_at: float | None,
        window: Window,
        answer: AnswerBytes,
    ) -> PooledText:
        def once() -> AsyncGenerator[Event]:
            return self._generate(with_remaining_time(raws[place], arrived))

        pooled = await window.compute(once, ends_at)
        answer.add(pooled.vectors.nbytes)
        if answer.num_bytes > MAX_CALL_BYTES:
            why = f"their vectors have more than {MAX_CALL_BYTES} bytes, the limit of a call; split the call"
            raise InvalidRequest(raws[place].path("prompt"), why)
        return pooled


@dataclass(slots=True)
class _UnsentBytes:
    """The bytes of all answers of this process that are not sent. No tenant can have them all."""

    max_bytes: int
    num_bytes: int = 0
    by_payer: Counter[str] = field(default_factory=Counter)


class AnswerBytes:
    """The bytes of one answer: of its vectors as they come, then of what is written of them."""

    def __init__(self, all_unsent: _UnsentBytes) -> None:
        self._all = all_unsent
        self.num_bytes = 0
        """Bytes of this answer."""
        self.payer = ""
        """As of `current_payer`. It does not change once there are bytes."""

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more; fewer if negative.

        Raises:
            QueueFull: All answers of the tenant, or of all tenants, would be above their bound. Nothing was counted.
        """
        limit = self._all.max_bytes
        if num_bytes > 0:
            share = limit // _TENANT_PARTS
            of_tenant = f"a tenant's part, {share}, of {limit}"
            self._check(num_bytes, self._all.by_payer[self.payer], share, of_tenant)
            self._check(num_bytes, self._all.num_bytes, limit, str(limit))
        self._count(num_bytes)

    def close(self) -> None:
        """Count it no more. A second call does nothing."""
        self._count(-self.num_bytes)
        if not self._all.by_payer[self.payer]:
            del self._all.by_payer[self.payer]

    def _check(self, num_bytes: int, num_unsent: int, limit: int, what: str) -> None:
        """Refuse more bytes than a bound allows, unless there is no other answer."""
        if num_unsent + num_bytes > limit and num_unsent > self.num_bytes:
            raise QueueFull(
                f"{num_unsent} bytes of answers with vectors are computed and not read by their clients, and "
                f"{num_bytes} more would exceed {what}, frontend.max_unsent_bytes; read the answers, or try again",
                _RETRY_AFTER_S,
            )

    def _count(self, num_bytes: int) -> None:
        self._all.num_bytes += num_bytes
        self._all.by_payer[self.payer] += num_bytes
        self.num_bytes += num_bytes


def check_num_inputs(num_inputs: int, path: str, limit: int = MAX_INPUTS) -> None:
    """Refuse a call of no text, or of too many.

    Raises:
        InvalidRequest: Names field, value and limit.
    """
    if num_inputs == 0:
        raise InvalidRequest(path, "none is given; at least 1 is needed")
    if num_inputs > limit:
        error = InvalidRequest(path, f"{num_inputs} texts are above the limit {limit}; split the call")
        error.metadata = {"field": path, "value": str(num_inputs), "limit": str(limit)}
        raise error


def _end_of(deadline_s: float | None, arrived: float) -> float | None:
    """Return when a time is over that began at `arrived`; None: never, or it is none, which is refused later."""
    if deadline_s is None or not 0 < deadline_s <= MAX_DEADLINE_S:
        return None
    return arrived + deadline_s


async def _wait(event: Coroutine[Any, Any, object], ends_at: float | None) -> None:
    """Wait for something that other texts of a call bring about.

    Raises:
        DeadlineExceeded: The time of this text is over.
    """
    if ends_at is None:
        await event
        return
    try:
        async with asyncio.timeout(ends_at - time.monotonic()):
            await event
    except TimeoutError:
        raise DeadlineExceeded("the deadline has passed while a text waited for others of its call") from None


async def _vectors_of(events: AsyncGenerator[Event]) -> PooledText:
    """Return what the events of one request bring. Leaving it aborts the request."""
    vectors: F32 | None = None
    async with aclosing(events):
        async for event in events:
            if isinstance(event, DeltaEvent):
                if event.vectors is None:
                    raise WrongState("the request was aborted before its vector was there")
                vectors = event.vectors
            elif isinstance(event, FinishedEvent):
                assert vectors is not None, "it comes before the end"
                return PooledText(vectors, event.usage.num_prompt_tokens, event.usage.num_cached_tokens)
    raise AssertionError("a request ends with its last event")
