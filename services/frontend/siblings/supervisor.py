"""Starts the processes of one frontend, starts again the one that died, and ends them together.

    supervisor ── binds each port alone, which fails if another server has it, then holds it with SO_REUSEPORT
      ├─ frontend/0 ┐
      ├─ frontend/1 ├ listen on the same ports; the kernel gives each connection to one of them
      └─ frontend/2 ┘

It serves nothing itself, so that it outlives what requests can do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import Any, NoReturn

from triptych.config import EngineConfig, FrontendConfig
from triptych.config.loader import ServiceArguments, to_flags
from triptych.errors import ConfigError
from triptych.host import usable_cpus
from triptych.launcher.process import Deaths, Exit, child_environment
from triptych.observe import logging as observe_logging
from triptych.rpc.server import stop_event, write_ready_file
from triptych.types.exit_codes import ExitCode
from triptych_services.frontend.http.listener import listen
from triptych_services.frontend.siblings.hub import Hub
from triptych_services.frontend.siblings.link import Link, LinkClosed, Place

log = logging.getLogger(__name__)

_CPUS_PER_PROCESS = 8
_STOP_MARGIN_S = 3.0  # on top of frontend.drain_s, before what is left is killed
_FAILED_GRACE_S = 2.0  # for the others to leave when one cannot be started
_ALIVE_EVERY_S = 5.0
_HUNG_S = 30.0
"""A process that has not answered for so long is killed: its share of the connections waits for it."""


def num_processes(config: FrontendConfig) -> int:
    """Return the number of processes that the config asks for, on the CPUs that this one may use."""
    return config.processes or max(1, usable_cpus() // _CPUS_PER_PROCESS)


def supervise(arguments: ServiceArguments) -> NoReturn:
    """Serve with several processes until SIGTERM. Ends this process."""
    try:
        code = asyncio.run(_run(arguments))
    except ConfigError as error:
        print(f"triptych_services.frontend: {error}", file=sys.stderr)
        code = ExitCode.MISCONFIGURED
    logging.shutdown()
    sys.exit(code)


async def _run(arguments: ServiceArguments) -> ExitCode:
    """Serve until SIGTERM, or until a process cannot be kept alive. Return the exit code.

    Raises:
        ConfigError: A port is taken, or the system cannot share ports; names it.
    """
    config = arguments.config
    observe_logging.configure(config.log, "frontend")
    if sys.platform != "linux":
        raise ConfigError(
            "frontend.processes: only Linux spreads connections over processes that share a port; set it to 1"
        )
    stop = stop_event()
    ports = SharedPorts(config.frontend)
    count = num_processes(config.frontend)
    group = Processes(share_of(replace(config, frontend=ports.fill(config.frontend)), count), count)
    try:
        return await group.run(stop, lambda: write_ready_file(arguments.ready_file, ports.numbers))
    finally:
        ports.close()


class SharedPorts:
    """The ports of all processes, held as long as the supervisor lives, so that the system gives none of them away."""

    def __init__(self, config: FrontendConfig) -> None:
        """Hold them.

        Raises:
            ConfigError: Another process has one of them; names it.
        """
        self.numbers: dict[str, Any] = {}
        """Name of an option -> its port."""
        self._held: list[socket.socket] = []
        for name, host in _used_ports(config):
            # Alone first: with SO_REUSEPORT it would share the port with another server of this user.
            with listen(host, getattr(config, name), f"frontend.{name}") as alone:
                self.numbers[name] = alone.getsockname()[1]
            self._held.append(
                listen(
                    host,
                    self.numbers[name],
                    f"frontend.{name}",
                    shares_port=True,
                    takes_connections=False,
                )
            )

    def fill(self, config: FrontendConfig) -> FrontendConfig:
        """Return the config with these ports."""
        return replace(config, **self.numbers)

    def close(self) -> None:
        for held in self._held:
            held.close()


class Processes:
    """The processes of a frontend. Owned by its supervisor. Bound to one event loop."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        """`config`: As each of them gets it."""
        self._config = config
        self._count = count
        self._hub = Hub(count, self._note_started)
        self._on_started: Callable[[], None] = lambda: None
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._environment = child_environment()
        self._is_stopping = False
        self._failed_code = ExitCode.OK

    async def run(self, stop: asyncio.Event, on_started: Callable[[], None]) -> ExitCode:
        """Keep them alive until they are to stop, or cannot be kept alive. Return the exit code of the service.

        Args:
            on_started: Called once when all serve.
        """
        self._on_started = on_started
        keeping = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, *keeping), return_when=asyncio.FIRST_COMPLETED)
        self._is_stopping = True
        await self._end_all(
            _FAILED_GRACE_S if self._failed_code else self._config.frontend.drain_s + _STOP_MARGIN_S
        )
        stopping.cancel()
        await asyncio.gather(*keeping)
        if not self._failed_code:
            log.info("stopped")
        return self._failed_code

    def _note_started(self) -> None:
        log.info("%d processes serve", self._count)
        self._on_started()

    async def _keep(self, index: int) -> None:
        """Run one process again and again. Returns when all are to stop, or why they must: `_failed_code`."""
        deaths, is_late = Deaths(), False
        while not self._is_stopping:
            end = await self._run_once(index, is_late)
            if self._is_stopping:
                return
            what = f"frontend/{index} {end}"
            if end.code == ExitCode.MISCONFIGURED:
                log.error("%s; it would say the same again, so the frontend ends", what)
                self._failed_code = ExitCode.MISCONFIGURED
                return
            backoff_s = deaths.note(time.monotonic())
            if backoff_s is None:
                log.error("%s; %s, so the frontend ends", what, deaths.why_too_many)
                self._failed_code = ExitCode.FAILED
                return
            log.warning("%s; %s", what, deaths.describe(backoff_s))
            await asyncio.sleep(backoff_s)
            is_late = self._hub.have_any_joined

    async def _run_once(self, index: int, is_late: bool) -> Exit:
        """Run one process to its end."""
        ours, theirs = socket.socketpair()
        place = Place(theirs.fileno(), index, self._count, is_late)
        link = self._hub.create_link(index)
        linked = asyncio.create_task(link.run(ours))
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "triptych.launcher.child", str(os.getpid())),
                "triptych_services.frontend.siblings",
                stdin=subprocess.PIPE,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
            )
        self._running[index] = process
        assert process.stdin is not None, "asked for"
        process.stdin.write(json.dumps([json.dumps(astuple(place)), *to_flags(self._config)]).encode())
        process.stdin.close()
        if self._is_stopping:
            process.terminate()
        watching = asyncio.create_task(self._watch(index, link, process))
        code = await process.wait()
        watching.cancel()
        self._hub.remove(index)
        del self._running[index]
        await linked
        return Exit(code)

    async def _watch(self, index: int, link: Link, process: asyncio.subprocess.Process) -> None:
        """Kill the process when its event loop does not answer any more."""
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            if not self._hub.members[index].has_joined:  # it imports
                continue
            try:
                async with asyncio.timeout(_HUNG_S):
                    await link.ask("ping")
            except TimeoutError:
                log.error("frontend/%d has not answered for %g s and is killed", index, _HUNG_S)
                process.kill()
                return
            except LinkClosed:
                return

    async def _end_all(self, grace_s: float) -> None:
        for process in self._running.values():
            process.terminate()
        until = time.monotonic() + grace_s
        while self._running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for index, process in self._running.items():
            log.warning("frontend/%d did not leave in time and is killed", index)
            process.kill()


def share_of(config: EngineConfig, count: int) -> EngineConfig:
    """Return the config of one of several processes. What bounds a whole frontend is divided."""
    frontend = config.frontend

    def share(number: int) -> int:
        return -(-number // count)

    return replace(
        config,
        frontend=replace(
            frontend,
            processes=1,
            max_connections=share(frontend.max_connections),
            max_connections_per_address=share(frontend.max_connections_per_address),
            max_grpc_connections=share(frontend.max_grpc_connections),
            max_unsent_bytes=max(share(frontend.max_unsent_bytes), 16 << 20),
        ),
    )


def _used_ports(config: FrontendConfig) -> Iterator[tuple[str, str]]:
    """Yield the option and the address of each port that is served."""
    yield "port", config.host
    yield "admin_port", config.admin_host
    yield "metrics_port", config.metrics_host
    if config.serve_http:
        yield "http_port", config.host
    if config.serve_admin_http:
        yield "admin_http_port", config.admin_host
