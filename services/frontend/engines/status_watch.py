"""Follows the counters of every engine, so that this frontend's metrics can show them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

import grpc.aio

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.observe.metrics import EngineState
from triptych.types.facts import EngineStatus
from triptych.wire.admin import status_from_proto
from triptych_services.frontend.engines.client import EngineClient

log = logging.getLogger(__name__)

_INTERVAL_MS = 1000
_UNCHANGED_INTERVAL_MS = 10_000  # each message costs 0.15 ms, and there may be a thousand idle engines
_SILENCE_S = 15.0
"""Seconds after which the counters are too old to be shown: as long as the connection's keepalive takes."""
_RETRY_S = 1.0
_ENGINES_NAMED = 4


class StatusWatch:
    """The latest counters of each engine. Owned by the app; `follow` runs as long as an engine is there."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, EngineStatus]] = {}
        """Address -> model's name and counters."""

    def latest(self) -> Iterator[tuple[str, EngineStatus]]:
        """Return the model's name and the counters of each engine that has sent them within the last seconds."""
        return iter(list(self._latest.values()))

    def why_waiting(self) -> str:
        """Return why requests that are taken wait: all engines of a model sleep or are paused. Empty: they do not."""
        model_to_statuses: dict[str, list[EngineStatus]] = {}
        for model, status in self.latest():
            model_to_statuses.setdefault(model, []).append(status)
        reasons = []
        for model, statuses in sorted(model_to_statuses.items()):
            if not all(status.asleep or status.paused for status in statuses):
                continue
            sleeping = [status.engine_id for status in statuses if status.asleep]
            paused = [status.engine_id for status in statuses if not status.asleep]
            resting = [_told(sleeping, "asleep", "wake"), _told(paused, "paused", "resume")]
            reasons.append(f"requests for {model} wait: {', '.join(filter(None, resting))}")
        return "; ".join(reasons)

    def states(self, engines: Iterable[EngineClient]) -> Iterator[EngineState]:
        """Return the state of each engine, also of those that are lost or were never reached."""
        for engine in engines:
            model = (
                "" if engine.welcome is None or engine.welcome.model is None else engine.welcome.model.name
            )
            _, status = self._latest.get(engine.address, ("", None))
            if not engine.is_connected:
                state = "lost"
            elif engine.is_ready:
                state = "ready"
            elif status is not None and status.asleep:
                state = "asleep"
            elif status is not None and status.draining:
                state = "draining"
            else:
                state = "not_ready"
            yield EngineState(model, engine.name, state)

    async def follow(self, engine: EngineClient) -> None:
        """Follow an engine until cancelled."""
        try:
            await self._follow(engine)
        finally:
            self._latest.pop(engine.address, None)

    async def _follow(self, engine: EngineClient) -> None:
        while True:
            try:
                await self._read(engine)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError) as error:
                # The engine's session reports to the operator that it is away; here it is one gauge less.
                log.debug("engine %s does not tell its counters: %r", engine.name, error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # else grpc has raised it, since the channel was closed to take renewed certificates
            self._latest.pop(engine.address, None)
            await asyncio.sleep(_RETRY_S)

    async def _read(self, engine: EngineClient) -> None:
        """Take in one engine's counters until its stream ends or falls silent."""
        stub = admin_pb2_grpc.AdminServiceStub(engine.channel)
        request = admin_pb2.WatchStatusRequest(
            interval_ms=_INTERVAL_MS, unchanged_interval_ms=_UNCHANGED_INTERVAL_MS
        )
        call = stub.WatchStatus(request)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    return
                self._latest[engine.address] = status_from_proto(response.status)
        finally:
            call.cancel()


def _told(names: list[str], state: str, remedy: str) -> str:
    """Say which engines rest, and the command that ends it; empty without engines."""
    if not names:
        return ""
    more = f" and {len(names) - _ENGINES_NAMED} more" if len(names) > _ENGINES_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:_ENGINES_NAMED])}{more} {verb} {state} (`triptych admin {remedy}`)"
