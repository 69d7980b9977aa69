"""A service's process, from its command line to its exit code; the same for all three services.

arguments ─► create, bind ─► start ─► ready file ─► serving ── SIGTERM ──► drain ─► stop ─► exit code 0
                                                       └── a background task dies ─► stop ─► its exit code
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from triptych import failpoints
from triptych.config import EngineConfig
from triptych.config.loader import ServiceArguments, parse_service_arguments
from triptych.errors import ConfigError
from triptych.observe import logging as observe_logging
from triptych.observe.logging import with_fields
from triptych.observe.metrics import LoopLag
from triptych.observe.metrics.process import process_metrics
from triptych.observe.metrics_server import MetricsServer, Pages
from triptych.rpc.open_files import raise_file_limit
from triptych.rpc.server import RpcServer, is_loopback, stop_event, write_ready_file
from triptych.rpc.time_slice import SERVICE_NS, set_time_slice
from triptych.rpc.tls import create_server_tls
from triptych.types.exit_codes import ExitCode

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""Seconds for the last messages to be sent. Calls that watch something are cut off then."""


class ServiceApp(ABC):
    """One service's process: what it serves, what runs in the background, and how it drains."""

    section: ClassVar[str]
    """The section of the config that has its host, port and metrics_port; also its name in the log."""
    exit_codes: ClassVar[Sequence[tuple[type[Exception], ExitCode]]] = ()
    """Errors that end a background task, and their exit codes; the first that fits. All others: FAILED."""
    server: RpcServer
    """Set by the subclass, which adds its servicers."""
    logs_each_request: ClassVar[bool] = False
    """Whether the service logs enough lines to write them together."""
    keys_option: ClassVar[str] = ""
    """The option that makes the service ask for API keys. Empty: it has none, and only mTLS keeps callers out."""

    def __init__(self, config: EngineConfig) -> None:
        """Wire up the service, bound to nothing yet. Called on the event loop.

        Raises:
            ConfigError: Certificates cannot be used; names the file and what is wrong with it.
        """
        self.config = config
        self.server_tls = create_server_tls(config.tls)
        """The certificates of the service's servers. None: they serve in plain text."""
        self.background: dict[str, asyncio.Future[Any]] = {}
        """Name -> what runs as long as the process. One that ends before that has died."""
        self.shares_ports = False
        """Whether other processes of the service are bound to its ports."""
        self.pages: Pages = {}
        """Paths that the metrics port serves beside metrics and probes."""

    @classmethod
    def for_config(cls, config: EngineConfig) -> type[ServiceApp]:
        """Return the app that this config asks for: itself, where a service has but one."""
        return cls

    @classmethod
    def log_name(cls, config: EngineConfig) -> str:
        """Return the service's name in its log."""
        return cls.section

    async def prepare(self) -> None:  # noqa: B027 # most have nothing to do
        """Do what comes before the ports are bound."""

    async def find_metrics(self) -> Collector:
        """Return what collects the metrics of the service."""
        return REGISTRY

    @abstractmethod
    async def start(self) -> Mapping[str, int]:
        """Start to serve and fill `background`. Return further ports by name, for the ready file."""

    @abstractmethod
    async def drain(self) -> None:
        """Leave the load balancer, and let what is alive finish for as long as the config says."""

    async def stop(self) -> None:
        """End what is left."""
        await self.server.stop(STOP_GRACE_S)

    def start_background(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as long as the process."""
        self.background[name] = asyncio.create_task(work, name=name)


def main(service: str, description: str | None, create: type[ServiceApp]) -> NoReturn:
    """Run a service from `sys.argv` to the end of the process. `service`: its name under `triptych_services`."""
    run_service(parse_service_arguments(service, description or "", sys.argv[1:]), service, create)


def run_service(arguments: ServiceArguments, service: str, create: type[ServiceApp]) -> NoReturn:
    """Run a service with arguments that have been read, as `main` does."""
    import uvloop  # of the services' images only

    set_time_slice(SERVICE_NS)
    try:
        code = uvloop.run(run(arguments, create.for_config(arguments.config)))
    except ConfigError as error:
        print(f"triptych_services.{service}: {error}", file=sys.stderr)
        code = ExitCode.MISCONFIGURED
    logging.shutdown()  # lines may wait to be written; stderr itself keeps none
    sys.stdout.flush()
    os._exit(code)  # a thread that still loads something must not keep a stopped process alive


async def run(arguments: ServiceArguments, create: type[ServiceApp]) -> int:
    """Serve until SIGTERM, or until a background task dies. Return the exit code.

    Raises:
        ConfigError: A port is taken, or an address cannot be used; names it.
    """
    config = arguments.config
    observe_logging.configure(config.log, create.log_name(config), is_batched=create.logs_each_request)
    if failpoints.ARMED:
        log.warning("%s is set: this process will fail on purpose", failpoints.ENV)
    raise_file_limit()
    stop = stop_event()
    app = create(config)
    tls = app.server_tls
    expires_at = None if tls is None else lambda: tls.expires_at_unix_s
    with process_metrics(app.log_name(config), expires_at):
        return await _serve(app, arguments, stop)


async def _serve(app: ServiceApp, arguments: ServiceArguments, stop: asyncio.Event) -> int:
    """Serve and stop as `run` does. Return the exit code."""
    config = app.config
    section = getattr(config, app.section)
    metrics = MetricsServer(
        is_live=lambda: not app.server.is_dead,
        is_ready=lambda: app.server.is_ready,
        find_metrics=app.find_metrics,
        pages=app.pages,
    )
    await app.prepare()
    ports = {
        "port": app.server.bind(section.host, section.port, option=f"{app.section}.port"),
        "metrics_port": metrics.bind(
            section.metrics_host,
            section.metrics_port,
            option=f"{app.section}.metrics_port",
            shares_port=app.shares_ports,
        ),
    }
    _warn_if_open(app)
    await metrics.start()
    await app.server.start()
    ports |= await app.start()
    app.start_background("measure the loop's lag", _loop_lag().run())
    write_ready_file(arguments.ready_file, ports)
    log.info("listening on %s", section.host, extra=with_fields(**ports))
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((stopping, *app.background.values()), return_when=asyncio.FIRST_COMPLETED)
    code = ExitCode.OK
    if not (dead := _ended(app)):
        await app.drain()
        dead = [name for name in _ended(app) if app.background[name].exception() is not None]
    if dead:
        code = _report(app, dead[0])
        await app.server.set_dead()
    await app.stop()
    await metrics.stop()
    tasks = (stopping, *app.background.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if code == ExitCode.OK:  # else the last line says why
        log.info("stopped")
    return code


@functools.cache
def _loop_lag() -> LoopLag:
    """Return the one of the process: a metric is registered once."""
    return LoopLag()


def _warn_if_open(app: ServiceApp) -> None:
    """Log once which options an operator should set if other machines can reach the ports."""
    config = app.config
    hosts = {
        f"{app.section}.{option}": getattr(getattr(config, app.section), option, "")
        for option in ("host", "admin_host")
    }
    reachable = [f"{option} = {host}" for option, host in hosts.items() if host and not is_loopback(host)]
    if not reachable:
        return
    has_keys = app.keys_option and getattr(getattr(config, app.section), app.keys_option)
    advice = []
    if not has_keys and not config.tls.client_ca:
        options = f"{app.section}.{app.keys_option} or tls.client_ca" if app.keys_option else "tls.client_ca"
        advice.append(f"anyone who reaches the port may use it: set {options}")
    if not config.tls.certificate:
        advice.append("all is sent in plain text: set tls.certificate and tls.key")
    if advice:
        log.warning("%s is not loopback; %s", ", ".join(reachable), "; ".join(advice))


def _ended(app: ServiceApp) -> Sequence[str]:
    return [name for name, task in app.background.items() if task.done()]


def _report(app: ServiceApp, name: str) -> ExitCode:
    error = app.background[name].exception()
    for kind, code in app.exit_codes:
        if isinstance(error, kind):
            log.error("%s: %s", _CODE_TO_WORDS.get(code, "cannot serve"), error)
            return code
    log.error("%s died: %r", name, error, exc_info=error)
    return ExitCode.FAILED


_CODE_TO_WORDS = {ExitCode.FENCED: "fenced", ExitCode.HUNG: "hung"}
