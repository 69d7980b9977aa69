"""The ground of real processes with a cutting proxy on every link between them: all faults can be inflicted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

from tests.chaos.grounds.processes import DEADLINE_S, ProcessGround
from tests.chaos.http_door import generate_over_http
from tests.chaos.load import KINDS
from tests.chaos.recorder import Request
from tests.chaos.resuming_http import post_to, resume_over_http
from tests.chaos.scenario import Scenario, play
from tests.chaos.validators import Home, Step, violations_of
from tests.helpers.cut_proxy import CutProxy
from tests.helpers.processes import free_port
from triptych import failpoints
from triptych.client.grpc_client import GenerationClient
from triptych.errors import EngineUnavailable
from triptych.types.events import Event

_OPTIONS = {"worker": ("--simulation.base-ms=10",), "frontend": ("--frontend.drain-s=0.3",)}


class ClusterGround(ProcessGround):
    """Some frontends, engine cores and workers, as processes."""

    vocabulary = range(1000, 9000)
    max_tokens = 120
    kinds = (*KINDS, "logprobs")
    load_s = 2.0
    rest_s = 1.0
    is_exact_time = False

    def __init__(
        self,
        directory: Path,
        stack: AsyncExitStack,
        *,
        num_engines: int,
        num_frontends: int,
        has_transfers: bool = False,
    ) -> None:
        """
        Args:
            has_transfers: Whether the first engine computes prompts for the others.
            stack: Closes what the ground opens.
        """
        super().__init__(directory, num_engines=num_engines, num_frontends=num_frontends, options=_OPTIONS)
        if has_transfers:
            for member in self.members.values():
                role = "decode" if member.index else "prefill"
                more = {
                    "worker": ("--worker.kv-transfer=true", "--worker.kv-transfer-port=0"),
                    "enginecore": (f"--engine.role={role}",),
                }
                member.flags = (*member.flags, *more.get(member.kind, ()))
        self.steps: list[Step] = []
        self._stack = stack
        self._killed: set[str] = set()
        self._proxies: dict[tuple[str, str], CutProxy] = {}
        self._clients: list[GenerationClient] = []

    async def start_all(self) -> None:
        """Put the proxies between, start all processes and wait until they serve."""
        for member in self.members.values():
            dialed = {"enginecore": f"worker-{member.index}"}.get(member.kind)
            servers = [dialed] if dialed else []
            if member.kind == "frontend":
                servers = [engine.name for engine in self.of_kind("enginecore")]
                frontends = self.of_kind("frontend")
                order = (*frontends[member.index :], *frontends[: member.index])
                client = GenerationClient(",".join(frontend.address for frontend in order))
                self._clients.append(await self._stack.enter_async_context(client))
            for server in servers:
                proxy = await self._stack.enter_async_context(CutProxy(self.members[server].address))
                self._proxies[member.name, server] = proxy
            if servers:
                addresses = ",".join(self._proxies[member.name, server].address for server in servers)
                option = (
                    "--frontend.engine-addresses" if member.kind == "frontend" else "--engine.worker-address"
                )
                member.flags = (*member.flags, f"{option}={addresses}")
        for name in self.members:
            await self.start(name)
        await self.wait_all_ready()

    async def start(self, name: str) -> None:
        """Start a process that is not there."""
        process = self.members[name].process
        if process is not None and name in self._killed:  # its end may not be known here yet
            await process.wait()
            self._killed.discard(name)
        if process is None or process.returncode is not None:
            await super().start(name)

    def kill(self, name: str) -> None:
        process = self.members[name].process
        if process is not None and process.returncode is None:
            process.kill()
            self._killed.add(name)

    async def kill_at(self, name: str, place: str, within_s: float) -> None:
        """Kill a process, start it with a failpoint, and return when that has killed it, or after so many seconds."""
        self.kill(name)
        await self.wait_ended(name)
        member = self.members[name]
        member.env = {failpoints.ENV: f"{place}:kill@20"}
        await self.start(name)
        member.env = {}
        assert member.process is not None
        try:
            async with asyncio.timeout(max(within_s, 5.0)):
                await member.process.wait()
        except TimeoutError:
            self.kill(name)
            await member.process.wait()

    async def term(self, name: str, drain_s: float = 0.0) -> None:
        """Let a process drain and end. All frontends drain for less than answers take, whatever a scenario says."""
        process = self.members[name].process
        if process is None or process.returncode is not None:
            return
        await self.wait_listening(name)
        with suppress(ProcessLookupError):
            process.terminate()
        await self.wait_ended(name)

    def stop(self, name: str) -> None:
        """Send SIGSTOP."""
        self.signal(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Send SIGCONT."""
        self.signal(name, signal.SIGCONT)

    async def usurp(self, name: str) -> Callable[[], None]:
        """Stop a process and start another one at its place. Return what lets the first go on."""
        self.stop(name)
        member = self.members[name]
        first, old_port, member.port = member.process, member.port, free_port()
        assert first is not None
        member.flags = tuple(flag.replace(f"port={old_port}", f"port={member.port}") for flag in member.flags)
        member.process = None
        self._stack.callback(lambda: first.returncode is None and first.kill())
        for (client, server), proxy in self._proxies.items():
            if server == name:
                proxy.server_address = member.address
            if name in (client, server):
                proxy.cut()
        await self.start(name)
        return lambda: first.send_signal(signal.SIGCONT)

    def cut(self, client: str, server: str, *, is_server_told: bool) -> None:
        self._proxies[client, server].cut(is_server_told=is_server_told)

    def hold(self, client: str, server: str, *ways: str) -> None:
        self._proxies[client, server].hold(*ways)

    def heal(self, client: str, server: str) -> None:
        self._proxies[client, server].release()

    async def generate(self, request: Request, attempt: int) -> AsyncGenerator[Event, None]:
        """Have a frontend answer a request: each attempt another one."""
        number = hash(request.prompt) + attempt
        frontend = self.of_kind("frontend")[number % len(self._clients)]
        if number // 2 % 2:
            client = self._clients[frontend.index]
            events = client.generate(list(request.prompt), request.sampling, timeout_s=request.timeout_s)
        elif not request.must_finish:
            events = generate_over_http(f"127.0.0.1:{frontend.http_port}", request)  # type: ignore[assignment]
        else:
            twice = request.name.startswith("choices")
            events = resume_over_http(  # type: ignore[assignment]
                self._post, len(self._clients), frontend.index, request, attaches_twice=twice
            )
        async with aclosing(events) as stream:
            async for event in stream:
                yield event

    def _post(
        self, number: int, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        return post_to(f"127.0.0.1:{self.of_kind('frontend')[number].http_port}", headers, body)

    async def wait_all_ready(self) -> None:
        """Return when every frontend takes requests and every engine core has its worker."""
        for member in self.of_kind("frontend"):
            await self.wait_ready(member.name)
        async with asyncio.timeout(DEADLINE_S):
            while not await self._are_engines_ready():
                await asyncio.sleep(0.05)

    async def homes(self) -> list[Home]:
        """Return what each engine core holds."""
        homes = []
        for member in self.of_kind("enginecore"):
            status = await self.status(member.name)
            names = ("num_running", "num_waiting", "num_used_blocks")
            homes.append(Home(member.name, {name: getattr(status, name) for name in names}))
        return homes

    async def _are_engines_ready(self) -> bool:
        try:
            return all([(await self.status(member.name)).ready for member in self.of_kind("enginecore")])
        except EngineUnavailable:
            return False


class LongAnswersGround(ClusterGround):
    """The same where all clients stay for answers of 2 to 8 s, so that these see all that breaks."""

    max_tokens = 800
    kinds = tuple(kind for kind in ClusterGround.kinds if kind not in ("leaving", "deadline"))
    load_s = 0.2


async def play_in_cluster(
    scenario: Scenario, directory: Path, ground_type: type[ClusterGround] = ClusterGround
) -> list[str]:
    """Play a scenario with real processes and return what is wrong with what was seen."""
    async with AsyncExitStack() as stack:
        ground = ground_type(
            directory,
            stack,
            num_engines=scenario.num_engines,
            num_frontends=scenario.num_frontends,
            has_transfers=scenario.has_transfers,
        )
        stack.push_async_callback(ground.end_all)
        try:
            found = violations_of(await play(ground, scenario))
        except Exception as error:
            error.add_note("\n".join(ground.log_of(name) for name in ground.members))
            raise
        if found:
            found += [f"{name}:\n{ground.log_of(name)}" for name in ground.members]
        return found
