"""Connections that say nothing, or half of something, and those that come on top."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.helpers.http_api import HttpApi, open_api

DEADLINE_S = 20.0
NUM_HALF = 200
CHAT: Any = [{"role": "user", "content": "hi"}]
HALVES = (
    b"",
    b"POST /v1/comp",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
)


async def send(api: HttpApi, data: bytes) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(data)
    await writer.drain()
    reader.writer = writer  # type: ignore[attr-defined]  # lives as long as the reader
    return reader


async def test_half_requests_cost_nobody_else() -> None:
    async with open_api(client_timeout_s=2.0) as api, asyncio.timeout(DEADLINE_S):
        readers = await asyncio.gather(*(send(api, HALVES[i % len(HALVES)]) for i in range(NUM_HALF)))
        for _ in range(20):
            answer = await api.client.completions.create(model="tiny/fake", prompt="hi", max_tokens=2)
            assert answer.choices[0].finish_reason == "length"
        assert await asyncio.gather(*(reader.read() for reader in readers)) == [b""] * NUM_HALF
        assert (await api.http.get("/health")).status_code == 200
        assert api.generator.num_running == 0


async def test_one_connection_too_many_is_told_to_come_back() -> None:
    async with open_api(max_connections=3) as api, asyncio.timeout(DEADLINE_S):
        idle = await asyncio.gather(*(send(api, b"") for _ in range(3)))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{api.port}") as http:
            response = await http.get("/health")
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "engine_unavailable"
            for reader in idle:
                reader.writer.close()  # type: ignore[attr-defined]
            while (response := await http.get("/health")).status_code == 503:
                await asyncio.sleep(0.01)
            assert response.status_code == 200


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
