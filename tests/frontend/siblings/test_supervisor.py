"""The parts of the supervisor that need no processes; those that do are in tests/e2e/test_sibling_frontends.py."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from triptych.config import EngineConfig, FrontendConfig
from triptych.errors import ConfigError
from triptych_services.frontend.http.listener import listen
from triptych_services.frontend.siblings import supervisor
from triptych_services.frontend.siblings.link import Link, LinkClosed
from triptych_services.frontend.siblings.supervisor import Processes, SharedPorts, num_processes, share_of

FREE = FrontendConfig(port=0, admin_port=0, metrics_port=0, http_port=0)


def test_ports_are_held_but_take_no_connections() -> None:
    ports = SharedPorts(FREE)
    assert sorted(ports.numbers) == ["admin_port", "http_port", "metrics_port", "port"]
    config = ports.fill(FREE)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", config.http_port))
        with listen("127.0.0.1", config.http_port, "frontend.http_port", shares_port=True) as sibling:
            with pytest.raises(ConfigError, match=r"frontend\.http_port: cannot bind"):
                listen("127.0.0.1", config.http_port, "frontend.http_port")  # a foreign server
            with socket.create_connection(("127.0.0.1", config.http_port)):
                sibling.setblocking(True)
                sibling.accept()[0].close()
    finally:
        ports.close()


@pytest.mark.parametrize("shares_port", [False, True])
def test_a_foreign_server_is_refused_by_name(shares_port: bool) -> None:
    with listen("127.0.0.1", 0, "x", shares_port=shares_port) as foreign:
        port = foreign.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"frontend\.port: cannot bind 127\.0\.0\.1:{port}"):
            SharedPorts(replace(FREE, port=port))


def test_bounds_of_a_frontend_are_divided() -> None:
    frontend = FrontendConfig(max_connections=10, max_grpc_connections=9, max_unsent_bytes=40 << 20)
    shared = share_of(EngineConfig(frontend=frontend), 4).frontend
    assert (shared.max_connections, shared.max_grpc_connections, shared.max_unsent_bytes) == (3, 3, 16 << 20)
    assert shared.max_connections_per_address == 0, "its default goes by the connections"
    assert shared.max_messages_per_s == frontend.max_messages_per_s, "it bounds a core"


def test_processes_go_by_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, count in ((1, 1), (15, 1), (16, 2), (64, 8)):
        monkeypatch.setattr(supervisor, "usable_cpus", lambda cpus=cpus: cpus)
        assert num_processes(FrontendConfig(processes=0)) == count
        assert num_processes(FrontendConfig(processes=3)) == 3


@dataclass
class FakeProcess:
    was_killed: bool = False

    def kill(self) -> None:
        self.was_killed = True


class ScriptedLink:
    """The link to a process that answers so many pings and no more, or is gone then."""

    def __init__(self, num_answers: int, *, closes: bool) -> None:
        self.num_left = num_answers
        self._closes = closes

    async def ask(self, method: str) -> None:
        assert method == "ping"
        if self.num_left == 0 and not self._closes:
            await asyncio.Event().wait()
        if self.num_left == 0:
            raise LinkClosed
        self.num_left -= 1


@pytest.mark.parametrize("closes", [False, True])
async def test_a_process_that_answers_no_more_is_killed(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ALIVE_EVERY_S", 0.0)
    monkeypatch.setattr(supervisor, "_HUNG_S", 0.2)
    group, process, link = Processes(EngineConfig(), 1), FakeProcess(), ScriptedLink(3, closes=closes)
    group._hub.create_link(0)
    watching = asyncio.create_task(group._watch(0, cast(Link, link), cast(Any, process)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert link.num_left == 3, "it imports, and is not asked yet"
    group._hub.members[0].has_joined = True
    async with asyncio.timeout(60):
        await watching
    assert link.num_left == 0
    assert process.was_killed is not closes
