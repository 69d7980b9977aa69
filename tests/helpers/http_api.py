"""The HTTP API over a fake generator, and clients for it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import openai

from tests.helpers.fake_generator import FakeGenerator
from triptych.rpc.tls import ServerTls
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.http.app import create_app
from triptych_services.frontend.http.connections import ConnectionLimits
from triptych_services.frontend.http.guards import OnResponse
from triptych_services.frontend.http.server import HttpServer

DEADLINE_S = 120.0  # of an answer, for which a process of low priority may have to start
TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients without TLS: by default each spends 30 ms on reading certificates that all the world trusts."""


@dataclass(frozen=True)
class HttpApi:
    """A server that runs."""

    generator: FakeGenerator
    """Meaningless over another generator."""
    server: HttpServer
    port: int
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    dialled: list[asyncio.StreamWriter] = field(default_factory=list)

    def sync_client(self) -> openai.OpenAI:
        """For use on another thread."""
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=TRUSTS_NOBODY),
        )

    async def post(self, path: str, body: str | bytes, **headers: str) -> httpx.Response:
        """A body as it stands."""
        return await self.http.post(
            path, content=body, headers={"Content-Type": "application/json", **headers}
        )

    async def connect(
        self, path: str, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a bare connection, to leave it as no client would."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        return await self.dial(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)

    async def dial(
        self, data: bytes, *, source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send bytes on a bare connection, which stays open until the server is stopped."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        self.dialled.append(writer)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the generator tells by `changed`."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.generator.changed.clear()
                await self.generator.changed.wait()


@asynccontextmanager
async def open_api(
    generator: Generator | None = None,
    *,
    limits: ConnectionLimits | None = None,
    keys: ApiKeys | None = None,
    tls: ServerTls | None = None,
    cors_origins: Sequence[str] = (),
    refuses_unknown: bool = True,
    ping_interval_s: float = 15.0,
    on_response: OnResponse = lambda route, status: None,
) -> AsyncIterator[HttpApi]:
    """Over a new fake generator, or over the given one, of any kind.

    The clients know neither `keys` nor `tls`.
    """
    generator = generator or FakeGenerator()
    app = create_app(
        generator,
        keys,
        cors_origins,
        refuses_unknown=refuses_unknown,
        ping_interval_s=ping_interval_s,
        on_response=on_response,
    )
    server = HttpServer(app, "127.0.0.1", 0, limits=limits, tls=tls)
    port = await server.start()
    address = f"http://127.0.0.1:{port}"
    client = openai.AsyncOpenAI(
        base_url=f"{address}/v1",
        api_key="none",
        max_retries=0,
        timeout=DEADLINE_S,
        http_client=openai.DefaultAsyncHttpxClient(verify=TRUSTS_NOBODY),
    )
    plain = httpx.AsyncClient(base_url=address, timeout=DEADLINE_S, verify=TRUSTS_NOBODY)
    try:
        async with client, plain as http:
            api = HttpApi(cast(FakeGenerator, generator), server, port, client, http)
            try:
                yield api
            finally:
                for writer in api.dialled:
                    writer.transport.abort()  # what it could not send yet too
    finally:
        await server.stop(0)


def schema_of_answer(
    document: dict[str, Any], path: str, *, status: int = 200, is_streamed: bool = False
) -> dict[str, Any]:
    """Return the schema that /openapi.json has for an answer to a POST, or for each event of a stream but the last."""
    content = document["paths"][path]["post"]["responses"][str(status)]["content"]
    schema: dict[str, Any] = content["text/event-stream" if is_streamed else "application/json"]["schema"]
    if is_streamed:
        schema = schema["properties"]["data"]["anyOf"][0]["contentSchema"]
    return schema | {"components": document["components"]}
