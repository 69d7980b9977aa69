"""Engines that are listed, that a name resolves to, that join and that leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.fake_engine import FakeEngine, eventually
from triptych.config.fields import EngineConfig
from triptych.observe.metrics.frontend import FrontendMetrics
from triptych.types.submit import EngineWelcome
from triptych_services.frontend.app import _create_discovery
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.status_watch import StatusWatch
from triptych_services.frontend.routing import discovery as discovery_module
from triptych_services.frontend.routing.discovery import MAX_DIALED, EngineDiscovery
from triptych_services.frontend.routing.router import Router


class Names:
    """A name service whose answers a test sets."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.error: OSError | None = None
        self.num_asked = 0

    async def resolve(self, host: str, port: int) -> Iterable[str]:
        assert (host, port) == ("engines", 50052)
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return self.addresses

    async def was_asked_again(self, times: int = 3) -> None:
        wanted = self.num_asked + times
        await eventually(lambda: self.num_asked >= wanted)


@asynccontextmanager
async def discovering(
    text: str, names: Names, monkeypatch: pytest.MonkeyPatch, watch: StatusWatch | None = None
) -> AsyncIterator[Router]:
    monkeypatch.setattr(discovery_module, "INTERVAL_S", 0.02)
    router = Router()

    def create(address: str) -> EngineClient:
        return EngineClient(address, frontend_id="f", boot_id="b", on_change=router.on_change)

    work = (EngineClient.run, *((watch.follow,) if watch else ()))
    found = EngineDiscovery(text, router, create, work=work, resolve=names.resolve)
    task = asyncio.create_task(found.run())
    try:
        yield router
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def ready(router: Router, *engines: FakeEngine) -> None:
    addresses = {engine.address for engine in engines}
    await eventually(lambda: {e.address for e in router.engines if e.is_ready} == addresses)


async def test_engines_join_and_leave_while_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    names, watch = Names(), StatusWatch()
    async with (
        FakeEngine() as listed,
        FakeEngine(engine_id="a") as first,
        FakeEngine(engine_id="b") as second,
    ):
        async with discovering(f"{listed.address}, dns:engines:50052", names, monkeypatch, watch) as router:
            await ready(router, listed)
            names.addresses = [first.address]
            await ready(router, listed, first)
            kept = router.by_id("a")
            names.addresses = [first.address, second.address, listed.address]
            await ready(router, listed, first, second)
            assert router.by_id("a") is kept
            await eventually(lambda: len(list(watch.latest())) == 3)
            names.addresses = [second.address]
            await first.die()
            await eventually(lambda: len(router.engines) == 2)
            await ready(router, listed, second)
            await eventually(lambda: len(list(watch.latest())) == 2)
            names.addresses = [second.address, first.address]
            await first.start()
            await ready(router, listed, first, second)


async def test_an_engine_stays_while_its_stream_or_its_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names()
    async with FakeEngine() as engine, discovering("dns:engines:50052", names, monkeypatch) as router:
        assert "none is known yet" in router.why_not_ready
        names.addresses = [engine.address]
        await ready(router, engine)
        names.addresses = []
        await names.was_asked_again()
        await ready(router, engine)
        names.addresses = [engine.address]
        await engine.die()
        await names.was_asked_again()
        assert [client.address for client in router.engines] == [engine.address]
        assert not router.is_ready
        names.error, names.addresses = socket.gaierror(socket.EAI_AGAIN, "try again"), []
        await names.was_asked_again()
        assert router.engines, "a name service that does not answer takes nothing away"
        names.error = None
        await eventually(lambda: not router.engines)


async def test_a_listed_engine_never_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names()
    async with FakeEngine() as engine:
        async with discovering(f"{engine.address},dns:engines:50052", names, monkeypatch) as router:
            await ready(router, engine)
            await engine.die()
            await names.was_asked_again()
            assert len(router.engines) == 1


async def test_a_fleet_is_dialed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not answer hold a place each; then they make room."""
    monkeypatch.setattr(discovery_module, "_FIRST_DIAL_S", 1000.0)
    started: list[EngineClient] = []

    async def never_welcomed(client: EngineClient) -> None:
        started.append(client)
        await asyncio.Event().wait()

    def create(address: str) -> EngineClient:
        return EngineClient(address, frontend_id="f", boot_id="b")

    text = ",".join(f"127.0.0.1:{port}" for port in range(1, MAX_DIALED + 13))
    task = asyncio.create_task(EngineDiscovery(text, Router(), create, work=(never_welcomed,)).run())
    await eventually(lambda: len(started) == MAX_DIALED)
    await asyncio.sleep(0.05)
    assert len(started) == MAX_DIALED
    for client in started[:3]:
        client.welcome = EngineWelcome("e", ready=False)
    await eventually(lambda: len(started) == MAX_DIALED + 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_engines_of_a_frontend_share_an_index() -> None:
    config = EngineConfig()
    config = replace(config, frontend=replace(config.frontend, engine_addresses="127.0.0.1:1,127.0.0.1:2"))
    router, metrics = Router(), FrontendMetrics.create(CollectorRegistry())
    _create_discovery(config, router, StatusWatch(), metrics)
    first, second = router.engines
    assert first._index is not None
    assert first._index is second._index
