"""A client of OpenAI's API that asks for event ids and goes on with a stream that broke, at any frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.http_door import body_of, delta_of, error_of, refusal_of
from tests.chaos.recorder import Request
from tests.helpers.http_api import TRUSTS_NOBODY
from triptych.errors import AttachedElsewhere, EngineUnavailable, GenerationLost, QueueFull, TriptychError
from triptych.types.events import Event, FinishedEvent
from triptych.types.outputs import StageTimings, Usage

_PAUSE_S = 0.1
_PATIENCE_S = 30.0
"""For so long without anything new a stream is tried to be gone on with."""
_READ_S = 180.0
_AGAIN = (EngineUnavailable, QueueFull, AttachedElsewhere)
Post = Callable[[int, Mapping[str, str], Mapping[str, Any]], AsyncGenerator[str, None]]
"""Number of a frontend, headers and body of a request -> the lines of the answer. Raises BrokenOff, Refused."""


class BrokenOff(Exception):
    """The connection broke, or there was none."""


@dataclass
class Refused(Exception):
    """An answer that is no stream."""

    status: int
    text: str


async def post_to(
    address: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    """Ask the server at host:port for a completion and yield the lines of its answer.

    Raises:
        BrokenOff, Refused: As they say.
    """
    url = f"http://{address}/v1/completions"
    try:
        async with (
            httpx.AsyncClient(timeout=_READ_S, verify=TRUSTS_NOBODY) as client,
            client.stream("POST", url, json=dict(body), headers=dict(headers)) as response,
        ):
            if response.status_code != 200:
                raise Refused(response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                yield line
    except httpx.HTTPError:
        raise BrokenOff from None


@dataclass
class _Part:
    """The part of a stream that one connection has brought."""

    events: list[Event] = field(default_factory=list)
    last_id: str = ""
    is_done: bool = False
    usage: Usage = field(default_factory=Usage)
    error: TriptychError | None = None
    """The error that has ended it. None: the connection broke."""


async def resume_over_http(
    post: Post, num_frontends: int, first: int, request: Request, *, attaches_twice: bool
) -> AsyncGenerator[Event, None]:
    """Stream one answer.

    Args:
        first: Number of the frontend that is asked first.
        attaches_twice: Whether it goes on at two places at once, of which only one may bring the rest.

    Raises:
        EngineUnavailable, QueueFull: It was refused; nothing has come.
        GenerationLost: It could not be gone on with.
    """
    body = body_of(request)
    body["stream_options"] |= {"include_event_ids": True}
    clock, place, last_id = asyncio.get_running_loop().time, first, ""
    until = clock() + _PATIENCE_S
    while True:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        part, other = _Part(), _Part()
        here = _read(part, post(place % num_frontends, headers, body))
        if attaches_twice and last_id:
            there = _read(other, post((place + 1) % num_frontends, headers, body))
            await asyncio.gather(_exhaust(here), _exhaust(there))
            part = max(part, other, key=lambda part: (part.is_done, len(part.events)))
            for event in part.events:
                yield event
        else:
            async with aclosing(here) as events:
                async for event in events:
                    yield event
        if part.is_done:
            yield FinishedEvent(part.usage, StageTimings())
            return
        if part.events:
            until = clock() + _PATIENCE_S
        last_id = part.last_id or last_id
        if part.error is not None and not (last_id and isinstance(part.error, _AGAIN)):
            raise part.error
        if not last_id:
            raise EngineUnavailable("the connection broke before anything had come")
        if clock() > until:
            raise GenerationLost(f"nothing new within {_PATIENCE_S:g} s; last: {part.error}")
        place += 1
        await asyncio.sleep(_PAUSE_S)


async def _read(part: _Part, answer: AsyncGenerator[str, None]) -> AsyncGenerator[Event, None]:
    """Read one connection to its end into `part`, and yield each event as it comes."""
    event_id = ""
    try:
        async with aclosing(answer) as lines:
            async for line in lines:
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    part.is_done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        part.error = error_of(chunk["error"])
                        break
                    part.last_id = event_id or part.last_id
                    if chunk.get("usage"):
                        usage = chunk["usage"]
                        part.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])
                    for choice in chunk["choices"]:
                        part.events.append(delta_of(choice))
                        yield part.events[-1]
    except BrokenOff:
        pass
    except Refused as refused:
        part.error = refusal_of(refused.status, refused.text)


async def _exhaust(events: AsyncGenerator[Event, None]) -> None:
    async for _ in events:
        pass
