"""Work that takes long, on threads beside the event loop, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from triptych.errors import QueueFull

MAX_WAITING = 256  # pieces of work that wait for a thread
MAX_WAITING_SIZE = 64 << 20  # their sizes added up: four of the largest messages
_RETRY_AFTER_S = 1.0

P = ParamSpec("P")
R = TypeVar("R")


class WorkThreads:
    """A few threads and a bounded queue before them. Bound to one event loop.

    Python runs one thread at a time, so threads add no throughput. They keep the loop responsive: it gets its turn
    within the switch interval, save where a thread is inside one long call of a C library.
    """

    def __init__(self, num_threads: int, *, inline_size: int, what: str) -> None:
        """Start with nothing to do.

        Args:
            inline_size: Work up to this size runs on the loop at once.
            what: What waits here, for the refusal: `prompts to be tokenized`.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="work")
        self._free = asyncio.Semaphore(num_threads)
        self._inline_size = inline_size
        self._what = what
        self._num_waiting = 0
        self._waiting_size = 0

    async def run(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `function(*args, **kwargs)`.

        Args:
            size: How much there is to do, in characters, bytes or items.

        Raises:
            QueueFull: Too much waits already.
        """
        if size <= self._inline_size:
            return function(*args, **kwargs)
        if self._num_waiting >= MAX_WAITING or self._waiting_size + size > MAX_WAITING_SIZE:
            raise QueueFull(
                f"{self._num_waiting} {self._what} wait already, {self._waiting_size} characters in all; the limits "
                f"are {MAX_WAITING} and {MAX_WAITING_SIZE}; try again in {_RETRY_AFTER_S:g} s",
                _RETRY_AFTER_S,
            )
        self._num_waiting += 1
        self._waiting_size += size
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
            self._waiting_size -= size
        call = functools.partial(function, *args, **kwargs)
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        # A caller may leave before the thread does, and the thread is free only then.
        future.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(future)
