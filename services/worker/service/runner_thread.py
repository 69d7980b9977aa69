"""The one thread that computes: it loads the runner, then launches plans strictly in order.

The event loop reads and writes the stream; this thread owns the model. Plans come in through a queue, which holds at
most the steps that may be in flight; results go back by `call_soon_threadsafe`. Torch's native calls release the GIL,
so the two rarely wait for each other.

A plan that has arrived is launched before the result of the one before it is waited for, so that an asynchronous device
has its next step when it ends one. Results leave in the order of the plans.

A result leaves when the next step is prepared, if there is one: the event loop, once it is woken, takes the interpreter
from this thread, and a device that is the host itself would stand still.

    this thread    | compute 1 | prepare 2 | compute 2        | prepare 3 | ...
    event loop     |                       | result 1, plan 3 |

A step that fails ends its session, and the thread goes on with the next one. A step that fails because the device is
lost ends the thread as well: nothing can be computed in this process any more. So does one of several ranks' step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych.errors import ProtocolViolation, RankUnavailable, TriptychError
from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan
from triptych.wire.step import Step
from triptych_services.worker.runner.base import PhaseChange, Runner, do_nothing
from triptych_services.worker.runner.device_loss import is_device_lost
from triptych_services.worker.service.session_steps import Deliver, SessionSteps
from triptych_services.worker.service.watchdog import StepClock

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A session begins: rows are forgotten, results go to `deliver`."""

    session: int
    deliver: Deliver
    on_open: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Planned:
    session: int
    plan: StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Something other than a step, which belongs to no session: `act`, and who waits for what it returns."""

    act: Callable[[Runner], object]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Ordered:
    """Something to do behind the steps before it and ahead of those after it, while their session goes on."""

    act: Callable[[], object]
    answer: asyncio.Future[Any]


_Item = _Opened | _Planned | _Asked | _Ordered


class RunnerThread:
    """Owned by the app. All methods are called on the event loop; all callbacks arrive there."""

    def __init__(
        self,
        load: Callable[[PhaseChange], Runner],
        *,
        on_phase: PhaseChange,
        on_ready: Callable[[Runner], None],
        is_one_of_several: bool = False,
    ) -> None:
        """
        Args:
            load: Creates the runner, on the thread.
            is_one_of_several: Whether the threads of other ranks compute the same steps. Then what has been submitted
                is computed even if its session has ended, since other ranks compute it, and a step that fails on one
                rank ends the thread.
        """
        self._load = load
        self._is_one_of_several = is_one_of_several
        self._on_phase = on_phase
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._current = 0
        self.steps = StepClock()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has ended; holds the exception if that was no `stop()`."""
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_session(self, deliver: Deliver, on_open: Callable[[], None] = do_nothing) -> int:
        """Begin a session; whatever another one left undone is dropped.

        Args:
            on_open: Called on the event loop once no step of an earlier session is computed any more.

        Returns:
            The session's number.
        """
        self._current += 1
        self._inbox.put(_Opened(self._current, deliver, on_open))
        return self._current

    def submit(self, session: int, plan: StepPlan, message: Step) -> None:
        """Have a step computed.

        Args:
            message: The plan as it came, which a leader relays.
        """
        self._inbox.put(_Planned(session, plan))

    def close_session(self, session: int) -> None:
        """Drop the plans of this session that have not begun."""
        if session == self._current:
            self._current += 1

    async def ask(self, act: Callable[[Runner], T]) -> T:
        """Run `act` on the thread after all queued items. The current session is dropped first.

        Raises:
            TriptychError: as `act` does. After any other exception the thread ends, and no call is answered.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(_Asked(act, answer))
        return await answer

    async def between_steps(self, act: Callable[[], object]) -> None:
        """Run `act` on the thread after all queued items and before later ones. The session and its steps go on.

        It is queued when this is first awaited, so that ranks that are told in one order do it between the same steps.

        Args:
            act: Takes no time and raises nothing.
        """
        answer: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(_Ordered(act, answer))
        await answer

    async def sleep(self, level: SleepLevel) -> int:
        """Have the runner give its memory back; returns and raises as `Runner.sleep` does."""
        return await self.ask(lambda runner: runner.sleep(level))

    async def wake(self) -> WorkerFacts:
        """Have the runner take its memory again, and return its facts from now on; raises as `Runner.wake` does."""

        def wake(runner: Runner) -> WorkerFacts:
            runner.wake()
            return runner.facts

        return await self.ask(wake)

    async def stop(self, grace_s: float) -> None:
        """End the thread after the step in hand; past `grace_s` leave it to the end of the process."""
        self._current += 1
        self._inbox.put(None)
        await asyncio.wait([self.ended], timeout=grace_s)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            runner = self._load(lambda phase, progress: self._post(self._on_phase, phase, progress))
            self._post(self._on_ready, runner)
            self._serve(runner)
        except BaseException as error:
            failure = error
        self._post(self._end, failure)

    def _serve(self, runner: Runner) -> None:
        steps = SessionSteps(
            runner,
            self.steps,
            self._post,
            is_fatal=_ends_a_group if self._is_one_of_several else is_device_lost,
        )
        while True:
            item, idle_ns = self._next_item(steps)
            match item:
                case None:
                    steps.finish()
                    return
                case _Opened():
                    steps.open(item.deliver, item.on_open)
                case _Planned() if item.session == self._current or self._is_one_of_several:
                    steps.launch(item.plan, idle_ns)
                case _Asked():
                    steps.drop()
                    self._answer(item, runner)
                case _Ordered():
                    item.act()
                    self._post(_settle, item.answer, item.answer.set_result, None)

    def _answer(self, asked: _Asked, runner: Runner) -> None:
        try:
            outcome = asked.act(runner)
        except RankUnavailable:
            raise
        except TriptychError as error:
            self._post(_settle, asked.answer, asked.answer.set_exception, error)
        else:
            self._post(_settle, asked.answer, asked.answer.set_result, outcome)

    def _next_item(self, steps: SessionSteps) -> tuple[_Item | None, int]:
        """Return the next item and the idle time before it. Results are delivered while waiting."""
        while steps.are_any:
            try:
                return self._inbox.get(timeout=steps.poll_s), 0
            except queue.Empty:
                steps.collect_done()
                steps.deliver()
        waiting_since = time.perf_counter_ns()
        try:
            item = self._inbox.get_nowait()
        except queue.Empty:
            steps.deliver()
            item = self._inbox.get()
        return item, time.perf_counter_ns() - waiting_since

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop has closed before the runner thread ended")

    def _end(self, failure: BaseException | None) -> None:
        if self.ended.done():
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


def _settle(answer: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    if not answer.done():  # else the caller has left
        settle(outcome)


def _ends_a_group(error: Exception) -> bool:
    """Whether other ranks may be in the middle of a step that has failed here. A plan is refused by all ranks, before
    any of them computes."""
    return not isinstance(error, ProtocolViolation)
