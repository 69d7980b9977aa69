"""Several engines with a worker each behind frontends, as processes that are started again when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.harness.command import ROOT
from triptych.client.admin_client import AdminClient
from triptych.client.grpc_client import GenerationClient
from triptych.errors import ConfigError
from triptych.launcher.process import USAGE_EXIT_CODE

READY_S = 300.0
_RESTART_S = 0.1  # as LocalCluster waits after a first death
_POLL_S = 0.02


@dataclass(slots=True)
class _Member:
    module: str
    flags: tuple[str, ...]
    process: asyncio.subprocess.Process | None = None


class Fleet:
    """The processes of one stack. Use `running_fleet`."""

    def __init__(self, num_engines: int, options: Mapping[str, str], num_frontends: int = 1) -> None:
        """`options`: Of all processes, by key."""
        flags = tuple(f"--{key.replace('_', '-')}={value}" for key, value in options.items())
        worker_ports, engine_ports = _free_ports(num_engines), _free_ports(num_engines)
        self._members: dict[str, _Member] = {}
        self.engine_addresses = [f"127.0.0.1:{port}" for port in engine_ports]
        for number, (worker_port, engine_port) in enumerate(zip(worker_ports, engine_ports, strict=True)):
            of_worker = (f"--worker.port={worker_port}", "--worker.metrics-port=0")
            self._members[f"worker-{number}"] = _Member("triptych_services.worker", (*flags, *of_worker))
            of_engine = (
                f"--engine.port={engine_port}", "--engine.metrics-port=0", f"--engine.engine-id=engine-{number}",
                f"--engine.worker-address=127.0.0.1:{worker_port}",
            )  # fmt: skip
            self._members[f"engine-{number}"] = _Member("triptych_services.enginecore", (*flags, *of_engine))
        ports, http_ports = _free_ports(num_frontends), _free_ports(num_frontends)
        for number, (port, http_port) in enumerate(zip(ports, http_ports, strict=True)):
            of_frontend = (
                f"--frontend.port={port}", "--frontend.metrics-port=0", "--frontend.admin-port=0",
                f"--frontend.http-port={http_port}", f"--frontend.serve-http={str(num_frontends > 1).lower()}",
                f"--frontend.engine-addresses={','.join(self.engine_addresses)}",
            )  # fmt: skip
            self._members[f"frontend-{number}"] = _Member(
                "triptych_services.frontend", (*flags, *of_frontend)
            )
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        """Addresses of the frontends."""
        self.http_urls = [f"http://127.0.0.1:{port}" for port in http_ports]
        """The same over HTTP, which only several frontends serve."""
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start everything, and return when all engines serve."""
        for member in self._members.values():
            await _start(member)
            self._supervisors.append(asyncio.create_task(_supervise(member)))
        for number in range(len(self.engine_addresses)):
            await self.wait_ready(number)
        for address in self.addresses:
            await self.wait_frontend(address)

    @property
    def address(self) -> str:
        """Address of the first frontend."""
        return self.addresses[0]

    async def wait_frontend(self, address: str) -> None:
        """Return when a frontend serves."""
        async with GenerationClient(address) as client:
            await client.wait_ready(READY_S)

    async def wait_ready(self, number: int) -> None:
        """Return when an engine serves."""
        async with asyncio.timeout(READY_S):
            while not await _is_ready(self.engine_addresses[number]):
                for supervisor in self._supervisors:
                    if supervisor.done():
                        await supervisor  # raises
                await asyncio.sleep(_POLL_S)

    def kill(self, name: str) -> None:
        """Kill a process, as kill -9 does. It is started again."""
        process = self._members[name].process
        assert process is not None, "it was started"
        os.kill(process.pid, signal.SIGKILL)

    async def freeze(self, name: str, for_s: float) -> None:
        """Stop a process for a while, as SIGSTOP does: its connections stand, and it says nothing."""
        process = self._members[name].process
        assert process is not None, "it was started"
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(for_s)
        os.kill(process.pid, signal.SIGCONT)

    async def stop(self) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for member in self._members.values():
            if member.process is not None and member.process.returncode is None:
                member.process.kill()
                await member.process.wait()


@asynccontextmanager
async def running_fleet(
    num_engines: int, options: Mapping[str, str], num_frontends: int = 1
) -> AsyncIterator[Fleet]:
    """Start a fleet, and end it with the block."""
    fleet = Fleet(num_engines, options, num_frontends)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.stop()


async def _start(member: _Member) -> None:
    member.process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", member.module, *member.flags,
        cwd=ROOT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def _supervise(member: _Member) -> None:
    while True:
        assert member.process is not None, "it was started"
        if await member.process.wait() == USAGE_EXIT_CODE:
            raise ConfigError(f"{member.module} refuses {' '.join(member.flags)}")
        await asyncio.sleep(_RESTART_S)
        await _start(member)


async def _is_ready(address: str) -> bool:
    client = AdminClient(address)
    try:
        async with asyncio.timeout(1.0):
            return all(status.ready for _, status in await client.status())
    except Exception:  # it is not there, or not yet
        return False
    finally:
        await client.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
