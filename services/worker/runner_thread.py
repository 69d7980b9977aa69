"""The one thread that computes: it loads the runner, then executes plans strictly in order.

The event loop keeps the wire; this thread keeps the model. Plans go in through a queue that the window
bounds, results come back by `call_soon_threadsafe`. Torch's native calls release the GIL, so the two
rarely wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.worker.runner.base import Runner
from services.worker.watchdog import StepClock
from triptych.errors import EngineFailure, TriptychError
from triptych.types.step import StepPlan, StepResult

log = logging.getLogger(__name__)

Deliver = Callable[[StepResult | Exception], None]
PhaseChange = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A session begins: rows are forgotten, results go to `deliver`."""

    session: int
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class _Planned:
    session: int
    plan: StepPlan


class RunnerThread:
    """Owned by the app. All methods are called on the event loop; all callbacks arrive there."""

    def __init__(
        self,
        load: Callable[[PhaseChange], Runner],
        *,
        on_phase: PhaseChange,
        on_ready: Callable[[Runner], None],
    ) -> None:
        self._load = load
        self._on_phase = on_phase
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Opened | _Planned | None] = queue.SimpleQueue()
        self._current = 0
        self.steps = StepClock()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has ended; holds the exception if that was no `stop()`."""
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_session(self, deliver: Deliver) -> int:
        """Begin a session; whatever another one left undone is dropped. Returns its number."""
        self._current += 1
        self._inbox.put(_Opened(self._current, deliver))
        return self._current

    def submit(self, session: int, plan: StepPlan) -> None:
        self._inbox.put(_Planned(session, plan))

    def close_session(self, session: int) -> None:
        """Drop the plans of this session that have not begun."""
        if session == self._current:
            self._current += 1

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
        deliver: Deliver | None = None
        while True:
            waiting_since = time.perf_counter_ns()
            item = self._inbox.get()
            idle_ns = time.perf_counter_ns() - waiting_since
            match item:
                case None:
                    return
                case _Opened():
                    runner.reset()
                    deliver = item.deliver
                case _Planned() if deliver is not None and item.session == self._current:
                    self.steps.start(item.plan.step_id)
                    outcome = _execute(runner, item.plan, idle_ns)
                    self.steps.stop()
                    self._post(deliver, outcome)
                    if isinstance(outcome, Exception):
                        deliver = None  # rows are undefined until the next session resets them

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


def _execute(runner: Runner, plan: StepPlan, idle_ns: int) -> StepResult | Exception:
    try:
        result = runner.execute(plan)
    except Exception as error:
        log.error("step %d failed: %r", plan.step_id, error, exc_info=error)
        if isinstance(error, TriptychError):
            return error
        return EngineFailure(f"step {plan.step_id} failed: {error!r}")
    return replace(result, timings=replace(result.timings, idle_ns=idle_ns))
