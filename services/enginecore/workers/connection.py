"""The engine's tie to its worker: dialled, resumed when the stream breaks, given up when that is hopeless."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.enginecore.workers.base import Connected, Executor, WorkerLost
from triptych.errors import EngineUnavailable, StaleEpoch, TriptychError, WorkerAsleep

log = logging.getLogger(__name__)

_FIRST_REDIAL_S = 0.05
_MAX_REDIAL_S = 1.0
_MAX_IDLE_RESUMES = 3  # a stream that breaks so often with no result between will not get any further
_SILENCE_S = 60.0  # a stream on which a result is due for so long may have lost something
_MAX_WHY = 500


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a loss was overcome."""

    connected: Connected
    is_crash: bool
    """The worker has died: what was in flight may have killed it."""


class WorkerConnection:
    """Owned by the engine loop, which goes on with its own affairs while this one dials."""

    def __init__(
        self,
        executor: Executor,
        *,
        address: str,
        on_event: Callable[[], None],
        on_given_up: Callable[[], None],
        on_unreachable: Callable[[str], None],
    ) -> None:
        """
        Args:
            on_event: called whenever the executor has something to receive.
            on_given_up: called when no result will come any more for what is in flight.
            on_unreachable: called with the reason after each attempt that failed.
        """
        self._executor = executor
        self._address = address
        self._on_event = on_event
        self._on_given_up = on_given_up
        self._on_unreachable = on_unreachable
        self.has_session = False
        """There are rows, and maybe steps, that a broken stream can be resumed for."""
        self.is_worker_asleep = False
        """The last attempt to dial found it so."""
        self._boot_id = ""
        self._resume_ttl_s = 0.0
        """As the worker has promised."""
        self._heard_at = 0.0
        """When a result came last, or the stream began."""
        self._num_idle_resumes = 0

    async def connect(self) -> Connected:
        """With no session to resume. Raises StaleEpoch: another engine has this one's worker."""
        connected = await self._dial(math.inf)
        self.has_session = True
        return connected

    async def recover(self, loss: WorkerLost) -> Recovery:
        """Resume the session, or begin anew with whoever answers.

        Raises:
            StaleEpoch: another engine has taken this one's place for good.
        """
        boot_id = self._boot_id
        self._num_idle_resumes += 1
        if loss.is_crash or self._num_idle_resumes > _MAX_IDLE_RESUMES:
            self._give_up()
        connected = await self._dial(time.monotonic() + self._resume_ttl_s)
        if connected.is_resumed:
            log.info("stream resumed")
            return Recovery(connected, is_crash=False)
        # A session that is gone, or that nothing comes through, says nothing of the requests: networks do that, too.
        has_died = connected.facts.boot_id != boot_id and not loss.is_orderly
        if self.has_session:
            self._on_given_up()  # of the session before; the executor has begun another in its place
        self.has_session, self._num_idle_resumes = True, 0
        return Recovery(connected, is_crash=loss.is_crash or has_died)

    def end_session(self) -> None:
        """The worker has ended it."""
        self._give_up()

    def note_result(self, received_at: float) -> None:
        """A step has come back."""
        self._heard_at, self._num_idle_resumes = received_at, 0

    def check_silence(self, due_since: float) -> None:
        """A step that hangs is the worker's own affair; a message that got lost is nobody's but ours. To resume
        costs nothing where nothing was lost.

        Args:
            due_since: when the oldest step in flight was sent.
        Raises:
            WorkerLost: no result for too long.
        """
        if time.monotonic() - max(self._heard_at, due_since) > _SILENCE_S:
            self._num_idle_resumes = 0  # nothing speaks against the worker
            raise WorkerLost(f"no result for {_SILENCE_S:g} s")

    async def _dial(self, resume_deadline: float) -> Connected:
        """Until the worker welcomes us; a session not resumed by `resume_deadline` is given up."""
        delay_s, last_why = _FIRST_REDIAL_S, ""
        while True:
            try:
                connected = await self._executor.connect(self._on_event)
            except StaleEpoch:
                raise
            except (TriptychError, WorkerLost) as error:
                why = str(error)[:_MAX_WHY]
                self.is_worker_asleep = isinstance(error, WorkerAsleep)
                if why != last_why:
                    level = logging.INFO if isinstance(error, EngineUnavailable) else logging.WARNING
                    log.log(level, "worker %s: %s", self._address, why)
                    last_why = why
            else:
                self.is_worker_asleep = False
                self._heard_at, self._boot_id = time.monotonic(), connected.facts.boot_id
                self._resume_ttl_s = connected.resume_ttl_s
                return connected
            if time.monotonic() > resume_deadline:
                self._give_up()
            self._on_unreachable(last_why)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_REDIAL_S)

    def _give_up(self) -> None:
        if self.has_session:
            self.has_session = False
            self._executor.forget_session()
            self._on_given_up()
