"""Streams that are silent for a while, before their first token and in the middle, as clients of others read them.

The official clients of OpenAI and Anthropic, and the two ways in which benchmark clients cut a stream into events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.helpers.fake_generator import MODEL, WORDS
from tests.helpers.http_api import HttpApi, open_api
from tests.helpers.node import CAPTURED, NODE

DEADLINE_S = 60.0
PING_S = 0.02
NUM_PINGS = 5
TEXT = "0" + "".join(WORDS)
CHAT: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 50},
}
IDS: dict[str, Any] = {"stream_options": {"include_event_ids": True}}
SILENCES = pytest.mark.parametrize("hold_after_words", [-1, 2], ids=["before", "within"])


@asynccontextmanager
async def silent_api(hold_after_words: int) -> AsyncIterator[HttpApi]:
    """Serve streams that say nothing after so many words, until `released`."""
    async with open_api(ping_interval_s=PING_S) as api, asyncio.timeout(DEADLINE_S):
        api.generator.hold_after_words = hold_after_words
        yield api


async def end_silence(api: HttpApi, num_streams: int) -> None:
    """Let all streams go on once each has been sent some pings.

    The last stream is one that counts its pings; all timers are of one loop, and those of the others began before.
    """
    while len(api.generator.requests) < num_streams:
        await asyncio.sleep(PING_S)
    reader, writer = await api.connect("/v1/completions", {"prompt": "hi", "stream": True, **IDS})
    for _ in range(NUM_PINGS):
        await reader.readuntil(b": ping\n")
    api.generator.released.set()
    await reader.readuntil(b"[DONE]")
    writer.close()


async def completion(api: HttpApi, **extra: Any) -> str:
    stream = await api.client.completions.create(model=MODEL, prompt="hi", stream=True, extra_body=extra)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def chat(api: HttpApi, **extra: Any) -> str:
    create = api.client.chat.completions.create
    stream = await create(model=MODEL, messages=CHAT, stream=True, extra_body=extra)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def response(api: HttpApi) -> str:
    stream = await api.client.responses.create(model=MODEL, input="hi", stream=True)
    return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


async def message(api: HttpApi) -> str:
    address = f"http://127.0.0.1:{api.port}"
    async with (
        anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=50, messages=CHAT) as stream,
    ):
        return await stream.get_final_text()


OFFICIAL: dict[str, Callable[[HttpApi], Awaitable[str]]] = {
    "completion": completion,
    "completion with ids": lambda api: completion(api, **IDS),
    "chat": chat,
    "chat with ids": lambda api: chat(api, **IDS),
    "response": response,
    "message": message,
}


@SILENCES
async def test_official_python_clients_read_on_after_a_silence(hold_after_words: int) -> None:
    async with silent_api(hold_after_words) as api:
        num_each = 10
        reading = [asyncio.ensure_future(read(api)) for read in OFFICIAL.values() for _ in range(num_each)]
        await end_silence(api, len(reading))
        assert await asyncio.gather(*reading) == [TEXT] * len(reading)


@pytest.mark.thorough
@SILENCES
async def test_official_javascript_clients_read_on_after_a_silence(
    hold_after_words: int, node_clients: Path
) -> None:
    num_each, num_kinds = 10, 6
    async with silent_api(hold_after_words) as api:
        process = await asyncio.create_subprocess_exec(
            NODE,
            node_clients / "silent_streams.mjs",
            f"http://127.0.0.1:{api.port}",
            str(num_each),
            stdout=asyncio.subprocess.PIPE,
            env=CAPTURED["env"],
        )
        try:
            await end_silence(api, num_each * num_kinds)
            printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert printed.decode().splitlines() == [TEXT] * num_each * num_kinds


def cut_as_vllm(text: str) -> list[str]:
    """Return the data of each event as `vllm bench serve` reads it: pieces between blank lines, without comments."""
    pieces = [piece.strip() for piece in text.split("\n\n")]
    return [piece.removeprefix("data: ") for piece in pieces if piece and not piece.startswith(":")]


def cut_as_sglang(text: str) -> list[str]:
    """Return the data of each event as `sglang.bench_serving` reads it, and scripts after it: line by line."""
    lines = [line.strip() for line in text.split("\n")]
    return [line.removeprefix("data: ") for line in lines if line]


def words_of(events: Sequence[str]) -> str:
    *chunks, done = events
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@SILENCES
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_benchmark_clients_read_on_after_a_silence(path: str, hold_after_words: int) -> None:
    async with silent_api(hold_after_words) as api:
        asking = asyncio.create_task(api.http.post(path, json={**BODIES[path], "stream": True}))
        await end_silence(api, 1)
        text = (await asking).text
    assert text.count("\n\n\n") >= 1, "no ping has come"
    assert words_of(cut_as_vllm(text)) == words_of(cut_as_sglang(text)) == TEXT


@pytest.mark.parametrize("path", BODIES)
async def test_streams_have_no_ids_and_comments_unless_asked_for(path: str) -> None:
    async with silent_api(1) as api:
        asking = asyncio.create_task(api.http.post(path, json={**BODIES[path], "stream": True}))
        await end_silence(api, 1)
        lines = (await asking).text.splitlines()
    assert {line.partition(" ")[0] for line in lines} <= {"", "data:", "event:"}
