"""Calls that wait for the engine's loop, which makes them between two steps. Bounded in number and in bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from triptych.errors import TriptychError

# Frontends that send faster than turns come are read no further.
_MAX_CALLS = 4096
MAX_INBOX_BYTES = 64 << 20
INBOX_S = 0.001  # of one turn: steps must not wait for a flood of requests

_T = TypeVar("_T")


class _Call(NamedTuple):
    """A call that the loop makes between two steps."""

    method: Callable[..., object]
    arguments: tuple[object, ...] = ()
    num_bytes: int = 0
    """Bytes that the arguments hold."""


class Inbox:
    """Calls in the order in which they are to be made. Bound to one event loop."""

    def __init__(self, wake: asyncio.Event) -> None:
        """`wake`: set when there is something to do."""
        self._wake = wake
        self._calls: deque[_Call] = deque()
        self._num_bytes = 0
        self._has_space = asyncio.Event()

    def __len__(self) -> int:
        """Return how many calls wait."""
        return len(self._calls)

    def post(self, method: Callable[..., object], *arguments: object, num_bytes: int = 0) -> None:
        """Add a call. `num_bytes`: bytes that its arguments hold."""
        self._calls.append(_Call(method, arguments, num_bytes))
        self._num_bytes += num_bytes
        self._wake.set()

    def wake(self) -> None:
        """Have the loop take a turn, because something has changed without a call of it."""
        self._wake.set()

    async def ask(self, method: Callable[..., _T], *arguments: object) -> _T:
        """Add a call, and return what it returns."""
        done: asyncio.Future[_T] = asyncio.Future()
        self.post(_answer, done, method, arguments)
        return await done

    async def wait_until_below_limit(self) -> None:
        """Wait until more may be posted."""
        while len(self._calls) >= _MAX_CALLS or self._num_bytes >= MAX_INBOX_BYTES:
            self._has_space.clear()
            await self._has_space.wait()

    def make_calls(self) -> None:
        """Make the calls, for as long as a turn may take. Those that are left wake the next turn."""
        ends_at = time.perf_counter() + INBOX_S
        while self._calls:
            call = self._calls.popleft()
            self._num_bytes -= call.num_bytes
            call.method(*call.arguments)
            if time.perf_counter() > ends_at:
                break
        self._has_space.set()
        if self._calls:
            self._wake.set()


def _answer(done: asyncio.Future[_T], method: Callable[..., _T], arguments: tuple[object, ...]) -> None:
    """Make a call, and give its outcome to the coroutine that waits for it, if it still waits."""
    try:
        outcome = method(*arguments)
    except TriptychError as error:
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(outcome)
