"""Connections that say nothing, or half of something, and those that come on top."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from typing import Any

import httpx
import pytest

from tests.helpers.clock import pass_time
from tests.helpers.garbage import without_collector
from tests.helpers.http_api import HttpApi, open_api
from triptych_services.frontend.http import connections, server
from triptych_services.frontend.http.connections import BoundedConnection, ConnectionLimits
from triptych_services.frontend.http.guards import MAX_HEADERS

DEADLINE_S = 60.0
NUM_HALF = 200
CHAT: Any = [{"role": "user", "content": "hi"}]
HALVES = (
    b"",
    b"POST /v1/comp",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
)


PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
_BODY = b'{"model": "tiny/fake", "prompt": "hi", "stream": true}'
STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


async def send(api: HttpApi, data: bytes, *, source: str = "127.0.0.1") -> asyncio.StreamReader:
    reader, _ = await api.dial(data, source=source)
    return reader


async def test_half_requests_cost_nobody_else() -> None:
    limits = ConnectionLimits(client_timeout_s=20.0)
    async with open_api(limits=limits) as api, asyncio.timeout(DEADLINE_S):
        readers = await asyncio.gather(*(send(api, HALVES[i % len(HALVES)]) for i in range(NUM_HALF)))
        for _ in range(20):
            answer = await api.client.completions.create(model="tiny/fake", prompt="hi", max_tokens=2)
            assert answer.choices[0].finish_reason == "length"
        await pass_time(20.0)
        assert await asyncio.gather(*(reader.read() for reader in readers)) == [b""] * NUM_HALF
        assert (await api.http.get("/health")).status_code == 200
        assert api.generator.num_running == 0


async def test_a_connection_that_waits_gives_way_to_a_new_one() -> None:
    """One that has sent nothing, half of a request, or has had its answer; the longest waiting first."""
    limits = ConnectionLimits(max_connections=4)
    async with open_api(limits=limits) as api, asyncio.timeout(DEADLINE_S):
        silent = await send(api, b"")
        half = await send(api, HALVES[3])
        answered = await send(api, PING)
        assert b" 200 " in await answered.readline()
        api.generator.hold_after_words = 1
        streaming, _ = await api.connect("/v1/completions", {"prompt": "hi", "stream": True})
        await streaming.readuntil(b"\n\n")
        newcomers = []
        for gone in (silent, half, answered):
            newcomers.append(await send(api, PING))
            assert b" 200 " in await newcomers[-1].readline()
            await gone.read()
            assert gone.at_eof()
        api.generator.released.set()
        assert b"[DONE]" in await streaming.readuntil(b"[DONE]")


def num_connections() -> int:
    return sum(type(each) is BoundedConnection for each in gc.get_objects())


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_connection_that_has_ended_is_freed(is_reset: bool) -> None:
    """By reference counts: a client may open one for each request."""
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        with without_collector():
            num_before = num_connections()
            for request in (PING, STREAM, HALVES[3], b""):
                reader, writer = await api.dial(request)
                if request in (PING, STREAM):
                    await reader.readuntil(b"[DONE]" if request == STREAM else b"200")
                if is_reset:
                    connected: socket.socket = writer.get_extra_info("socket")
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.close()
                await writer.wait_closed()
            while num_connections() > num_before:
                await asyncio.sleep(0.01)


async def test_connection_beside_all_that_are_answered_is_told_to_come_back() -> None:
    async with open_api(limits=ConnectionLimits(max_connections=2)) as api, asyncio.timeout(DEADLINE_S):
        api.generator.hold_after_words = 1
        streams = [await api.connect("/v1/completions", {"prompt": "hi", "stream": True}) for _ in range(2)]
        for reader, _ in streams:
            await reader.readuntil(b"\n\n")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{api.port}", timeout=DEADLINE_S) as http:
            response = await http.get("/health")
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "engine_unavailable"
            api.generator.released.set()
            while (response := await http.get("/health")).status_code == 503:
                await asyncio.sleep(0.01)
            assert response.status_code == 200


async def test_refused_connections_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GOODBYE_S", 20.0)
    async with open_api(limits=ConnectionLimits(max_connections=1)) as api, asyncio.timeout(DEADLINE_S):
        api.generator.hold_after_words = 1
        reader, _ = await api.connect("/v1/completions", {"prompt": "hi", "stream": True})
        await reader.readuntil(b"\n\n")
        refused = await asyncio.gather(*(send(api, b"") for _ in range(200)))
        reading = [asyncio.create_task(each.read()) for each in refused]
        while (
            sum(task.done() for task in reading) < 200 - connections._MAX_GOODBYES
        ):  # those without an answer
            await asyncio.sleep(0.01)
        await pass_time(20.0)
        answers = await asyncio.gather(*reading, return_exceptions=True)
        told = [answer for answer in answers if isinstance(answer, bytes) and b" 503 " in answer]
        assert len(told) == connections._MAX_GOODBYES
        api.generator.released.set()
        await reader.readuntil(b"[DONE]")


async def test_one_address_has_its_own_bound() -> None:
    """Within it, too, one that waits gives way; where all are being answered, a further one is refused."""
    limits = ConnectionLimits(max_connections=8, max_per_address=2)
    async with open_api(limits=limits) as api, asyncio.timeout(DEADLINE_S):
        others, others_writer = await api.dial(b"")
        silent = [await send(api, b"", source="127.0.0.2") for _ in range(2)]
        beside_silent = await send(api, PING, source="127.0.0.2")
        assert b" 200 " in await beside_silent.readline()
        assert await silent[0].read() == b""
        api.generator.hold_after_words = 1
        for gone in (silent[1], beside_silent):
            streaming = await send(api, STREAM, source="127.0.0.2")
            await streaming.readuntil(b"data: ")
            await gone.read()
        refusal = await (await send(api, b"", source="127.0.0.2")).read()
        assert b" 429 Too Many Requests\r\n" in refusal
        assert b"this address has as many connections as one may have" in refusal
        others_writer.write(PING)
        assert b" 200 " in await others.readline()
        api.generator.released.set()
        while b" 200 " not in await (await send(api, PING, source="127.0.0.2")).readline():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_of_one_client_count_together(host: str, network: str) -> None:
    assert connections._network_of(host) == network


LONG_HEADS = {
    "many headers": (b"GET /ping HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n"),
    "one header": (b"GET /ping HTTP/1.1\r\nHost: x\r\nX-Long: ", b"a"),
    "address": (b"GET /", b"a"),
    "empty lines": (b"", b"\r\n"),
}


async def flood(writer: asyncio.StreamWriter, pattern: bytes, num_bytes: int = 1 << 40) -> int:
    """Send bytes until the server ends the connection. Return how many were sent."""
    chunk, num_sent = pattern * ((64 << 10) // len(pattern)), 0
    with contextlib.suppress(OSError):
        while num_sent < num_bytes:
            writer.write(chunk)
            await writer.drain()
            num_sent += len(chunk)
    return num_sent


@pytest.mark.parametrize("kind", LONG_HEADS)
async def test_long_head_is_refused(kind: str) -> None:
    start, pattern = LONG_HEADS[kind]
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        reader = await send(api, start + pattern * (128 << 10))
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"above the limit 65536 bytes" in answer
        _, flooding = await api.dial(start)
        assert await flood(flooding, pattern) < 1 << 40
        assert (await api.http.get("/ping")).status_code == 200


async def test_many_headers_are_refused() -> None:
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        for count, status in ((MAX_HEADERS, 200), (MAX_HEADERS + 1, 431)):
            head = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            reader, _ = await api.dial(head + b"a: b\r\n" * (count - 2) + b"\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert b"257 headers are above the limit 256" in answer


@pytest.mark.parametrize("tail", [b"0\r\nX: ", b"1;x="])
async def test_long_trailers_and_extensions_are_refused(tail: bytes) -> None:
    """Behind the body, or between its parts: the route waits for the rest of it."""
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        _, writer = await api.dial(CHUNKED + b"1\r\n{\r\n" + tail)
        assert await flood(writer, b"a") < 1 << 40
        assert (await api.http.get("/ping")).status_code == 200


async def test_head_within_the_limit_and_long_bodies_are_read() -> None:
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        head = PING.removesuffix(b"\r\n") + b"X-Long: " + b"a" * 60_000 + b"\r\n\r\n"
        reader = await send(api, head * 20)  # one after the other
        for _ in range(20):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        body = b'{"prompt": "hi", "max_tokens": 2}'.ljust(300_000)
        chunks = b"".join(b"3e8\r\n%b\r\n" % body[i : i + 1000] for i in range(0, len(body), 1000))
        chunked = await send(api, CHUNKED + chunks + b"0\r\n\r\n")
        assert b" 200 " in await chunked.readline()


@pytest.mark.parametrize(("options", "ping"), [({}, b"\n"), ({"include_event_ids": True}, b": ping\n")])
async def test_a_silent_stream_is_kept_open(options: dict[str, bool], ping: bytes) -> None:
    async with open_api(ping_interval_s=0.05) as api, asyncio.timeout(DEADLINE_S):
        api.generator.hold_after_words = 1
        body = {"prompt": "hi", "stream": True, "stream_options": options}
        reader, writer = await api.connect("/v1/completions", body)
        stream = await api.client.chat.completions.create(model="tiny/fake", messages=CHAT, stream=True)
        await reader.readuntil(b"Once")  # chunks of HTTP have a line break of their own
        await reader.readuntil(b"\n\n\r\n")
        for _ in range(3):
            assert await reader.readuntil(b"\r\n") == b"%x\r\n" % len(ping)
            assert await reader.readuntil(b"\r\n") == ping + b"\r\n"
        api.generator.released.set()
        rest = (await reader.readuntil(b"[DONE]")).decode()
        writer.close()
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "time" in rest
    assert text == "0 Once upon a time ü."


async def test_pings_can_be_turned_off_and_end_with_the_stream() -> None:
    async with open_api(ping_interval_s=0) as api, asyncio.timeout(DEADLINE_S):
        response = await api.http.post("/v1/completions", json={"prompt": "hi", "stream": True})
        assert "\n\n\n" not in response.text
    async with open_api(ping_interval_s=0.001) as api, asyncio.timeout(DEADLINE_S):
        api.generator.error_after_words = (2, RuntimeError("a bug"))
        with_error = await api.http.post("/v1/completions", json={"prompt": "hi", "stream": True})
        assert with_error.text.rstrip().splitlines()[-1].startswith('data: {"error"')
        assert [task for task in asyncio.all_tasks() if task.get_name() == "pings"] == []


async def test_client_that_leaves_behind_a_pipelined_request_is_noticed() -> None:
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        api.generator.hold_after_words = 1
        reader, writer = await api.dial(STREAM + PING)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await api.until(lambda: api.generator.num_running == 0)


async def until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(1 << 16):
            pass


async def test_few_requests_may_wait_behind_one() -> None:
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        few = await send(api, PING * connections.MAX_PIPELINED)
        for _ in range(connections.MAX_PIPELINED):
            await few.readuntil(b'{"status":"alive"}')
        many = await send(api, PING * 2000)
        await until_closed(many)
        assert (await api.http.get("/ping")).status_code == 200


async def test_body_behind_its_answer_does_not_keep_a_connection_open() -> None:
    async with (
        open_api(limits=ConnectionLimits(client_timeout_s=0.3)) as api,
        asyncio.timeout(DEADLINE_S),
    ):
        reader, writer = await api.dial(b"PUT /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        assert b" 405 " in await reader.readline()
        writer.write(b"{}")
        await until_closed(reader)


@pytest.mark.parametrize(
    ("length", "status"), [("0" * 5000 + "2", b" 400 "), ("9" * 5000, b" 400 "), ("9" * 18, b" 413 ")]
)
async def test_length_of_many_digits_is_a_number_all_the_same(length: str, status: bytes) -> None:
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        reader = await send(api, head.encode() + b"{}")
        assert status in await reader.readline()


async def test_connections_that_gave_way_are_dropped_if_their_answers_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[connections.BoundedConnection] = []

    class Recorded(connections.BoundedConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            made.append(self)
            super().connection_made(transport)

    monkeypatch.setattr(server, "BoundedConnection", Recorded)
    monkeypatch.setattr(connections, "GOODBYE_S", 0.1)
    request = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: %s\r\n\r\n" % (b"a" * 8000)
    async with open_api(limits=ConnectionLimits(max_connections=1)) as api, asyncio.timeout(DEADLINE_S):
        with contextlib.closing(connect_without_reading(api.port)) as client:
            while not made or not made[0].transport.get_write_buffer_size():
                with contextlib.suppress(BlockingIOError):
                    client.send(request)
                await asyncio.sleep(0.001)
            while not made[0].cycle.response_complete:
                await asyncio.sleep(0.001)
            assert (await api.http.get("/ping")).status_code == 200  # it takes the only place
            while made[0].parser is not None:  # until it is closed
                await asyncio.sleep(0.01)


def connect_without_reading(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client
