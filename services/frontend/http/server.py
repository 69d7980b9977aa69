"""The HTTP server: binds its own socket, runs uvicorn as an owned task, and reports its death."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from fastapi import FastAPI

from triptych.rpc.tls import ServerTls
from triptych_services.frontend.http.connections import (
    GOODBYE_S,
    BoundedConnection,
    ConnectionLimits,
    Connections,
)
from triptych_services.frontend.http.listener import BACKLOG, listen

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # longer than clients and proxies keep an idle connection, so that they close it, not we
_DATE_S = 1.0  # the date in the headers of answers is as old at most
_DRAIN_POLL_S = 0.01


class HttpServer:
    """Owned by the frontend's app: `start`, `wait_stopped` while it serves, `stop` at the end."""

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        *,
        option: str = "frontend.http_port",
        limits: ConnectionLimits | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """
        Args:
            app: Has the requests that run in `state.in_flight`.
            port: 0: any free one.
            option: The option that the port comes from, for errors.
            tls: None: plain HTTP.
        """
        limits = limits or ConnectionLimits()
        self._app = app
        self._host = host
        self._port = port
        self._option = option
        config = uvicorn.Config(
            self._app,
            http=cast(
                type[asyncio.Protocol],
                functools.partial(BoundedConnection, limits=limits, connections=Connections(limits), tls=tls),
            ),
            ws="none",
            loop="none",  # it runs on the loop that is there
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        config.ssl = None if tls is None else tls.http_context()
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket | None = None) -> int:
        """Bind, serve, and return the port.

        Args:
            listener: As of `listen`; None: the address is bound now.

        Raises:
            ConfigError: the port is taken or the address is not ours; names it.
        """
        listener = listener or listen(self._host, self._port, self._option)
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
        self._server.end()
        if not await self._has_ended_within(grace_s):
            if num_ended := self._app.state.in_flight.end_all():
                log.warning("ended %d HTTP requests that still ran after %g s", num_ended, grace_s)
            if not await self._has_ended_within(GOODBYE_S):
                self._server.drop_connections()  # clients that do not read
        await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.error("the HTTP server failed while stopping", exc_info=error)

    async def _has_ended_within(self, timeout_s: float) -> bool:
        assert self._task is not None
        done, _ = await asyncio.wait((self._task,), timeout=timeout_s)
        return bool(done)


class _Server(uvicorn.Server):
    """Uvicorn's server, which leaves signals to the app, reports when it is up and ends at once when it is told to.

    Uvicorn's own looks ten times a second whether it shall end, and then again whether all has ended.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()
        self._shall_end = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set()

    def end(self) -> None:
        """Take no more connections, and return from `serve` when the last answer has ended."""
        self.should_exit = True
        self._shall_end.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # which writes the date into the headers of answers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._shall_end.wait(), _DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(_DRAIN_POLL_S)
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drop_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
