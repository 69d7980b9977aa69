"""HTTP without a network: requests to the app of a process, whose answers break off when the process dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI

from tests.chaos.grounds.fake_time import Process
from tests.chaos.resuming_http import BrokenOff, Refused
from triptych_services.frontend.http.connections import CUT

LATENCY_S = 0.0005
PATH = "/v1/completions"


async def post(
    process: Process, app: FastAPI, headers: Mapping[str, str], body: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    """Yield the lines of an answer.

    Raises:
        BrokenOff: There is no process, it has died, or it has cut the connection.
        Refused: The answer is no stream.
    """
    if process.is_dead:
        raise BrokenOff
    await asyncio.sleep(LATENCY_S)
    connection = _Connection(json.dumps(body).encode())
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "client": ("client", 1),
        "server": ("server", 1), "state": {}, "extensions": {CUT: {"cut": connection.close}},
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(connection.body)).encode()),
            *((name.lower().encode(), value.encode()) for name, value in headers.items()),
        ],
    }  # fmt: skip
    with process.running():
        answering = asyncio.create_task(app(scope, connection.receive, connection.send))  # type: ignore[arg-type]
    answering.add_done_callback(lambda _: connection.close())
    try:
        async for line in connection.lines():
            yield line
    finally:
        connection.close()  # the app sees its client leave


class _Connection:
    """One request and its answer."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._is_asked = True
        self._messages: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        """Messages of the app that are not read yet. None: nothing follows."""
        self._closed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._is_asked:
            self._is_asked = False
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        if not self._closed.is_set():
            self._messages.put_nowait(message)
        await asyncio.sleep(0)

    def close(self) -> None:
        self._closed.set()
        self._messages.put_nowait(None)

    async def lines(self) -> AsyncIterator[str]:
        status, text = 0, ""
        while (message := await self._messages.get()) is not None:
            status = message.get("status", status)
            text += message.get("body", b"").decode()
            if status == 200:
                *lines, text = text.split("\n")
                for line in lines:
                    yield line
            if message["type"] == "http.response.body" and not message.get("more_body"):
                if status != 200:
                    raise Refused(status, text)
                return
        raise BrokenOff
