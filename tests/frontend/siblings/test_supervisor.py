"""The parts of the supervisor that need no processes; those that do are in tests/e2e/test_sibling_frontends.py."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from triptych.config import EngineConfig, FrontendConfig
from triptych.errors import ConfigError
from triptych_services.frontend.http.listener import listen
from triptych_services.frontend.siblings import supervisor
from triptych_services.frontend.siblings.supervisor import SharedPorts, num_processes, share_of

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


def test_processes_go_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, count in ((1, 1), (15, 1), (16, 2), (64, 8)):
        monkeypatch.setattr(supervisor, "_usable_cores", lambda cores=cores: cores)
        assert num_processes(FrontendConfig(processes=0)) == count
        assert num_processes(FrontendConfig(processes=3)) == 3
