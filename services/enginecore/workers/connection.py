"""The engine's connection to its worker: which losses of it accuse the requests in flight, and when one is silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych import failpoints
from triptych.errors import (
    EngineUnavailable,
    HandshakeMismatch,
    StaleEpoch,
    TriptychError,
    WorkerAsleep,
    WorkerHeld,
)
from triptych.rpc.session.dialer import Dialer
from triptych_services.enginecore.workers.base import Connected, Executor, WorkerGone, WorkerLost

log = logging.getLogger(__name__)

_SILENCE_S = 60.0  # a stream on which a result is due for so long may have lost something
_REFUSED_S = 10.0
"""A worker that has refused the engine for this long, and no other answer came from the pool, will not serve it."""
_MAX_WHY = 500


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a loss was overcome."""

    connected: Connected
    is_crash: bool
    """The worker has died: what was in flight may have killed it."""


class WorkerConnection:
    """Owned by the engine loop, which continues with its own work while this one dials."""

    def __init__(
        self,
        executor: Executor,
        *,
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
        self._whys: dict[str, str] = {}
        """Address -> why the last attempt to dial it failed, for those that have failed since the last welcome."""
        self._refused_since: float | None = None
        """When the first of the last dials was made that all found a mismatch; None: the last one did not."""
        self._is_found_dead = False
        """The worker of the session before has gone, and its process with it."""
        self._boot_id = ""
        self._heard_at = 0.0
        """When the last result came, or the stream began, on the monotonic clock."""

    @property
    def has_session(self) -> bool:
        """Whether there are rows, and maybe steps, for which a broken stream can be resumed."""
        return self._dialer.has_session

    @property
    def is_refused(self) -> bool:
        """Whether no worker will serve this engine as it is: all that answer have another model, config or protocol."""
        since = self._refused_since
        return not self.has_session and since is not None and time.monotonic() - since >= _REFUSED_S

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
        boot_id, address = self._boot_id, self._executor.address
        self._is_found_dead = False
        self._dialer.note_broken(str(loss), is_over=loss.is_crash)
        connected = await self._dial()
        if connected.is_resumed:
            log.info("stream resumed")
            return Recovery(connected, is_crash=False)
        # A session that is gone, or that nothing comes through, says nothing of the requests: networks do that, too.
        # Of a worker that another one has replaced, the boot id of the other says nothing either.
        is_other = connected.facts.boot_id != boot_id
        has_died = self._is_found_dead if self._executor.address != address else is_other
        return Recovery(connected, is_crash=loss.is_crash or (has_died and not loss.is_orderly))

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
        if time.monotonic() > self.silent_at(due_since):
            self._dialer.note_progress()  # nothing speaks against the worker
            raise WorkerLost(f"no result for {_SILENCE_S:g} s")

    def silent_at(self, due_since: float) -> float:
        """Return when `check_silence` gives the stream up if no result comes, in seconds of the monotonic clock."""
        return max(self._heard_at, due_since) + _SILENCE_S

    async def _dial(self) -> Connected:
        connected = await self._dialer.dial()
        self.is_worker_asleep, self._whys, self._refused_since = False, {}, None
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
        if not isinstance(error, HandshakeMismatch):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = time.monotonic()
        address = self._executor.address
        if why != self._whys.get(address):
            level = logging.INFO if isinstance(error, EngineUnavailable | WorkerHeld) else logging.WARNING
            log.log(level, "worker %s: %s", address or "pool", why)
            self._whys[address] = why
        if isinstance(error, WorkerGone):
            self._is_found_dead = error.has_died
            self._dialer.give_up(why)
        self._on_unreachable(why)
