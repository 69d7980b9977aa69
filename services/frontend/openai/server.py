"""The HTTP server: binds its own socket, runs uvicorn as an owned task, and reports its death."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import functools
import logging
import socket
import termios
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.frontend.openai.errors import json_response, to_http_error
from triptych.errors import ConfigError, EngineUnavailable
from triptych.rpc.tls import ServerTls

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients and proxies keep an idle connection, so that they close it, not we
_GOODBYE_S = 1.0  # for the errors that end what outlasted its grace to reach their clients
# A host that vanished without a word is noticed after 30 + 3 * 10 s, for its request holds KV blocks.
_TCP_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class HttpServer:
    """Owned by the frontend's app: `start`, `wait_stopped` while it serves, `stop` at the end."""

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        *,
        option: str = "frontend.http_port",
        client_timeout_s: float = 60.0,
        max_connections: int = 8192,
        tls: ServerTls | None = None,
    ) -> None:
        """
        Args:
            app: Has the requests that run in `state.in_flight`.
            port: 0: any free one.
            option: The option that the port comes from, for errors.
            client_timeout_s, max_connections: See `BoundedConnection`.
            tls: None: plain HTTP.
        """
        self._app = app
        self._host = host
        self._port = port
        self._option = option
        config = uvicorn.Config(
            self._app,
            http=cast(
                type[asyncio.Protocol],
                functools.partial(
                    BoundedConnection, client_timeout_s=client_timeout_s, max_connections=max_connections
                ),
            ),
            ws="none",
            loop="none",  # it runs on the loop that is there
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        config.ssl = None if tls is None else tls.http_context()
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind, serve, and return the port.

        Raises:
            ConfigError: the port is taken or the address is not ours; names it.
        """
        listener = _listen(self._host, self._port, self._option)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self.wait_stopped()
        return port

    async def wait_stopped(self) -> None:
        """Return once `stop` has been called and all is over.

        Raises:
            RuntimeError: the server died by itself; its own error is the cause.
        """
        assert self._task is not None, "start comes first"
        await asyncio.wait((self._task,))
        if not self._server.should_exit:
            cause = None if self._task.cancelled() else self._task.exception()
            raise RuntimeError("the HTTP server has died") from cause

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, give running requests `grace_s` to end, end the rest with an error."""
        if self._task is None:
            return
        self._server.should_exit = True
        if not await self._has_ended_within(grace_s):
            if num_ended := self._app.state.in_flight.end_all():
                log.warning("ended %d HTTP requests that still ran after %g s", num_ended, grace_s)
            if not await self._has_ended_within(_GOODBYE_S):
                self._server.drop_connections()  # clients that do not read
        await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.error("the HTTP server failed while stopping", exc_info=error)

    async def _has_ended_within(self, timeout_s: float) -> bool:
        assert self._task is not None
        done, _ = await asyncio.wait((self._task,), timeout=timeout_s)
        return bool(done)


class _Server(uvicorn.Server):
    """Uvicorn's server, which leaves signals to the app and reports when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _listen(host: str, port: int, option: str) -> socket.socket:
    """A listening socket. Without SO_REUSEPORT: a second server on a port must fail, not share it."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT, not past a listener
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these
        for keepalive, value in _TCP_KEEPALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, keepalive, value)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"{option}: cannot bind {host}:{port} ({error.strerror}); another process has it, or the address "
            "is not ours"
        ) from None
    return listener


def _answer_when_full() -> bytes:
    error = EngineUnavailable("this server has as many connections as it may have; try again")
    refusal = to_http_error(error, "")
    answer = json_response(refusal.body, headers=refusal.headers)
    headers = {**answer.headers, "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {refusal.status} Service Unavailable\r\n{head}\r\n".encode() + bytes(answer.body)


_FULL = _answer_when_full()


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with two deadlines, which uvicorn does not have, and a bound on how many there are.

    A request must have arrived whole `client_timeout_s` after the connection was made or its first byte came. A
    client that reads nothing of an answer for so long is dropped; the coroutine that answers it is cancelled. A
    connection above `max_connections` is told to come back, whatever it sends.
    """

    def __init__(
        self, *arguments: Any, client_timeout_s: float, max_connections: int, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._client_timeout_s = client_timeout_s
        self._max_connections = max_connections
        self._is_refused = False
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > self._max_connections:
            self._is_refused = True
            transport.write(_FULL)
            # A close with unread bytes would be a reset, which can overtake the answer.
            self.loop.call_later(_GOODBYE_S, transport.close)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel(self._arrival)
        self._cancel(self._stall)
        super().connection_lost(error)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._cancel(self._arrival)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._stall)

    def _expect_request(self) -> None:
        self._cancel(self._arrival)
        self._arrival = self.loop.call_later(self._client_timeout_s, self._on_late_request)

    def _on_late_request(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            self._expect_request()  # it waits behind one that is being answered: the client is not late
            return
        self._drop("did not send a whole request")

    def _expect_reading(self) -> None:
        self._stall = self.loop.call_later(self._client_timeout_s, self._on_stall, self._num_unread())

    def _on_stall(self, num_unread_before: int) -> None:
        if self._num_unread() < num_unread_before:
            self._expect_reading()  # it reads slowly
        else:
            self._drop("did not read its answer")

    def _num_unread(self) -> int:
        """Bytes that wait here, and in the kernel for the client's machine to take them."""
        in_kernel = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + in_kernel[0]

    def _drop(self, what: str) -> None:
        log.warning(
            "closed the connection of %s, which %s for %g s", self.client, what, self._client_timeout_s
        )
        self.transport.abort()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
