"""The plain HTTP port of each process: `/metrics` for Prometheus, `/livez` and `/readyz` for probes, pages of its own.

It is served by the event loop of the service, so an answer proves that the loop runs. It takes no TLS and no keys:
bind it where only the operator's network reaches it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from triptych.errors import ConfigError, TriptychError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Connections open at once. One more takes the place of the one that has waited the longest for its request."""
_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0  # for a request to arrive, and for its answer to be read
_BACKLOG = 32
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"


async def _metrics_of_process() -> Collector:
    return REGISTRY


Answer = tuple[int, str, bytes]
"""Status, content type and body."""
Pages = Mapping[str, Callable[[], bytes]]
"""Path -> makes its content, JSON, on another thread. Raises TriptychError if it cannot now."""


class MetricsServer:
    """Answers one request per connection. Owned by the service's process, for use on its event loop."""

    def __init__(
        self,
        *,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        find_metrics: Callable[[], Awaitable[Collector]] = _metrics_of_process,
        pages: Pages = MappingProxyType({}),
    ) -> None:
        """
        Args:
            is_live: Whether the process can do its work at all; asked for `/livez`.
            is_ready: Whether it takes requests now; asked for `/readyz`.
            find_metrics: Returns what collects the metrics, on another thread. Raises TriptychError if it cannot now.
            pages: What else the process serves.
        """
        self._is_live = is_live
        self._is_ready = is_ready
        self._find_metrics = find_metrics
        self._pages = pages
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], bool] = {}
        """Task of a connection -> whether it still waits for its request; in the order of their arrival."""

    def bind(self, host: str, port: int, *, option: str, shares_port: bool = False) -> int:
        """Bind and return the port. Connections wait until `start`.

        Args:
            port: 0 for any free one.
            option: The config key of the port, for the error.
            shares_port: Several processes are bound to the port (SO_REUSEPORT).

        Raises:
            ConfigError: The port is taken, or the address is not ours; names it.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(
                address[:2], family=family, backlog=_BACKLOG, reuse_port=shares_port
            )
        except OSError as error:
            raise ConfigError(f"{option}: cannot bind {host}:{port} ({error.strerror or error})") from None
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Serve what has connected since `bind`, and what comes."""
        assert self._socket is not None, "bind comes first"
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=_MAX_HEAD_BYTES)

    async def stop(self) -> None:
        """Close the port and the connections."""
        if self._server is not None:
            self._server.close()
        for task in (tasks := list(self._open)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server makes one for each connection"
        self._make_room()
        self._open[task] = True
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            self._open[task] = False
            answer = await self._answer(head)
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(_to_bytes(answer, has_body=not head.startswith(b"HEAD ")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a connection to the metrics port ended: %r", error)
        except (
            asyncio.CancelledError
        ):  # another one has its place, or the server stops: nothing is left to do
            log.debug("a connection to the metrics port was closed")
        finally:
            del self._open[task]
            with suppress(OSError):
                writer.close()

    def _make_room(self) -> None:
        if len(self._open) < MAX_CONNECTIONS:
            return
        waiting = (task for task, waits in self._open.items() if waits and not task.cancelling())
        (oldest := next(waiting, next(iter(self._open)))).cancel()
        log.debug(
            "more than %d connections to the metrics port: %s gives way", MAX_CONNECTIONS, oldest.get_name()
        )

    async def _answer(self, head: bytes) -> Answer:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, _TEXT, b"not an HTTP/1 request\n"
        if words[0] not in ("GET", "HEAD"):
            return 405, _TEXT, b"GET or HEAD only\n"
        match path := words[1].partition("?")[0]:
            case "/livez":
                return (200, _TEXT, b"live\n") if self._is_live() else (503, _TEXT, b"dead\n")
            case "/readyz":
                return (200, _TEXT, b"ready\n") if self._is_ready() else (503, _TEXT, b"not ready\n")
            case "/metrics" | "/":
                accept = next((line[7:].strip() for line in lines if line.lower().startswith("accept:")), "")
                encode, content_type = choose_encoder(accept)
                try:
                    metrics = await self._find_metrics()
                except TriptychError as error:
                    return 503, _TEXT, f"{error}\n".encode()
                # In a thread: a scrape of many series must not hold up the loop for all of it.
                return 200, content_type, await asyncio.to_thread(encode, metrics)
            case _ if path in self._pages:
                try:
                    return 200, _JSON, await asyncio.to_thread(self._pages[path])
                except TriptychError as error:
                    return 503, _TEXT, f"{error}\n".encode()
        here = ", ".join(("/metrics", *self._pages, "/livez"))
        return 404, _TEXT, f"here are {here} and /readyz\n".encode()


def _to_bytes(answer: Answer, *, has_body: bool) -> bytes:
    status, content_type, body = answer
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")
