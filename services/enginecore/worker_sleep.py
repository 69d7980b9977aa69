"""Sleep of the worker, asked for by an operator and carried out by the engine.

asked ── what the pause lets finish has ──► started ── the worker answers ──► asleep ── Wake ──► the worker is back
  └─────────── Resume ──► cancelled           └─── refused, or lost
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from triptych.errors import EngineUnavailable, TriptychError, WrongState
from triptych.observe.logging import with_fields
from triptych.types.facts import PauseMode, SleepLevel
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.workers.base import Executor
from triptych_services.enginecore.workers.connection import WorkerConnection

log = logging.getLogger(__name__)

SLEEP_TIMEOUT_S = 600.0  # weights are copied to the host
WAKE_TIMEOUT_S = 3600.0  # or read from the checkpoint again
_POLL_S = 0.01  # of a call of Wake that waits for the loop


@dataclass(slots=True, eq=False)
class Sleep:
    """One sleep."""

    level: SleepLevel
    stays_paused: bool
    """The engine is paused for another reason as well, and stays paused after the sleep."""
    has_started: bool = False
    """The call to the worker was made. Only Wake ends the sleep from then on."""
    released_bytes: asyncio.Future[int] = field(default_factory=asyncio.Future)
    """Bytes that the worker has given back, set when it sleeps; or the error because of which it does not."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker was woken."""

    def fail(self, error: TriptychError) -> None:
        """End it with an error: the worker does not sleep."""
        self.released_bytes.set_exception(error)
        self.released_bytes.exception()  # the caller may have left


class WorkerSleep:
    """The sleep of one worker. Owned by `EngineOperator`; there is one at a time."""

    def __init__(
        self,
        engine: EngineCore,
        executor: Executor,
        connection: WorkerConnection,
        *,
        in_loop: Callable[[Callable[..., Sleep], SleepLevel, PauseMode], Awaitable[Sleep]],
    ) -> None:
        """Create the sleeps of a worker that is awake.

        Args:
            engine: The engine core.
            executor: The calls to the worker.
            connection: The session with the worker.
            in_loop: Has the engine loop call a function between two steps, and waits for the outcome.
        """
        self._engine = engine
        self._executor = executor
        self._connection = connection
        self._in_loop = in_loop
        self._sleep: Sleep | None = None
        """From an operator's call until the worker is back."""

    @property
    def is_asleep(self) -> bool:
        """Whether the worker sleeps, to the engine's knowledge: it does not hear of a restart."""
        return self._connection.is_worker_asleep if self._sleep is None else self._sleep.released_bytes.done()

    @property
    def is_due(self) -> bool:
        """Whether the worker is to be put to sleep now: no step is in flight, and none will be planned."""
        return self._sleep is not None and not self._sleep.has_started and not self._engine.is_settling

    async def sleep(self, level: SleepLevel, mode: PauseMode) -> int:
        """Put the worker to sleep as soon as everything has finished that `mode` lets finish.

        What is kept is computed again after `wake`, and new requests queue.

        Returns:
            The bytes that the worker has given back. It sleeps then.

        Raises:
            WrongState: It is to sleep already, at another level.
            EngineUnavailable: There is no worker, or the engine was resumed before it slept.
            TriptychError: The worker refuses, or is lost; says why.
        """
        sleep = await self._in_loop(self._ask, level, mode)
        return await asyncio.shield(sleep.released_bytes)

    def _ask(self, level: SleepLevel, mode: PauseMode) -> Sleep:
        """Begin a pause, after which the worker is put to sleep. A second call returns the sleep of the first."""
        if self._sleep is None:
            if not self._connection.has_session:
                raise EngineUnavailable("there is no worker to put to sleep, or it sleeps already")
            self._sleep = Sleep(level, stays_paused=self._engine.is_paused)
            self._engine.pause(mode)
        if self._sleep.level is not level:
            raise WrongState(f"Sleep: the worker sleeps at level {self._sleep.level.value}; wake it first")
        return self._sleep

    def stay_paused(self) -> None:
        """Note that a pause was asked for as well."""
        if self._sleep is not None:
            self._sleep.stays_paused = True

    def cancel(self) -> None:
        """Cancel a sleep that has not started: the engine was resumed."""
        if self._sleep is not None and not self._sleep.has_started:
            self._sleep.fail(EngineUnavailable("the engine was resumed before the worker slept"))
            self._sleep = None

    async def fall_asleep(self) -> Sleep | None:
        """Put the worker to sleep, which ends its session. Return None if it stays awake or is lost."""
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
                self._engine.resume()  # nothing is planned without a worker
        self._connection.end_session()
        sleep.released_bytes.set_result(response.released_bytes)
        waiting = self._engine.num_requests
        log.info("the worker sleeps", extra=with_fields(level=sleep.level.value, requests=waiting))
        return sleep

    async def wake(self) -> None:
        """Wake the worker, whichever engine has put it to sleep. Return when it can compute for this one.

        Raises:
            WrongState: It does not sleep yet.
            MemoryShort: It has too little memory now, and sleeps on.
            TriptychError: It cannot be reached or woken; says why.
        """
        sleep = self._sleep
        if sleep is not None and not sleep.released_bytes.done():
            raise WrongState(
                "Wake: the worker does not sleep yet; Resume cancels a sleep that has not started"
            )
        await self._executor.call("Wake", timeout_s=WAKE_TIMEOUT_S)
        if sleep is not None:
            sleep.is_over.set()
            while self._sleep is sleep:
                await asyncio.sleep(_POLL_S)

    def end(self) -> None:
        """End the sleep: the worker is back."""
        self._sleep = None
