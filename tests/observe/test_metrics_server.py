"""The metrics port: what it answers, and who cannot keep it from others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from triptych.errors import ConfigError, EngineUnavailable
from triptych.observe import metrics_server
from triptych.observe.metrics_server import MAX_CONNECTIONS, MetricsServer

DEADLINE_S = 60.0


class Service:
    """A process whose state a test sets."""

    def __init__(self) -> None:
        self.is_live = self.is_ready = True
        registry = CollectorRegistry()
        Counter("answers", "Some.", registry=registry).inc(3)

        async def find_metrics() -> CollectorRegistry:
            if not self.can_collect:
                raise EngineUnavailable("a sibling does not answer")
            return registry

        self.can_collect = True
        self.server = MetricsServer(
            is_live=lambda: self.is_live,
            is_ready=lambda: self.is_ready,
            find_metrics=find_metrics,
            pages={"/counts": self.count},
        )
        self.port = self.server.bind("127.0.0.1", 0, option="x.metrics_port")

    def count(self) -> bytes:
        if not self.can_collect:
            raise EngineUnavailable("nothing was counted")
        return b"[1, 2]"

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}", headers=headers)


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    service = Service()
    await service.server.start()
    try:
        yield service
    finally:
        await service.server.stop()


async def test_metrics_are_served_in_both_formats() -> None:
    async with serving() as service:
        plain = await service.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        assert "answers_total 3.0" in plain.text
        opened = await service.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert opened.text.endswith("# EOF\n")


async def test_pages_of_the_process_are_served() -> None:
    async with serving() as service:
        answer = await service.get("/counts?a")
        assert (answer.headers["content-type"], answer.json()) == ("application/json", [1, 2])
        assert (await service.get("/other")).text == "here are /metrics, /counts, /livez and /readyz\n"


async def test_probes_tell_alive_from_ready() -> None:
    async with serving() as service:
        assert [(await service.get(path)).status_code for path in ("/livez", "/readyz")] == [200, 200]
        service.is_ready = False
        assert [(await service.get(path)).status_code for path in ("/livez", "/readyz")] == [200, 503]
        service.is_live = False
        assert [(await service.get(path)).status_code for path in ("/livez", "/readyz")] == [503, 503]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /other HTTP/1.1", 404), ("POST /metrics HTTP/1.1", 405), ("GET /livez SPDY", 400), ("hello", 400)],
)
async def test_other_requests_are_refused(request_line: str, status: int) -> None:
    async with serving() as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(f"{request_line}\r\n\r\n".encode())
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).startswith(f"HTTP/1.1 {status} ".encode())
        writer.close()


async def test_a_head_without_an_end_is_cut() -> None:
    async with serving() as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"x" * 100_000)
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionResetError):  # by what it had not read
                assert await reader.read() == b""
        writer.close()


async def test_idle_connections_give_way_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_TIMEOUT_S", DEADLINE_S)
    async with serving() as service:
        idle = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(3 * MAX_CONNECTIONS)]
        assert (await service.get("/livez")).status_code == 200
        async with asyncio.timeout(DEADLINE_S):
            assert await idle[0][0].read() == b"", "the first has been closed"
        for _, writer in idle:
            writer.close()


async def test_an_idle_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_TIMEOUT_S", 0.05)
    async with serving() as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = MetricsServer(is_live=lambda: True, is_ready=lambda: True)
        with pytest.raises(ConfigError, match=r"x\.metrics_port: cannot bind 127\.0\.0\.1"):
            server.bind("127.0.0.1", taken.getsockname()[1], option="x.metrics_port")


async def test_metrics_that_cannot_be_had_are_503_and_say_why() -> None:
    async with serving() as service:
        service.can_collect = False
        answer = await service.get("/metrics")
        assert (answer.status_code, answer.text) == (503, "a sibling does not answer\n")
        answer = await service.get("/counts")
        assert (answer.status_code, answer.text) == (503, "nothing was counted\n")
        assert (await service.get("/livez")).status_code == 200
