"""An asyncio client of HTTP/1.1 servers that keeps connections and costs little per piece of a streamed answer."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from triptych.config import TlsConfig
from triptych.errors import ConfigError, EngineUnavailable, FeatureDisabled, GenerationLost, ProtocolViolation
from triptych.rpc.channel import API_KEY_ENV
from triptych.rpc.tls import PUBLIC_CAS

_CONNECT_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 60.0
_MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 256 << 20
"""The longest answer that `post` takes, and the longest line of an event."""
_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class HttpClient:
    """Connections to one server, for use on one event loop. Each carries one request at a time.

    Proxies of the environment are not asked: an address is meant literally.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        silence_timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            base_url: http://host:port, perhaps with a path; a `/v1` at its end is dropped.
            api_key: The key that each request sends. None: $TRIPTYCH_API_KEY, if it is set.
            tls: Who is trusted for https, and what is shown; None: the system's CAs, and nothing.
            silence_timeout_s: The longest time between two pieces of an answer.

        Raises:
            ConfigError: The URL or a file of `tls` cannot be used; says why.
            FeatureDisabled: httptools is not installed.
        """
        try:
            import httptools
        except ModuleNotFoundError:
            raise FeatureDisabled("HTTP", "needs httptools; pip install 'triptych[cli]'") from None
        self._create_parser = httptools.HttpResponseParser
        self._parser_error = httptools.HttpParserError
        self._host, self._port, self._ssl, self._path = _split_url(base_url, tls or TlsConfig())
        self._server_name = (tls.server_name if tls else "") or None
        self.base_url = base_url
        self._silence_timeout_s = silence_timeout_s
        key = os.environ.get(API_KEY_ENV, "") if api_key is None else api_key
        self._head = (
            f"Host: {urlsplit(base_url).netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        )
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on what is idle; requests that run hang up when they end."""
        while self._idle:
            self._idle.pop().close()

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Send JSON and return the whole answer, whatever its status.

        Raises:
            EngineUnavailable: No server answers.
            GenerationLost: The connection broke before the answer was complete, or was silent for too long.
            ProtocolViolation: The answer is no HTTP, or too long.
        """
        return await self._whole("POST", path, body)

    async def _whole(self, method: str, path: str, body: bytes) -> HttpAnswer:
        async with self.stream(path, body, method) as answer:
            parts, num_bytes = [], 0
            async for part in answer.pieces():
                num_bytes += len(part)
                if num_bytes > MAX_BODY_BYTES:
                    raise ProtocolViolation(f"{self.base_url} answers with more than {MAX_BODY_BYTES} bytes")
                parts.append(part)
            return HttpAnswer(answer.status, answer.headers, b"".join(parts))

    async def get(self, path: str) -> HttpAnswer:
        """Ask for something; raises as `post`."""
        return await self._whole("GET", path, b"")

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, method: str = "POST") -> AsyncIterator[HttpStream]:
        """Send JSON and give the answer as it comes. Leaving the block early hangs up, which ends the request.

        Raises:
            EngineUnavailable, GenerationLost, ProtocolViolation: As `post`.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        stream = await self._send(request)
        try:
            yield stream
        finally:
            if stream.can_be_kept:
                self._idle.append(stream.connection)
            else:
                stream.connection.close()

    async def _send(self, request: bytes) -> HttpStream:
        """Send over a connection that is idle, or a new one if none is or the server has closed it meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request)
            except GenerationLost:
                if connection.has_answered:
                    raise
        return await self._exchange(await self._connect(), request)

    async def _exchange(self, connection: _Connection, request: bytes) -> HttpStream:
        connection.has_answered = False
        stream = HttpStream(self, connection)
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                connection.writer.write(request)
                await connection.writer.drain()
            await stream.read_head()
        except (OSError, TimeoutError) as error:
            connection.close()
            raise GenerationLost(f"{self.base_url}: the request could not be sent: {error}") from None
        except BaseException:
            connection.close()
            raise
        return stream

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    self._host,
                    self._port,
                    ssl=self._ssl,
                    server_hostname=self._server_name if self._ssl else None,
                )
        except TimeoutError:
            raise EngineUnavailable(
                f"no server answers at {self.base_url}: not within {_CONNECT_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:
            reason = str(error)
            if error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
                reason = os.strerror(error.errno)  # without the address, which asyncio's text names again
            raise EngineUnavailable(f"no server answers at {self.base_url}: {reason}") from None
        return _Connection(reader, writer)

    def create_parser(self, stream: HttpStream) -> Any:
        return self._create_parser(stream)

    async def read(self, connection: _Connection) -> bytes:
        """Return what came, nothing at the end of the connection."""
        try:
            async with asyncio.timeout(self._silence_timeout_s):
                return await connection.reader.read(_READ_BYTES)
        except TimeoutError:
            raise GenerationLost(f"{self.base_url} was silent for {self._silence_timeout_s:g} s") from None
        except OSError as error:
            raise GenerationLost(f"the connection to {self.base_url} broke: {error}") from None

    def feed(self, parser: Any, piece: bytes) -> None:
        try:
            parser.feed_data(piece)
        except self._parser_error as error:
            raise ProtocolViolation(f"{self.base_url} does not answer in HTTP/1.1: {error}") from None


@dataclass(slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    has_answered: bool = False
    """Whether the server has sent anything for the request on it."""

    def close(self) -> None:
        self.writer.close()


class HttpStream:
    """One answer as it comes. Methods that begin with `on_` are the parser's."""

    def __init__(self, client: HttpClient, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.connection = connection
        self._client = client
        self._parser = client.create_parser(self)
        self._parts: list[bytes] = []
        self._has_head = self._is_complete = self._is_kept_alive = False

    @property
    def can_be_kept(self) -> bool:
        """Whether another request may use the connection."""
        return self._is_complete and self._is_kept_alive

    async def read_head(self) -> None:
        num_bytes = 0
        while not self._has_head:
            piece = await self._client.read(self.connection)
            if not piece:
                raise GenerationLost(f"{self._client.base_url} hung up before it answered")
            self.connection.has_answered = True
            num_bytes += len(piece)
            self._client.feed(self._parser, piece)
            if not self._has_head and num_bytes > _MAX_HEAD_BYTES:
                raise ProtocolViolation(
                    f"{self._client.base_url} sends headers of more than {_MAX_HEAD_BYTES} bytes"
                )

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self._is_complete:
                return
            piece = await self._client.read(self.connection)
            if piece:
                self._client.feed(self._parser, piece)
            elif {"content-length", "transfer-encoding"} & self.headers.keys():
                raise GenerationLost(f"{self._client.base_url} hung up in mid-answer")
            else:
                return  # its end is the connection's

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_BODY_BYTES:
                raise ProtocolViolation(
                    f"{self._client.base_url} sends a line of more than {MAX_BODY_BYTES} bytes"
                )
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    def on_status(self, reason: bytes) -> None:
        """Take no notice: the code says all."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others announce another head

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_kept_alive = self._parser.should_keep_alive()
        self._is_complete = self._has_head


def error_text(status: int, body: bytes) -> str:
    """Return what an answer of this status says, in OpenAI's form or any other."""
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, TypeError, KeyError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


def _split_url(url: str, tls: TlsConfig) -> tuple[str, int, ssl.SSLContext | None, str]:
    """Return host, port, TLS and path of a URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"URL {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(f"URL {url!r}: expected http://HOST:PORT or https://HOST:PORT, perhaps with a path")
    context = _create_context(tls) if parts.scheme == "https" else None
    path = parts.path.rstrip("/").removesuffix("/v1")
    return host, port or (443 if context else 80), context, path


def _create_context(tls: TlsConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls.ca not in ("", PUBLIC_CAS) else None)
        if tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key or None)
    except OSError as error:
        raise ConfigError(f"tls: {tls.ca or tls.certificate}: {error}") from None
    return context
