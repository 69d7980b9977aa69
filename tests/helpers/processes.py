"""Services as processes of their own, started by hand: to be stopped, killed and watched from outside."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

DEADLINE_S = 120.0
_numbers = itertools.count()
_random = random.SystemRandom()  # tests are seeded, and those of two processes would choose the same ports


def free_port() -> int:
    """Return a port that nothing listens on. None of those is taken from which the system chooses for connections and
    for port 0: another process would get it, by chance, before the one that it is meant for."""
    first_chosen = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = _random.randrange(first_chosen // 4, first_chosen)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"1,000 ports below {first_chosen} are taken")


class Service:
    """One running service."""

    def __init__(self, process: asyncio.subprocess.Process, ready_file: Path) -> None:
        self.process = process
        self._ready_file = ready_file

    async def port(self) -> int:
        """Once it has bound."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._ready_file.exists():
                assert self.process.returncode is None, "it has ended"
                await asyncio.sleep(0.02)
        port: int = json.loads(self._ready_file.read_text())["port"]
        return port

    async def end(self) -> tuple[int, str]:
        """Exit code and stderr, once it has ended by itself."""
        async with asyncio.timeout(DEADLINE_S):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def service_process(
    name: str, directory: Path, *flags: str, prefix: Sequence[str] = ()
) -> AsyncIterator[Service]:
    """`python -m triptych_services.NAME` with these flags, killed at the end if it still runs.

    Args:
        directory: there is, and takes its ready file.
        prefix: of the command; it must execute the rest in its own process.
    """
    ready_file = directory / f"{name}-{next(_numbers)}.json"
    leaf = "engine" if name == "enginecore" else name
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        f"triptych_services.{name}",
        f"--{leaf}.port=0",
        f"--{leaf}.metrics-port=0",
        f"--ready-file={ready_file}",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env={key: text for key, text in os.environ.items() if not key.startswith("TRIPTYCH_")}
        | {key: os.environ[key] for key in ("TRIPTYCH_HOME",) if key in os.environ},
    )
    try:
        yield Service(process, ready_file)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
