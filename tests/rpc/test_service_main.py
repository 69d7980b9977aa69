"""A service's process: how it starts, drains and ends, and what its exit code says."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from triptych.config import EngineConfig, TlsConfig
from triptych.config.loader import ServiceArguments
from triptych.errors import ConfigError, EngineFailure, StaleEpoch
from triptych.rpc import service_main
from triptych.rpc.server import RpcServer
from triptych.rpc.service_main import ServiceApp, run
from triptych.types.exit_codes import ExitCode

DEADLINE_S = 30.0


class App(ServiceApp):
    """An app that notes what is done to it; tests set what runs in its background."""

    section = "worker"
    exit_codes = ((StaleEpoch, ExitCode.FENCED), (ConfigError, ExitCode.MISCONFIGURED))
    work: Coroutine[Any, Any, None] | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.server = RpcServer(services=(), limit_bytes=1000)
        self.calls: list[str] = []
        type(self).last = self

    async def start(self) -> Mapping[str, int]:
        self.calls.append("start")
        if self.work is not None:
            self.start_background("the work", self.work)
        return {"extra_port": 7}

    async def drain(self) -> None:
        self.calls.append("drain")

    async def stop(self) -> None:
        self.calls.append("stop")
        await super().stop()


async def die(error: Exception) -> None:
    raise error


async def code_of(
    arguments: ServiceArguments, work: Coroutine[Any, Any, None] | None = None
) -> tuple[int, App]:
    """Run an app with this work in its background. Return its exit code, and the app."""
    app = type("OneApp", (App,), {"work": work})
    async with asyncio.timeout(DEADLINE_S):
        code = await run(arguments, app)
    return code, app.last


@pytest.fixture
def arguments(tmp_path: Path) -> ServiceArguments:
    config = EngineConfig()
    worker = replace(config.worker, port=0, metrics_port=0)
    return ServiceArguments(replace(config, worker=worker), tmp_path / "ready.json")


async def stop_when_ready(arguments: ServiceArguments) -> dict[str, int]:
    """Send SIGTERM as soon as the ready file is there; return what is in it."""
    assert arguments.ready_file is not None
    async with asyncio.timeout(DEADLINE_S):
        while not arguments.ready_file.exists():
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    return json.loads(arguments.ready_file.read_text())


@pytest.fixture(autouse=True)
def _keep_logging() -> Any:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


async def test_sigterm_drains_and_stops(arguments: ServiceArguments) -> None:
    stopping = asyncio.create_task(stop_when_ready(arguments))
    code, app = await code_of(arguments, asyncio.Event().wait())
    ports = await stopping
    assert (code, app.calls) == (ExitCode.OK, ["start", "drain", "stop"])
    assert set(ports) == {"pid", "port", "metrics_port", "extra_port"}
    assert app.background["the work"].cancelled()


async def test_metrics_of_the_process_are_there_while_it_serves(arguments: ServiceArguments) -> None:
    def version() -> float | None:
        labels = {"version": metadata.version("triptych"), "commit": "", "service": "worker"}
        return REGISTRY.get_sample_value("triptych_build_info", labels)

    found = []

    class Asked(App):
        async def drain(self) -> None:
            found.append(version())

    for _ in range(2):  # a second app in one process registers them again
        assert version() is None
        stopping = asyncio.create_task(stop_when_ready(arguments))
        async with asyncio.timeout(DEADLINE_S):
            await run(arguments, Asked)
        await stopping
        assert arguments.ready_file is not None
        arguments.ready_file.unlink(missing_ok=True)
    assert found == [1, 1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StaleEpoch("a later one"), ExitCode.FENCED),
        (ConfigError("worker.port: no"), ExitCode.MISCONFIGURED),
        (EngineFailure("not in the table"), ExitCode.FAILED),
        (ZeroDivisionError(), ExitCode.FAILED),
    ],
)
async def test_death_of_background_work_decides_the_exit_code(arguments, error, code) -> None:
    found, app = await code_of(arguments, die(error))
    assert (found, app.calls) == (code, ["start", "stop"])


async def test_background_work_that_ends_without_error_has_died(arguments) -> None:
    found, app = await code_of(arguments, asyncio.sleep(0))
    assert (found, app.calls) == (ExitCode.FAILED, ["start", "stop"])


async def test_death_while_draining_is_reported(arguments) -> None:
    class Dies(App):
        async def drain(self) -> None:
            self.background["late"] = asyncio.create_task(die(StaleEpoch("now")))
            await asyncio.sleep(0.01)

    stopping = asyncio.create_task(stop_when_ready(arguments))
    async with asyncio.timeout(DEADLINE_S):
        assert await run(arguments, Dies) == ExitCode.FENCED
    await stopping


async def test_a_port_that_is_taken_is_a_config_error(arguments) -> None:
    taken = RpcServer(services=(), limit_bytes=1000)
    port = taken.bind("127.0.0.1", 0, option="x")
    worker = replace(arguments.config.worker, port=port)
    with pytest.raises(ConfigError, match=r"worker\.port: cannot bind"):
        await code_of(replace(arguments, config=replace(arguments.config, worker=worker)))
    await taken.stop(0)


# Ports that other machines reach


def exposed(section: str, tls: TlsConfig, **options: Any) -> App:
    config = EngineConfig()
    config = replace(config, tls=tls, **{section: replace(getattr(config, section), **options)})
    app = App.__new__(App)  # which has read no files
    app.section, app.keys_option = section, "api_keys_file" if section == "frontend" else ""  # type: ignore[misc]
    app.config = config
    return app


SERVES_TLS = TlsConfig(certificate="c", key="k")
MTLS = replace(SERVES_TLS, client_ca="ca")


@pytest.mark.parametrize(
    ("section", "tls", "options", "advice"),
    [
        ("worker", TlsConfig(), {}, None),
        ("worker", TlsConfig(), {"host": "::1"}, None),
        (
            "worker",
            TlsConfig(),
            {"host": "0.0.0.0"},
            ["worker.host = 0.0.0.0", "tls.client_ca", "tls.certificate"],
        ),
        ("engine", SERVES_TLS, {"host": "10.0.0.7"}, ["engine.host = 10.0.0.7", "tls.client_ca"]),
        ("engine", MTLS, {"host": "10.0.0.7"}, None),
        ("frontend", TlsConfig(), {"host": "localhost"}, None),
        (
            "frontend",
            TlsConfig(),
            {"host": "::"},
            ["frontend.host = ::", "frontend.api_keys_file", "tls.certificate"],
        ),
        (
            "frontend",
            TlsConfig(),
            {"admin_host": "0.0.0.0"},
            ["admin_host = 0.0.0.0", "frontend.api_keys_file"],
        ),
        ("frontend", TlsConfig(), {"host": "::", "api_keys_file": "f"}, ["tls.certificate"]),
        ("frontend", SERVES_TLS, {"host": "::", "api_keys_file": "f"}, None),
        ("frontend", SERVES_TLS, {"host": "::"}, ["frontend.api_keys_file or tls.client_ca"]),
    ],
)
def test_a_port_that_others_reach_warns_once(section, tls, options, advice, caplog):
    service_main._warn_if_open(exposed(section, tls, **options))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if advice is None else 1)
    for words in advice or ():
        assert words in lines[0]
    if advice and "frontend.api_keys_file" not in " ".join(advice):
        assert "api_keys_file" not in lines[0]
