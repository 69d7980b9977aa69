"""Work that takes long, on threads beside the event loop: one queue per payer, taken in turn by the CPU time used.

    payer a   ■■■■ ■■■■ ■■■■ ■■■■     used 3.1 s       a thread that is free goes to the payer who has used the least,
    payer b   ■                       used 0.2 s  ◄    so a payer waits behind others' running work, not behind their
    payer c                           (forgets)        queues

A payer who has nothing here is not credited for that: when work of a payer comes, its time is at least that of the
least of those who have work.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from triptych.errors import QueueFull
from triptych_services.frontend.access.caller import current_payer

MAX_WAITING = 256
"""Pieces of work of one payer that wait for a thread."""
MAX_WAITING_SIZE = 64 << 20
"""Their sizes added up: four of the largest messages."""
PAYERS_WITHIN_TOTAL = 2
"""So many payers may wait with as much as one may. Beyond that the one with the most gives way to others."""
_RETRY_AFTER_S = 1.0

P = ParamSpec("P")
R = TypeVar("R")

_elsewhere = threading.local()


def add_cpu_time(seconds: float) -> None:
    """Charge the work that calls this for CPU time that it has used in another process."""
    _elsewhere.seconds = getattr(_elsewhere, "seconds", 0.0) + seconds


@dataclass(slots=True, eq=False)
class _Work:
    """One call of `FairThreads.run`."""

    call: Callable[[], Any]
    size: int
    result: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Payer:
    """The work of one payer."""

    cpu_s: float
    """CPU time used, from the level at which the payer came."""
    waiting: deque[_Work] = field(default_factory=deque)
    waiting_size: int = 0
    num_running: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running


class FairThreads:
    """A few threads, and before them a bounded queue for each payer. Bound to one event loop.

    Python runs one thread at a time, so threads add throughput only for what releases the interpreter's lock. They keep
    the loop responsive: it gets its turn within the switch interval, save where a thread is inside one long call of a C
    library.
    """

    def __init__(
        self, num_threads: int, *, inline_size: int, what: str, max_waiting: int = MAX_WAITING
    ) -> None:
        """Start with nothing to do.

        Args:
            num_threads: Number of threads. One payer has all of them but one, so that the next is not behind its work.
            inline_size: Work up to this size runs on the loop at once.
            what: What waits here, for the refusal: `prompts to be tokenized`.
            max_waiting: Pieces of work of one payer that wait.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="work")
        self._num_free = num_threads
        self._max_running = max(num_threads - 1, 1)
        self._inline_size = inline_size
        self._what = what
        self._max_waiting = max_waiting
        self._payers: dict[str, _Payer] = {}
        """The payers with work, and those without whose time is above that of all with work."""
        self._num_waiting = 0
        self._waiting_size = 0

    @property
    def num_waiting(self) -> int:
        """Pieces of work of all payers that wait."""
        return self._num_waiting

    def cpu_s(self, payer: str) -> float:
        """Return the CPU time that a payer has used as others count it, in seconds."""
        return self._payers[payer].cpu_s if payer in self._payers else 0.0

    async def run(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `function(*args, **kwargs)`.

        Args:
            size: How much there is to do, in characters, bytes or items.

        Raises:
            QueueFull: Too much of this payer waits already, or too much of all and others have less.
        """
        if size <= self._inline_size:
            return function(*args, **kwargs)
        name = current_payer()
        self._make_room(name, size)
        payer = self._payers.get(name)
        if payer is None:
            payer = self._payers[name] = _Payer(self._least_cpu_s())
        elif payer.is_idle:
            payer.cpu_s = max(payer.cpu_s, self._least_cpu_s())
        call = functools.partial(function, *args, **kwargs)
        work = _Work(call, size, asyncio.get_running_loop().create_future())
        payer.waiting.append(work)
        self._count_waiting(payer, 1, size)
        self._start_next()
        try:
            result: R = await work.result
        except asyncio.CancelledError:
            if work in payer.waiting:
                self._take_out(payer, work)
                self._forget_idle()
            raise
        return result

    def _make_room(self, name: str, size: int) -> None:
        """Raise QueueFull if a payer has too much here already.

        If all together have too much, the one who has the most loses its latest work, or is refused.
        """
        payer = self._payers.get(name)
        count, total = (0, 0) if payer is None else (len(payer.waiting), payer.waiting_size)
        if count >= self._max_waiting or total + size > MAX_WAITING_SIZE:
            raise self._refusal(count, total, self._max_waiting, MAX_WAITING_SIZE)
        max_count, max_size = PAYERS_WITHIN_TOTAL * self._max_waiting, PAYERS_WITHIN_TOTAL * MAX_WAITING_SIZE
        while self._num_waiting >= max_count or self._waiting_size + size > max_size:
            refusal = self._refusal(self._num_waiting, self._waiting_size, max_count, max_size)
            fullest = max(self._payers.values(), key=self._share_of)
            if self._share(count + 1, total + size) >= self._share_of(fullest):
                raise refusal
            last = fullest.waiting[-1]
            self._take_out(fullest, last)
            if not last.result.done():  # else its caller has just left
                last.result.set_exception(refusal)

    def _share_of(self, payer: _Payer) -> float:
        return self._share(len(payer.waiting), payer.waiting_size)

    def _share(self, count: int, size: int) -> float:
        """Return the part of a payer's limits that so much waiting work takes."""
        return max(count / self._max_waiting, size / MAX_WAITING_SIZE)

    def _refusal(self, count: int, size: int, max_count: int, max_size: int) -> QueueFull:
        return QueueFull(
            f"{count} {self._what} wait already, {size} characters in all; the limits are {max_count} and {max_size}; "
            f"try again in {_RETRY_AFTER_S:g} s",
            _RETRY_AFTER_S,
        )

    def _least_cpu_s(self) -> float:
        """Return the least time of the payers with work; 0 if none has any."""
        return min((each.cpu_s for each in self._payers.values() if not each.is_idle), default=0.0)

    def _start_next(self) -> None:
        """Give free threads to the payers who have used the least, while there are some with work that waits."""
        while self._num_free:
            ready = [
                each
                for each in self._payers.values()
                if each.waiting and each.num_running < self._max_running
            ]
            if not ready:
                return
            payer = min(ready, key=lambda each: (each.num_running, each.cpu_s))
            work = payer.waiting[0]
            self._take_out(payer, work)
            payer.num_running += 1
            self._num_free -= 1
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, _measured, work.call)
            future.add_done_callback(functools.partial(self._finish, payer, work))

    def _finish(self, payer: _Payer, work: _Work, future: asyncio.Future[_Outcome]) -> None:
        """Take in that a thread is done. The caller may have left before."""
        payer.num_running -= 1
        self._num_free += 1
        if future.cancelled():  # the loop is being closed
            work.result.cancel()
            return
        outcome = future.result()
        payer.cpu_s += outcome.cpu_s
        if not work.result.done():
            if outcome.error is None:
                work.result.set_result(outcome.value)
            else:
                work.result.set_exception(outcome.error)
        self._start_next()
        self._forget_idle()

    def _take_out(self, payer: _Payer, work: _Work) -> None:
        payer.waiting.remove(work)
        self._count_waiting(payer, -1, -work.size)

    def _count_waiting(self, payer: _Payer, count: int, size: int) -> None:
        payer.waiting_size += size
        self._num_waiting += count
        self._waiting_size += size

    def _forget_idle(self) -> None:
        """Forget the payers without work whose time says nothing any more."""
        has_work = any(not each.is_idle for each in self._payers.values())
        least_s = self._least_cpu_s()
        self._payers = {
            name: each
            for name, each in self._payers.items()
            if not each.is_idle or (has_work and each.cpu_s > least_s)
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """The end of one call on a thread."""

    cpu_s: float
    value: Any = None
    error: BaseException | None = None


def _measured(call: Callable[[], Any]) -> _Outcome:
    """Make a call on this thread and measure its CPU time."""
    _elsewhere.seconds = 0.0
    started = time.thread_time()
    try:
        value, error = call(), None
    except Exception as raised:
        value, error = None, raised
    return _Outcome(time.thread_time() - started + _elsewhere.seconds, value, error)
