"""Streams that do not end well, clients that leave, servers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.clock import pass_time
from tests.helpers.fake_generator import MODEL, FakeGenerator
from tests.helpers.http_api import DEADLINE_S, HttpApi, open_api
from triptych.errors import ConfigError, GenerationLost
from triptych.types.events import AdmittedEvent, DeltaEvent, Event
from triptych_services.frontend.http.app import create_app
from triptych_services.frontend.http.connections import ConnectionLimits
from triptych_services.frontend.http.server import HttpServer
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.streams.outputs import EventReceiver

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def api() -> AsyncIterator[HttpApi]:
    async with open_api() as api:
        yield api


async def test_the_bytes_of_a_stream_are_server_sent_events(api: HttpApi) -> None:
    async with api.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        text = (await response.aread()).decode()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    assert response.headers["x-request-id"]
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    names = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert all(set(chunk) == names for chunk in chunks)
    assert chunks[0]["choices"] == [{"index": 0, "text": "0", "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize(
    ("error", "code"),
    [(GenerationLost("engine-0 is gone"), "generation_lost"), (ZeroDivisionError("x"), "internal")],
)
async def test_an_error_after_output_is_the_last_event(
    api: HttpApi, caplog: pytest.LogCaptureFixture, error: Exception, code: str
) -> None:
    api.generator.error_after_words = (2, error)
    body = {"prompt": "a", "stream": True}
    with caplog.at_level(logging.WARNING):
        async with api.http.stream("POST", "/v1/completions", json=body) as response:
            text = (await response.aread()).decode()
    *chunks, last, end = text.split("\n\n")
    assert end == ""
    assert len(chunks) == 3
    told = json.loads(last.removeprefix("data: "))["error"]
    assert told["code"] == code
    assert set(told) == {"message", "type", "param", "code"}
    assert "[DONE]" not in text
    assert len(caplog.records) == (code == "internal")


async def test_the_client_raises_the_error_of_a_stream(api: HttpApi) -> None:
    api.generator.error_after_words = (2, GenerationLost("engine-0 is gone"))
    stream = await api.client.completions.create(model=MODEL, prompt="a", stream=True)
    assert [(await anext(stream)).choices[0].text for _ in range(3)] == ["0", " Once", " upon"]
    with pytest.raises(openai.APIError, match="engine-0 is gone"):
        await anext(stream)


async def test_an_error_after_output_of_an_unstreamed_request_is_its_status(api: HttpApi) -> None:
    api.generator.error_after_words = (2, GenerationLost("engine-0 is gone"))
    with pytest.raises(openai.InternalServerError) as caught:
        await api.client.completions.create(model=MODEL, prompt="a")
    assert caught.value.status_code == 503


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_vanishes_closes_its_generation(api: HttpApi, path: str, is_stream: bool) -> None:
    api.generator.hold_after_words = 2
    prompt: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else CHAT
    reader, writer = await api.connect(path, {**prompt, "stream": is_stream})
    await api.generator.holding.wait()
    if is_stream:
        await reader.readuntil(b"upon")
    assert api.generator.closed == []
    writer.close()
    await api.until(lambda: api.generator.num_running == 0)
    assert api.generator.closed == [api.generator.requests[0].head.request_id]
    api.generator.hold_after_words = None
    assert (await api.client.completions.create(model=MODEL, prompt="a")).choices[0].text


async def test_leaving_the_clients_iterator_closes_the_generation(api: HttpApi) -> None:
    api.generator.hold_after_words = 2
    async with await api.client.completions.create(model=MODEL, prompt="a", stream=True) as stream:
        async for _ in stream:
            break
    await api.until(lambda: api.generator.num_running == 0)
    assert len(api.generator.closed) == 1


async def test_all_generations_of_a_request_end_with_it(api: HttpApi) -> None:
    api.generator.hold_after_words = 1
    reader, writer = await api.connect("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    await reader.readuntil(b"Once")
    assert api.generator.num_running == 3
    writer.close()
    await api.until(lambda: api.generator.num_running == 0)
    assert len(api.generator.closed) == 3


async def test_one_refused_prompt_refuses_the_request_and_ends_the_others(api: HttpApi) -> None:
    api.generator.hold_after_words = 0
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.completions.create(model=MODEL, prompt=["a", "b", ""], stream=True)
    assert caught.value.param == "prompt[2]"
    assert api.generator.num_running == 0


async def test_a_lost_prompt_ends_the_others(api: HttpApi) -> None:
    api.generator.error_after_words = (2, GenerationLost("engine-0 is gone"))
    with pytest.raises(openai.InternalServerError, match="engine-0 is gone"):
        await api.client.completions.create(model=MODEL, prompt=["a", "b"])
    assert api.generator.num_running == 0


async def test_a_stopping_server_lets_running_requests_end_and_takes_no_more(api: HttpApi) -> None:
    api.generator.hold_after_words = 2
    asking = asyncio.create_task(api.client.completions.create(model=MODEL, prompt="a"))
    await api.generator.holding.wait()
    stopping = asyncio.create_task(api.server.stop(DEADLINE_S))
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            while True:  # until the listener is closed
                _, writer = await asyncio.open_connection("127.0.0.1", api.port)
                writer.close()
    assert not stopping.done()
    api.generator.released.set()
    assert (await asking).choices[0].finish_reason == "stop"
    await stopping
    await api.server.wait_stopped()


async def test_what_outlasts_the_grace_ends_with_an_error(api: HttpApi) -> None:
    api.generator.hold_after_words = 2
    body = {"prompt": "a"}
    whole = asyncio.create_task(api.http.post("/v1/completions", json=body))
    async with api.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        parts = response.aiter_text()
        assert "data:" in await anext(parts)
        while len(api.generator.requests) < 2:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(api.server.stop(0.05))
        rest = "".join([part async for part in parts])
    assert "the server is stopping" in rest
    assert "[DONE]" not in rest
    refused = await whole
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    await stopping
    assert api.generator.num_running == 0


class Torrent(FakeGenerator):
    """Never stops talking, as events that are asked for or as those that are given to a receiver."""

    num_deltas = 0

    def __init__(self, *, pushes: bool = False) -> None:
        super().__init__()
        self.pushes = pushes

    async def generate(
        self, raw: RawRequest, receiver: EventReceiver | None = None
    ) -> AsyncGenerator[Event, None]:
        self.num_running += 1
        try:
            yield AdmittedEvent(raw.head.request_id, MODEL, 0, [1])
            has_room = asyncio.Event()
            if receiver is not None:
                receiver.on_ready = has_room.set
            while True:
                delta = DeltaEvent(0, "x" * 10_000, [1])
                if receiver is None or not self.pushes:
                    yield delta
                elif receiver.is_ready:
                    receiver.take(delta)
                else:
                    has_room.clear()
                    await has_room.wait()
                self.num_deltas += 1
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
            self.changed.set()


async def connect_without_reading(api: HttpApi) -> socket.socket:
    """A client with a small window that sends a request and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", api.port))
    body = b'{"prompt": "a", "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    return client


@pytest.mark.parametrize("pushes", [False, True])
async def test_a_reader_that_stalls_is_waited_for_and_slows_nobody(pushes: bool) -> None:
    generator = Torrent(pushes=pushes)
    async with open_api(generator) as api:
        with contextlib.closing(await connect_without_reading(api)):
            before = -1
            async with asyncio.timeout(DEADLINE_S):
                while not before == generator.num_deltas > 0:  # until nothing more is asked of the generator
                    before = generator.num_deltas
                    assert (await api.http.get("/health")).status_code == 200
            assert generator.num_running == 1
        await api.until(lambda: generator.num_running == 0)


@pytest.mark.parametrize("pushes", [False, True])
async def test_a_reader_that_stalls_for_too_long_is_dropped(pushes: bool) -> None:
    generator = Torrent(pushes=pushes)
    async with open_api(generator, limits=ConnectionLimits(client_timeout_s=0.2)) as api:
        with contextlib.closing(await connect_without_reading(api)):
            await api.until(lambda: generator.num_deltas > 0 and generator.num_running == 0)


@pytest.mark.parametrize("pushes", [False, True])
async def test_a_reader_that_is_slow_is_not_dropped(pushes: bool) -> None:
    generator = Torrent(pushes=pushes)
    async with open_api(generator, limits=ConnectionLimits(client_timeout_s=60.0)) as api:
        with contextlib.closing(await connect_without_reading(api)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            for _ in range(6):
                for _ in range(
                    20
                ):  # several times what its window holds: the server's kernel has less to send
                    await loop.sock_recv(client, 4096)
                await pass_time(25.0)
            assert generator.num_running == 1
            for _ in range(10):  # what reaches the kernel of either side counts as read
                await pass_time(60.0)
                await asyncio.sleep(0.01)
            await api.until(lambda: generator.num_running == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /ver",
    ],
    ids=["nothing", "half a head", "half a body", "half a second request"],
)
async def test_a_request_that_does_not_arrive_whole_costs_its_connection(sent: bytes) -> None:
    async with open_api(limits=ConnectionLimits(client_timeout_s=0.2)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1000):
                    pass
        writer.close()


async def test_a_long_answer_is_no_late_request() -> None:
    async with open_api(limits=ConnectionLimits(client_timeout_s=60.0)) as api:
        api.generator.hold_after_words = 1
        request = api.http.post("/v1/completions", json={"prompt": "a"}, timeout=None)
        answer = asyncio.create_task(request)
        await api.generator.holding.wait()
        await pass_time(90.0)
        api.generator.released.set()
        assert (await answer).status_code == 200


async def test_a_server_stops_although_a_client_does_not_read() -> None:
    async with open_api(Torrent()) as api:
        with contextlib.closing(await connect_without_reading(api)):
            while api.generator.num_running == 0:
                await asyncio.sleep(0)  # never idle: the generator talks
            async with asyncio.timeout(DEADLINE_S):
                await api.server.stop(0.05)
            assert api.generator.num_running == 0


async def test_a_port_already_taken_is_a_config_error(api: HttpApi) -> None:
    with pytest.raises(ConfigError, match=rf"frontend\.http_port: cannot bind 127\.0\.0\.1:{api.port}"):
        await HttpServer(create_app(FakeGenerator()), "127.0.0.1", api.port).start()
    with pytest.raises(ConfigError, match=r"frontend\.http_port: cannot bind 203\.0\.113\.1:0"):
        await HttpServer(create_app(FakeGenerator()), "203.0.113.1", 0).start()


async def test_a_server_that_dies_by_itself_is_noticed(api: HttpApi) -> None:
    waiting = asyncio.create_task(api.server.wait_stopped())
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "http"]
    task.cancel()
    with pytest.raises(RuntimeError, match="the HTTP server has died"):
        await waiting


async def test_ipv6_and_names_are_addresses_too() -> None:
    server = HttpServer(create_app(FakeGenerator()), "localhost", 0)
    port = await server.start()
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        assert (await http.get(f"http://localhost:{port}/version")).status_code == 200
    await server.stop(0)


async def test_every_chunk_tells_the_usage_so_far(api: HttpApi) -> None:
    body: dict[str, Any] = {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stream": True,
        "temperature": 1,
        "max_tokens": 3,
    }
    text = await api.client.completions.create(model=MODEL, prompt=["ab", "c"], n=2, **body)
    chat = await api.client.chat.completions.create(model=MODEL, **CHAT, **body)
    for chunks in ([chunk async for chunk in text], [chunk async for chunk in chat]):
        usages = [chunk.usage for chunk in chunks]
        assert len({usage.prompt_tokens for usage in usages if usage is not None}) == 1
        counts = [usage.completion_tokens for usage in usages if usage is not None]
        assert len(counts) == len(usages)
        assert counts == sorted(counts)
        last = usages[-1]
        assert last is not None
        assert last.completion_tokens == counts[-2]
        assert last.total_tokens == last.prompt_tokens + last.completion_tokens
        assert last.prompt_tokens_details is not None


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_is_kept_and_has_ids_if_its_client_asks(api: HttpApi, path: str, asks: bool) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else CHAT
    response = await api.http.post(
        path, json={**body, "stream": True, "stream_options": {"include_event_ids": asks}}
    )
    assert ("id:" in response.text) == asks
    (raw,) = api.generator.requests
    assert raw.resumes == (raw.answer is not None) == asks


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 33, "temperature": 1}])
async def test_ids_of_a_stream_that_cannot_go_on_are_refused(api: HttpApi, fields: dict[str, Any]) -> None:
    body = {**fields, "stream": True, "stream_options": {"include_event_ids": True}}
    response = await api.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "stream_options.include_event_ids"
    assert "1 prompt and 32 choices" in error["message"]
    assert api.generator.requests == []


async def test_running_usage_alone_is_refused(api: HttpApi) -> None:
    with pytest.raises(openai.BadRequestError, match="needs include_usage") as caught:
        await api.client.completions.create(
            model=MODEL,
            prompt="a",
            stream=True,
            extra_body={"stream_options": {"continuous_usage_stats": True}},
        )
    assert caught.value.param == "stream_options.continuous_usage_stats"
