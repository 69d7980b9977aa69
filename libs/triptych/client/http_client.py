"""An HTTP client of one server, over aiohttp; its failures are this package's typed errors."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from triptych.config import TlsConfig
from triptych.errors import ConfigError, EngineUnavailable, FeatureDisabled, GenerationLost, ProtocolViolation
from triptych.rpc.channel import API_KEY_ENV
from triptych.rpc.tls import PUBLIC_CAS

if TYPE_CHECKING:
    import aiohttp

_CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 256 << 20
"""The longest answer that `post` takes, and the longest line of an event."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class HttpClient:
    """Connections to one server, for use on one event loop, as an async context manager.

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
            FeatureDisabled: aiohttp is not installed.
        """
        try:
            import aiohttp  # noqa: F401
        except ModuleNotFoundError:
            raise FeatureDisabled("HTTP", "needs aiohttp; pip install 'triptych[cli]'") from None
        self.base_url = base_url
        self._url, self._ssl = _read_url(base_url, tls or TlsConfig())
        self._server_name = (tls.server_name if tls else "") or None
        self._silence_timeout_s = silence_timeout_s
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get(API_KEY_ENV, "") if api_key is None else api_key
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpClient:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl or True),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._silence_timeout_s
            ),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *unused: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Send JSON and return the whole answer, whatever its status.

        Raises:
            EngineUnavailable: No server answers.
            GenerationLost: The connection broke before the answer was complete, or was silent for too long.
            ProtocolViolation: The answer is no HTTP, or too long.
        """
        return await self._whole("POST", path, body)

    async def get(self, path: str) -> HttpAnswer:
        """Ask for something; raises as `post`."""
        return await self._whole("GET", path, b"")

    async def _whole(self, method: str, path: str, body: bytes) -> HttpAnswer:
        async with self.stream(path, body, method) as answer:
            parts, num_bytes = [], 0
            async for part in answer.pieces():
                num_bytes += len(part)
                if num_bytes > MAX_BODY_BYTES:
                    raise ProtocolViolation(f"{self.base_url} answers with more than {MAX_BODY_BYTES} bytes")
                parts.append(part)
            return HttpAnswer(answer.status, answer.headers, b"".join(parts))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, method: str = "POST") -> AsyncIterator[HttpStream]:
        """Send JSON and give the answer as it comes. Leaving the block early hangs up, which ends the request.

        Raises:
            EngineUnavailable, GenerationLost, ProtocolViolation: As `post`.
        """
        assert self._session is not None, "the client is used as a context manager"
        with self.typed_errors():
            response = await self._request(self._session, method, path, body)
        try:
            yield HttpStream(self, response)
        finally:
            if not response.content.at_eof():
                response.close()
            response.release()

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes
    ) -> aiohttp.ClientResponse:
        """Send a request; once more if its connection ends before an answer, for the server may have just closed it."""
        import aiohttp

        url, data, name = self._url + path, body or None, self._server_name
        try:
            return await session.request(method, url, data=data, server_hostname=name)
        except aiohttp.ServerDisconnectedError:
            return await session.request(method, url, data=data, server_hostname=name)

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Raise what aiohttp raises inside the block as this package's errors."""
        import aiohttp

        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            why = f"not within {_CONNECT_TIMEOUT_S:g} s"
            raise EngineUnavailable(f"no server answers at {self.base_url}: {why}") from None
        except aiohttp.ServerTimeoutError:
            raise GenerationLost(f"{self.base_url} was silent for {self._silence_timeout_s:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise EngineUnavailable(
                f"no server answers at {self.base_url}: {error.certificate_error}"
            ) from None
        except aiohttp.ClientConnectorError as error:
            cause = error.os_error
            reason = str(cause)
            if cause.errno and cause.errno > 0 and not isinstance(cause, ssl.SSLError):
                reason = os.strerror(cause.errno)  # without the address, which asyncio's text names again
            raise EngineUnavailable(f"no server answers at {self.base_url}: {reason}") from None
        except aiohttp.ClientResponseError as error:
            raise ProtocolViolation(f"{self.base_url} does not answer in HTTP/1.1: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise GenerationLost(f"the connection to {self.base_url} broke: {error}") from None


class HttpStream:
    """One answer as it comes."""

    def __init__(self, client: HttpClient, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        """Names in lower case."""
        self._client = client
        self._response = response

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        with self._client.typed_errors():
            async for piece in self._response.content.iter_any():
                yield piece

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


def error_text(status: int, body: bytes) -> str:
    """Return what an answer of this status says, in OpenAI's form or any other."""
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, TypeError, KeyError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


def _read_url(url: str, tls: TlsConfig) -> tuple[str, ssl.SSLContext | None]:
    """Return the URL that paths are appended to, and TLS for https."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"URL {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(f"URL {url!r}: expected http://HOST:PORT or https://HOST:PORT, perhaps with a path")
    return url.rstrip("/").removesuffix("/v1"), _create_context(tls) if parts.scheme == "https" else None


def _create_context(tls: TlsConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca if tls.ca not in ("", PUBLIC_CAS) else None)
        if tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key or None)
    except OSError as error:
        raise ConfigError(f"tls: {tls.ca or tls.certificate}: {error}") from None
    return context
