"""The engine's connection to its worker: which losses of it accuse the requests in flight, and when one is silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.enginecore.workers.base import Connected, Executor, WorkerLost
from triptych import failpoints
from triptych.errors import EngineUnavailable, StaleEpoch, TriptychError, WorkerAsleep
from triptych.rpc.session.dialer import Dialer

log = logging.getLogger(__name__)

_SILENCE_S = 60.0  # a stream on which a result is due for so long may have lost something
_MAX_WHY = 500


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a loss was overcome."""

    connected: Connected
    is_crash: bool
    """The worker has died: what was in flight may have killed it."""


class WorkerConnection:
    """Owned by the engine loop, which goes on with its own work while this one dials."""

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
            on_event: Called whenever the executor has something to receive.
            on_given_up: Called when no result will come any more for what is in flight.
            on_unreachable: Called with the reason after each attempt that failed.
        """
        self._executor = executor
        self._address = address
        self._on_event = on_event
        self._on_given_up = on_given_up
        self._on_unreachable = on_unreachable
        self._dialer = Dialer(
            self._connect,
            on_failed=self._on_failed,
            on_given_up=self._give_up,
            fatal=(StaleEpoch,),
        )
        self.is_worker_asleep = False
        """The last attempt to dial found the worker asleep."""
        self._last_why = ""
        """Why the last attempt to dial failed. Empty: it did not."""
        self._boot_id = ""
        self._heard_at = 0.0
        """When the last result came, or the stream began, on the monotonic clock."""

    @property
    def has_session(self) -> bool:
        """Whether there are rows, and maybe steps, for which a broken stream can be resumed."""
        return self._dialer.has_session

    async def connect(self) -> Connected:
        """Dial with no session to resume.

        Raises:
            StaleEpoch: Another engine has this one's worker.
        """
        return await self._dial()

    async def recover(self, loss: WorkerLost) -> Recovery:
        """Resume the session, or begin anew with the worker that answers.

        Raises:
            StaleEpoch: Another engine has taken this one's place for good.
        """
        boot_id = self._boot_id
        self._dialer.note_broken(str(loss), is_over=loss.is_crash)
        connected = await self._dial()
        if connected.is_resumed:
            log.info("stream resumed")
            return Recovery(connected, is_crash=False)
        # A session that is gone, or that nothing comes through, says nothing of the requests: networks do that, too.
        has_died = connected.facts.boot_id != boot_id and not loss.is_orderly
        return Recovery(connected, is_crash=loss.is_crash or has_died)

    def end_session(self) -> None:
        """Note that the worker has ended the session."""
        self._dialer.give_up("the worker has ended it")

    def note_result(self, received_at: float) -> None:
        """Note that a step has come back."""
        self._heard_at = received_at
        self._dialer.note_progress()

    def check_silence(self, due_since: float) -> None:
        """Give a stream up on which a result is long due. To resume it costs nothing if nothing was lost.

        A step that hangs is the worker's own affair; a message that got lost is noticed by the engine only.

        Args:
            due_since: When the oldest step in flight was sent.

        Raises:
            WorkerLost: There was no result for too long.
        """
        if time.monotonic() - max(self._heard_at, due_since) > _SILENCE_S:
            self._dialer.note_progress()  # nothing speaks against the worker
            raise WorkerLost(f"no result for {_SILENCE_S:g} s")

    async def _dial(self) -> Connected:
        connected = await self._dialer.dial()
        self.is_worker_asleep, self._last_why = False, ""
        self._heard_at, self._boot_id = time.monotonic(), connected.facts.boot_id
        return connected

    def _give_up(self, why: str) -> None:
        if failpoints.ARMED:
            failpoints.reach("enginecore.before_requeue")
        self._on_given_up()

    async def _connect(self) -> Connected:
        return await self._executor.connect(self._on_event, resume=self._dialer.has_session)

    def _on_failed(self, error: Exception) -> None:
        if not isinstance(error, TriptychError | WorkerLost):
            raise error  # a bug
        why = str(error)[:_MAX_WHY]
        self.is_worker_asleep = isinstance(error, WorkerAsleep)
        if why != self._last_why:
            level = logging.INFO if isinstance(error, EngineUnavailable) else logging.WARNING
            log.log(level, "worker %s: %s", self._address, why)
            self._last_why = why
        self._on_unreachable(why)
