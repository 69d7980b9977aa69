"""The ground of real processes: tiers of any build, to be killed, stopped and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.processes import free_port
from triptych.client.admin_client import AdminClient
from triptych.client.grpc_client import GenerationClient
from triptych.types.facts import EngineStatus

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120.0


@dataclass
class Member:
    """One process of the ground. It keeps its ports when it is started again."""

    kind: str
    """worker, enginecore or frontend."""
    index: int
    flags: tuple[str, ...]
    port: int
    build: Path = ROOT
    process: asyncio.subprocess.Process | None = None
    log: Path = field(default_factory=Path)
    http_port: int = 0
    """Port of a frontend's HTTP server."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for the next time that it is started."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class ProcessGround:
    """Some workers, an engine core for each, and frontends that know all engine cores."""

    def __init__(
        self,
        directory: Path,
        *,
        num_engines: int,
        num_frontends: int,
        options: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`options`: more flags, by kind or by name."""
        self.members: dict[str, Member] = {}
        self._options = options or {}
        for index in range(num_engines):
            self._add("worker", index, directory, "--simulation.enabled=true")
        for index in range(num_engines):
            worker = self.members[f"worker-{index}"]
            flags = (f"--engine.worker-address={worker.address}", f"--engine.engine-id=engine-{index}")
            self._add("enginecore", index, directory, *flags)
        engines = ",".join(self.members[f"enginecore-{index}"].address for index in range(num_engines))
        for index in range(num_frontends):
            http_port = free_port()
            addresses = f"--frontend.engine-addresses={engines}"
            ports = ("--frontend.admin-port=0", f"--frontend.http-port={http_port}")
            self._add("frontend", index, directory, addresses, *ports)
            self.members[f"frontend-{index}"].http_port = http_port

    def of_kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    def set_builds(self, build: Path = ROOT) -> None:
        """Mark all as of this build; `start` starts each."""
        for member in self.members.values():
            member.build = build

    async def start(self, name: str) -> None:
        """Start one process of its build. It binds and dials when it has time to."""
        member = self.members[name]
        with member.log.open("ab") as log:
            member.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"{_package(member.build)}.{member.kind}", *member.flags,
                cwd=member.build, env=_environment(member.build) | dict(member.env), stdout=log, stderr=log,
            )  # fmt: skip

    def signal(self, name: str, number: int) -> None:
        process = self.members[name].process
        assert process is not None, f"{name} was never started"
        process.send_signal(number)

    async def wait_ended(self, name: str) -> int:
        """Return the exit code of a process that was told to end."""
        process = self.members[name].process
        assert process is not None, f"{name} was never started"
        async with asyncio.timeout(DEADLINE_S):
            return await process.wait()

    async def replace(self, name: str, build: Path) -> None:
        """Stop a process as an operator does, and start it again from another build."""
        await self.wait_listening(name)  # before that SIGTERM ends it as it ends any process
        self.signal(name, signal.SIGTERM)
        code = await self.wait_ended(name)
        assert code == 0, f"{name} ended with {code}:\n{self.log_of(name)}"
        self.members[name].build = build
        await self.start(name)

    async def wait_listening(self, name: str) -> None:
        """Return when a process has bound its port."""
        member = self.members[name]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", member.port)
                    writer.close()
                    return
                await asyncio.sleep(0.05)

    async def wait_ready(self, name: str) -> None:
        """Return when a frontend takes requests."""
        async with GenerationClient(self.members[name].address) as client:
            await client.wait_ready(DEADLINE_S)

    async def status(self, name: str) -> EngineStatus:
        """Return what an engine core says of itself."""
        admin = AdminClient(self.members[name].address)
        try:
            ((_, status),) = await admin.status()
        finally:
            await admin.close()
        return status

    def log_of(self, name: str) -> str:
        return "\n".join(self.members[name].log.read_text(errors="replace").splitlines()[-30:])

    async def end_all(self) -> None:
        """End all, at once."""
        for member in self.members.values():
            if member.process is not None and member.process.returncode is None:
                member.process.kill()
                await member.process.wait()

    def _add(self, kind: str, index: int, directory: Path, *flags: str) -> None:
        leaf, port = "engine" if kind == "enginecore" else kind, free_port()
        own = (f"--{leaf}.port={port}", f"--{leaf}.metrics-port=0")
        more = (*self._options.get(kind, ()), *self._options.get(f"{kind}-{index}", ()))
        member = Member(kind, index, (*own, *flags, *more), port, log=directory / f"{kind}-{index}.log")
        self.members[member.name] = member


@asynccontextmanager
async def process_ground(
    directory: Path,
    *,
    build: Path = ROOT,
    num_engines: int = 1,
    num_frontends: int = 1,
    **options: tuple[str, ...],
) -> AsyncIterator[ProcessGround]:
    """Start all processes of a build, wait until they serve, and kill them at the end."""
    ground = ProcessGround(directory, num_engines=num_engines, num_frontends=num_frontends, options=options)
    ground.set_builds(build)
    try:
        for name in ground.members:
            await ground.start(name)
        for member in ground.of_kind("frontend"):
            await ground.wait_ready(member.name)
        yield ground
    finally:
        await ground.end_all()


def _package(build: Path) -> str:
    """Return the import name of the services of a build; before 0.1 it was that of their folder."""
    return "triptych_services" if (build / "libs" / "triptych_services").is_dir() else "services"


def _environment(build: Path) -> dict[str, str]:
    own = {key: text for key, text in os.environ.items() if not key.startswith("TRIPTYCH_")}
    if "TRIPTYCH_HOME" in os.environ:
        own["TRIPTYCH_HOME"] = os.environ["TRIPTYCH_HOME"]
    return own | {"PYTHONPATH": os.pathsep.join(str(build / part) for part in ("libs", "kernels", ""))}
