"""Rate limits of API keys: requests and tokens within the last minute, counted in this process, or in the supervisor
of several that serve together (`siblings`).

              60 s                       a moving window: what is older than a minute counts no more
   ├────────────────────────────┤
───■────■■───■────────■──■──────►  now   ■ a request, or the tokens that one has taken
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from triptych.errors import InvalidRequest, NotKept, RateLimited
from triptych_services.frontend.access.caller import Caller

WINDOW_S = 60.0


class RateLimits:
    """The windows of all keys. A limit that changes in the file of keys counts for what is in its window already."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[Caller, str], None] = lambda caller, unit: None,
    ) -> None:
        """
        Args:
            clock: Monotonic time in seconds.
            on_refused: Hears of each refusal, and what the caller has used up.
        """
        self._clock = clock
        self._on_refused = on_refused
        self._requests: dict[str, _Window] = {}
        """Name of a key -> its requests."""
        self._guesses: dict[str, _Window] = {}
        """Name of a key -> its requests for streams that there are not; they count as requests, too."""
        self._tokens: dict[str, _Window] = {}

    async def admit(self, caller: Caller) -> None:
        """Count a request.

        Raises:
            RateLimited: The key has used up one of its limits; the request is not counted.
        """
        if not caller.requests_per_minute and not caller.tokens_per_minute:
            return
        now_s = self._clock()
        self._check(self._requests, caller, caller.requests_per_minute, "requests", now_s)
        self._check(self._tokens, caller, caller.tokens_per_minute, "tokens", now_s)
        if caller.requests_per_minute:
            self._requests.setdefault(caller.name, _Window()).add(1, now_s)

    @asynccontextmanager
    async def guess(self, caller: Caller) -> AsyncGenerator[None]:
        """Count a request if the block finds nothing, because what it looks for may have been made up.

        What is found was counted when it began, by a frontend that may be another one.

        Raises:
            RateLimited: The key has used up its requests by such guesses.
        """
        await self.check_guess(caller)
        try:
            yield
        except (NotKept, InvalidRequest):
            self.note_guess(caller)
            raise

    async def check_guess(self, caller: Caller) -> None:
        """Check that the key may ask for a stream. Raises RateLimited."""
        limit = caller.requests_per_minute
        self._check(self._guesses, caller, limit, "streams that are not kept", self._clock())

    def note_guess(self, caller: Caller) -> None:
        """Count a request for a stream that there is not."""
        if caller.requests_per_minute:
            now_s = self._clock()
            for windows in (self._guesses, self._requests):
                windows.setdefault(caller.name, _Window()).add(1, now_s)

    async def admit_tokens(self, caller: Caller) -> None:
        """Check that the key may use tokens. What only counts tokens is not counted as a request.

        Raises:
            RateLimited: The key has used up its tokens.
        """
        if caller.tokens_per_minute:
            self._check(self._tokens, caller, caller.tokens_per_minute, "tokens", self._clock())

    def charge(self, caller: Caller, num_tokens: int) -> None:
        """Count tokens of a request, when they are known: they may exceed the limit, and the next request waits."""
        if caller.tokens_per_minute and num_tokens:
            self._tokens.setdefault(caller.name, _Window()).add(num_tokens, self._clock())

    def _check(
        self, windows: dict[str, _Window], caller: Caller, limit: int, unit: str, now_s: float
    ) -> None:
        name = caller.name
        window = windows.get(name)
        if not limit or window is None:
            return
        used, wait_s = window.used_and_wait(limit, now_s)
        if used < limit:
            return
        self._on_refused(caller, unit)
        message = f"API key {name!r}: {used} {unit} within a minute, the limit is {limit}; try again in {wait_s:.1f} s"
        error = RateLimited(message, wait_s)
        error.metadata = {"limit": str(limit), "unit": unit, "value": str(used)}
        raise error


class _Window:
    """Amounts that were added within the last minute."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        """Time in seconds and amount, oldest first."""
        self._sum = 0

    def add(self, amount: int, now_s: float) -> None:
        self._entries.append((now_s, amount))
        self._sum += amount

    def used_and_wait(self, limit: int, now_s: float) -> tuple[int, float]:
        """Return what is in the window, and how many seconds it takes until that is less than `limit`."""
        entries = self._entries
        while entries and entries[0][0] <= now_s - WINDOW_S:
            self._sum -= entries.popleft()[1]
        left = self._sum
        for added_s, amount in entries:
            if left < limit:
                break
            left -= amount
            if left < limit:
                return self._sum, added_s + WINDOW_S - now_s
        return self._sum, 0.0
