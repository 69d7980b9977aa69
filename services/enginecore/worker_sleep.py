"""How an operator's sleep of the worker goes, as the engine sees it.

asked ── what the pause lets finish has ──► begun ── the worker answers ──► asleep ── Wake ──► the worker is back
  └─────────── Resume ──► called off          └─── refused, or lost
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.enginecore.engine import EngineCore
from services.enginecore.workers.base import Executor
from services.enginecore.workers.connection import WorkerConnection
from triptych.errors import EngineUnavailable, FeatureDisabled, TriptychError
from triptych.observe.logging import with_fields
from triptych.types.facts import PauseMode, SleepLevel

log = logging.getLogger(__name__)

SLEEP_TIMEOUT_S = 600.0  # weights are copied to the host
WAKE_TIMEOUT_S = 3600.0  # or read from the checkpoint again
_POLL_S = 0.01  # of a call of Wake that waits for the loop


@dataclass(slots=True, eq=False)
class Sleep:
    """One sleep."""

    level: SleepLevel
    stays_paused: bool
    """There is a pause beside the one that lets requests settle: it outlasts the sleep."""
    has_started: bool = False
    """The worker has been told; there is no way back but Wake."""
    released_bytes: asyncio.Future[int] = field(default_factory=asyncio.Future)
    """Done when the worker sleeps; or holds why it does not."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody has woken the worker."""

    def fail(self, error: TriptychError) -> None:
        """It came to nothing."""
        self.released_bytes.set_exception(error)
        self.released_bytes.exception()  # whoever asked may have left


class WorkerSleep:
    """Owned by the engine loop; one sleep at a time."""

    def __init__(
        self,
        engine: EngineCore,
        executor: Executor,
        connection: WorkerConnection,
        *,
        in_loop: Callable[[Callable[[], Sleep]], Awaitable[Sleep]],
    ) -> None:
        """`in_loop`: has the engine loop call a function between two steps, and waits for what it returns."""
        self._engine = engine
        self._executor = executor
        self._connection = connection
        self._in_loop = in_loop
        self._sleep: Sleep | None = None
        """From an operator's call until the worker is back."""

    @property
    def is_asleep(self) -> bool:
        """As far as is known: a worker that dies meanwhile wakes, and is met by the next Wake."""
        return self._connection.is_worker_asleep if self._sleep is None else self._sleep.released_bytes.done()

    @property
    def is_due(self) -> bool:
        """The worker is to be told now: no step is in flight, and none will be planned."""
        return self._sleep is not None and not self._sleep.has_started and not self._engine.is_settling

    async def sleep(self, level: SleepLevel, mode: PauseMode) -> int:
        """Put the worker to sleep as soon as everything has finished that `mode` lets finish.

        What is kept is computed again after `wake`, and new requests queue.

        Returns:
            The bytes that the worker has given back. It sleeps then.

        Raises:
            FeatureDisabled: It is to sleep already, at another level.
            EngineUnavailable: There is no worker, or the engine was resumed before it slept.
            TriptychError: The worker refuses, or is lost; says why.
        """
        sleep = await self._in_loop(lambda: self._ask(level, mode))
        return await asyncio.shield(sleep.released_bytes)

    def _ask(self, level: SleepLevel, mode: PauseMode) -> Sleep:
        """Let requests settle as in a pause. The sleep is due after that. Asked again it is the same sleep."""
        if self._sleep is None:
            if not self._connection.has_session:
                raise EngineUnavailable("there is no worker to put to sleep, or it sleeps already")
            self._sleep = Sleep(level, stays_paused=self._engine.is_paused)
            self._engine.pause(mode)
        if self._sleep.level is not level:
            raise FeatureDisabled(
                "Sleep", f"the worker sleeps at level {self._sleep.level.value}; wake it first"
            )
        return self._sleep

    def stay_paused(self) -> None:
        """A pause has been asked for beside it."""
        if self._sleep is not None:
            self._sleep.stays_paused = True

    def call_off(self) -> None:
        """The engine is resumed: a sleep that has not begun does not begin."""
        if self._sleep is not None and not self._sleep.has_started:
            self._sleep.fail(EngineUnavailable("the engine was resumed before the worker slept"))
            self._sleep = None

    async def fall_asleep(self) -> Sleep | None:
        """Tell the worker, which ends its session; None: it stays awake, or is lost, and whoever asked knows why."""
        sleep = self._sleep
        assert sleep is not None, "it is due"
        sleep.has_started = True
        try:
            response = await self._executor.call(
                "Sleep",
                timeout_s=SLEEP_TIMEOUT_S,
                session_name=self._executor.session_name,
                level=sleep.level.value,
            )
        except TriptychError as error:
            log.warning("the worker does not sleep: %s", error)
            self._sleep = None
            sleep.fail(error)
            return None
        finally:
            if not sleep.stays_paused:
                self._engine.resume()  # nobody plans without a worker
        self._connection.end_session()
        sleep.released_bytes.set_result(response.released_bytes)
        waiting = self._engine.num_requests
        log.info("the worker sleeps", extra=with_fields(level=sleep.level.value, requests=waiting))
        return sleep

    async def wake(self) -> None:
        """Wake the worker, whoever put it to sleep; returns when it can compute for us.

        Raises:
            FeatureDisabled: it does not sleep yet.
            MemoryShort: it has no room now, and sleeps on.
            TriptychError: it cannot be reached, or not be woken; says why.
        """
        sleep = self._sleep
        if sleep is not None and not sleep.released_bytes.done():
            why = "the worker does not sleep yet; Resume calls a sleep off that has not begun"
            raise FeatureDisabled("Wake", why)
        await self._executor.call("Wake", timeout_s=WAKE_TIMEOUT_S)
        if sleep is not None:
            sleep.is_over.set()
            while self._sleep is sleep:
                await asyncio.sleep(_POLL_S)

    def end(self) -> None:
        """The worker is back."""
        self._sleep = None
