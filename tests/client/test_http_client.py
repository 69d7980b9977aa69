"""The HTTP client against the frontend's own server, and against bytes that servers may send."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

from tests.helpers.certificates import Authority
from tests.helpers.http_api import open_api
from triptych.client import http_client
from triptych.client.http_client import HttpClient, error_text
from triptych.config import TlsConfig
from triptych.errors import ConfigError, EngineUnavailable, FeatureDisabled, GenerationLost, ProtocolViolation
from triptych.rpc.tls import create_server_tls

HEAD = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def server_of(*answers: bytes):
    """A server that answers the requests of all connections in turn, hanging up after each that is asked to.

    An answer that ends with b"!" is followed by the end of the connection.
    """
    left, requests = list(answers), []

    async def serve(reader, writer):
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            found = re.search(rb"content-length: ([0-9]+)", head.lower())
            length = int(found[1]) if found else 0
            requests.append((head, await reader.readexactly(length)))
            answer = left.pop(0)
            writer.write(answer.removesuffix(b"!"))
            await writer.drain()
            if answer.endswith(b"!"):
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()


async def test_answers_of_every_framing_are_read_whole():
    answers = (
        HEAD + b"Content-Length: 3\r\n\r\none",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\ntw\r\n1\r\no\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 5\r\n\r\nthree",
        HEAD + b"\r\nfour!",  # its end is the connection's
        HEAD + b"Content-Length: 0\r\n\r\n",
    )
    async with server_of(*answers) as (url, _), HttpClient(url) as client:
        bodies = [(await client.post("/x", b"{}")).body for _ in answers]
    assert bodies == [b"one", b"two", b"three", b"four", b""]


async def test_requests_carry_path_key_and_body(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "from-environment")
    answer = HEAD + b"Content-Length: 0\r\n\r\n"
    async with server_of(answer, answer, answer) as (url, requests):
        async with HttpClient(f"{url}/base/v1/") as client:
            await client.post("/v1/x", b'{"a": 1}')
            await client.get("/v1/models")
        async with HttpClient(url, api_key="given") as client:
            await client.get("/")
    (post, body), (get, _), (other, _) = requests
    assert post.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert body == b'{"a": 1}'
    assert get.startswith(b"GET /base/v1/models HTTP/1.1")
    assert b"Bearer from-environment\r\n" in post
    assert b"Bearer given\r\n" in other


async def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    answer = HEAD + b"Content-Length: 2\r\n\r\nok"
    async with server_of(answer + b"!", answer, answer) as (url, requests), HttpClient(url) as client:
        for _ in range(3):
            assert (await client.post("/", b"")).body == b"ok"
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"!", GenerationLost),
        (HEAD + b"Content-Length: 9\r\n\r\nhalf!", GenerationLost),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n!", GenerationLost),
        (b"SSH-2.0-OpenSSH_9\r\n!", ProtocolViolation),
        (HEAD + b"X: " + b"x" * 100_000 + b"!", ProtocolViolation),
    ],
)
async def test_broken_answers_are_errors(answer, error):
    async with server_of(answer) as (url, _), HttpClient(url) as client:
        with pytest.raises(error):
            await client.post("/", b"")


async def test_a_silent_server_is_given_up():
    async with server_of(HEAD + b"Content-Length: 9\r\n\r\nhalf") as (url, _):
        async with HttpClient(url, silence_timeout_s=0.05) as client:
            with pytest.raises(GenerationLost, match=r"was silent for 0\.05 s"):
                await client.post("/", b"")


async def test_too_long_an_answer_is_refused(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 10)
    async with (
        server_of(HEAD + b"Content-Length: 11\r\n\r\n" + b"x" * 11) as (url, _),
        HttpClient(url) as client,
    ):
        with pytest.raises(ProtocolViolation, match="more than 10 bytes"):
            await client.post("/", b"")


async def test_nobody_there_is_said():
    async with HttpClient("http://127.0.0.1:1") as client:
        with pytest.raises(
            EngineUnavailable, match=r"no server answers at http://127\.0\.0\.1:1: Connection refused"
        ):
            await client.get("/")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x?y=1"])
def test_what_is_no_url_is_said(url):
    with pytest.raises(ConfigError, match="URL"):
        HttpClient(url)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "aiohttp", None)
    with pytest.raises(FeatureDisabled, match=r"pip install 'triptych\[cli\]'"):
        HttpClient("http://x")


async def test_the_frontend_streams_and_keeps_the_connection():
    async with open_api() as api:
        body = json.dumps({"model": "tiny/fake", "prompt": "a", "stream": True}).encode()
        async with HttpClient(f"http://127.0.0.1:{api.port}") as client:
            for _ in range(2):
                async with client.stream("/v1/completions", body) as stream:
                    events = [data async for data in stream.events()]
                assert (stream.status, stream.headers["content-type"].split(";")[0]) == (
                    200,
                    "text/event-stream",
                )
                *chunks, done = events
                assert done == b"[DONE]"
                text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
                assert text == "0 Once upon a time ü."
            answer = await client.post("/v1/completions", b'{"prompt": "a", "temperature": 9}')
    assert error_text(answer.status, answer.body).startswith("HTTP 400: temperature")


async def test_leaving_a_stream_ends_the_request():
    async with open_api() as api:
        api.generator.hold_after_words = 2
        body = json.dumps({"model": "tiny/fake", "prompt": "a", "stream": True}).encode()
        async with HttpClient(f"http://127.0.0.1:{api.port}") as client:
            async with client.stream("/v1/completions", body) as stream:
                async for _ in stream.events():
                    break
            await api.until(lambda: len(api.generator.closed) == 1)


async def test_tls_checks_the_server_and_shows_a_certificate(tmp_path):
    authority = Authority(tmp_path)
    served = create_server_tls(authority.server(client_ca=authority.file))
    async with open_api(tls=served) as api:
        url = f"https://127.0.0.1:{api.port}"
        async with HttpClient(url, tls=authority.client("client")) as client:
            assert (await client.get("/health")).status == 200
        async with HttpClient(url) as stranger:
            with pytest.raises(EngineUnavailable, match="certificate verify failed"):
                await stranger.get("/health")
    with pytest.raises(ConfigError, match="/no/such"):
        HttpClient("https://x", tls=TlsConfig(ca="/no/such"))
