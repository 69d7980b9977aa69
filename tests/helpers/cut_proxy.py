"""A TCP proxy that cuts: all connections at once, one after so many bytes, or one side of them alone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_CHUNK_BYTES = 1 << 16


class _Connection:
    """One client's connection and ours to the server behind."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server

    def cut(self, *, is_server_told: bool = True) -> None:
        """Reset, with no farewell; the server may be left to believe that its client is still there."""
        self.client.transport.abort()
        if is_server_told:
            self.server.transport.abort()


class CutProxy:
    """Use as an async context manager, and give `address` in place of the server's."""

    def __init__(self, server_address: str) -> None:
        self.server_address = server_address
        """host:port; a change holds for new connections."""
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._limits: dict[str, int] = {}
        self._is_open = {"up": asyncio.Event(), "down": asyncio.Event()}
        """Whether bytes pass, to the server and to the client."""
        self.release()
        self.num_cuts = 0
        """Times that a connection was cut."""
        self.num_connections = 0
        """Ever accepted."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> CutProxy:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self._drop_all(is_server_told=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def accept(self) -> None:
        """Listen; after `refuse`, on the same port as before."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Take no new connections until `accept`; those that stand go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def cut(self, *, is_server_told: bool = True) -> None:
        """Reset every connection; without `is_server_told` the server's half stays open, and silent."""
        self.num_cuts += len(self._connections)
        self._drop_all(is_server_told=is_server_told)

    def cut_after(self, *, up: int | None = None, down: int | None = None) -> None:
        """Cut the connection that has forwarded so many more bytes to the server, or to the client.

        Bytes up to there arrive, so the cut may fall into the middle of a message.
        """
        self._limits = {way: limit for way, limit in (("up", up), ("down", down)) if limit is not None}

    def hold(self, *ways: str) -> None:
        """Let no byte pass, up or down or both, until `release`; nobody is told."""
        for way in ways:
            self._is_open[way].clear()

    def release(self) -> None:
        """Let all bytes pass, first those that were held."""
        for is_open in self._is_open.values():
            is_open.set()

    def _drop_all(self, *, is_server_told: bool) -> None:
        for connection in tuple(self._connections):
            connection.cut(is_server_told=is_server_told)
        self._connections.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, _, port = self.server_address.rpartition(":")
        try:
            server_reader, server = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, server)
        self._connections.add(connection)
        for way, source, target in (("up", reader, server), ("down", server_reader, writer)):
            task = asyncio.create_task(self._forward(connection, way, source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, connection: _Connection, way: str, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(_CHUNK_BYTES):
                await self._is_open[way].wait()
                limit = self._limits.get(way)
                if limit is not None and len(data) >= limit:
                    self._limits.clear()
                    target.write(data[:limit])
                    await target.drain()
                    self.num_cuts += 1
                    target.write_eof()  # what was written arrives; nothing follows it
                    source_end = connection.client if way == "up" else connection.server
                    source_end.transport.abort()
                    break
                if limit is not None:
                    self._limits[way] = limit - len(data)
                target.write(data)
                await target.drain()
        if connection in self._connections:  # one side has gone by itself, or was cut here: so does the other
            self._connections.discard(connection)
            connection.client.close()
            connection.server.close()
