"""Reads long requests of every API in child processes: thousands of small objects hold the interpreter's lock for 0.1 s
a MB and more.

A child process gives back what the API makes of the request. Of a conversation that is the messages as JSON, checked.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from triptych.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.offload.limited_process import KeptProcesses, ProcessEnded
from triptych_services.frontend.requests.parse import MAX_DEADLINE_S
from triptych_services.frontend.requests.raw import remaining_time

LONG_REQUEST = 64 << 10
"""Bytes above which a request is read in a child process."""
READ_LIMIT_S = 15.0
"""CPU time that a request may take in a child process."""
_NUM_PROCESSES = 2  # of which one tenant has one, so that the next is not behind its requests
_SCRIPT = Path(__file__).with_name("body_process.py")

T = TypeVar("T")


class LongReader:
    """Owned by the frontend; its APIs share it. Bound to one event loop."""

    def __init__(self, *, limit_s: float = READ_LIMIT_S) -> None:
        """`limit_s`: CPU time that a request may take in a child process."""
        self._limit_s = limit_s
        self._threads = FairThreads(_NUM_PROCESSES, inline_size=0, what="very long requests")
        """Wait for the child processes."""
        self._processes = KeptProcesses(_SCRIPT, num_kept=_NUM_PROCESSES)

    async def read(
        self,
        size: int,
        read: Callable[[], T],
        *,
        deadline_s: float | None = None,
        arrived: float | None = None,
    ) -> T:
        """Return what `read` returns in a child process, or raise what it raises there.

        Args:
            size: Bytes of the request.
            read: A function of a module, with its arguments by `functools.partial`.
            deadline_s: Time that it may wait for a child process and take there. None: any.
            arrived: When that time began, by `time.monotonic`. None: now.

        Raises:
            InvalidRequest: It takes too much time or memory.
            QueueFull: Too many long requests wait to be read.
            DeadlineExceeded: The time is over.
            EngineUnavailable: The child process ended twice.
        """
        has_deadline = deadline_s is not None and 0 < deadline_s <= MAX_DEADLINE_S  # others are refused later
        left_s = deadline_s if has_deadline else None
        if arrived is not None:
            left_s = remaining_time(left_s, arrived)
        try:
            async with asyncio.timeout(left_s):
                return await self._threads.run(size, self._ask, size, read)
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline of {deadline_s:g} s has passed") from None

    def _ask(self, size: int, read: Callable[[], T]) -> T:
        try:
            answer = self._processes.ask({}, self._limit_s, pickle.dumps(read))
        except ProcessEnded as error:
            if error.was_late:
                why = f"more time to read than the limit of {self._limit_s:g} s; make it shorter"
                raise InvalidRequest("", f"the {size} bytes of the request take {why}") from None
            raise EngineUnavailable(
                "the process that reads long requests ended before it had read this one; try again"
            ) from None
        outcome: Any = pickle.loads(answer["data"])
        if "error" not in answer:
            result: T = outcome
            return result
        if isinstance(outcome, MemoryError):
            why = "the request takes more memory to read than there is; make it shorter"
            raise InvalidRequest("", why) from None
        raise outcome
