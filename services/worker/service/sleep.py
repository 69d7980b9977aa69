"""Sleep of the worker: its memory is given back; its process, facts and port stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from triptych.errors import TriptychError
from triptych.types.facts import Phase, SleepLevel
from triptych_services.worker.service.lease import WorkerLease
from triptych_services.worker.service.runner_thread import RunnerThread
from triptych_services.worker.service.status import StatusPublisher

T = TypeVar("T")


class SleepControl:
    """Puts the worker to sleep and wakes it, one at a time. What has started goes on even if its caller leaves.

    Owned by the worker's event loop.
    """

    def __init__(
        self,
        lease: WorkerLease,
        thread: RunnerThread,
        status_publisher: StatusPublisher,
        *,
        set_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`set_ready`: sets the worker's health, by whether engines are admitted."""
        self._lease = lease
        self._thread = thread
        self._status_publisher = status_publisher
        self._set_ready = set_ready
        self._turn = asyncio.Lock()

    async def fall_asleep(self, session_name: str, level: SleepLevel) -> int:
        """End the session of the engine that asks, and give memory back. Return how many bytes.

        Raises:
            WorkerHeld, EngineUnavailable, ProtocolViolation: As `WorkerLease.end` does. Nothing has changed.
            MemoryShort: The host has too little memory for the weights. The session has ended; another can begin.
        """
        return await self._carry_out(self._fall_asleep(session_name, level))

    async def wake(self) -> None:
        """Take memory again and admit engines. No effect on a worker that is awake, or waking.

        Raises:
            MemoryShort, ModelError: As `Runner.wake` does. The worker sleeps on.
        """
        await self._carry_out(self._wake())

    async def _carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        async def in_turn() -> T:
            async with self._turn:
                return await work

        return await asyncio.shield(asyncio.create_task(in_turn(), name="sleep-or-wake"))

    async def _fall_asleep(self, session_name: str, level: SleepLevel) -> int:
        self._lease.end(session_name)
        self._status_publisher.change(phase=Phase.ASLEEP, progress=0.0)  # from now on no engine is admitted
        await self._set_ready(False)
        try:
            return await self._thread.sleep(level)
        except TriptychError:
            await self._turn_ready()
            raise

    async def _wake(self) -> None:
        if self._status_publisher.state.phase != Phase.ASLEEP:
            return
        self._status_publisher.change(phase=Phase.LOADING, progress=0.0)
        try:
            facts = await self._thread.wake()
        except TriptychError:
            self._status_publisher.change(phase=Phase.ASLEEP, progress=0.0)
            raise
        self._status_publisher.change(facts=facts)
        await self._turn_ready()

    async def _turn_ready(self) -> None:
        self._status_publisher.change(phase=Phase.READY, progress=1.0)
        await self._set_ready(True)
