"""Requests over HTTP, as events: what a client of OpenAI's API sees of an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.chaos.recorder import Request
from triptych.errors import DeadlineExceeded, EngineUnavailable, GenerationLost, QueueFull
from triptych.types.events import DeltaEvent, Event, FinishedEvent
from triptych.types.outputs import FinishReason, StageTimings, TokenLogprobs, Usage

_READ_S = 180.0


async def generate_over_http(address: str, request: Request) -> AsyncIterator[Event]:
    """Stream one answer.

    Raises:
        EngineUnavailable, QueueFull: It was refused; nothing has come.
        DeadlineExceeded: It ran out of its time.
        GenerationLost: It broke off.
    """
    body = {
        "model": "embedded",
        "prompt": list(request.prompt),
        **request.sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    headers = {} if request.timeout_s is None else {"X-Request-Timeout-S": f"{request.timeout_s:.3f}"}
    has_output, usage = False, None
    try:
        async with (
            httpx.AsyncClient(timeout=_READ_S) as client,
            client.stream("POST", f"http://{address}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                _refuse(response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    yield FinishedEvent(Usage(*usage) if usage else Usage(), StageTimings())
                    return
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise _error_of(chunk["error"])
                if chunk.get("usage"):
                    usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
                for choice in chunk["choices"]:
                    has_output = True
                    yield _delta_of(choice)
    except httpx.HTTPError as error:
        raise (GenerationLost if has_output else EngineUnavailable)(
            f"the connection broke: {error!r}"
        ) from None
    raise GenerationLost("the stream ended without its last line")


def _delta_of(choice: dict[str, Any]) -> DeltaEvent:
    reason = choice.get("finish_reason")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return DeltaEvent(
        index=choice["index"],
        text=choice["text"],
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(TokenLogprobs((0,), (value,), (b"",), (0,)) for value in logprobs),
        finish_reason=None if reason is None else FinishReason[reason.upper()],
        stop_reason=choice.get("stop_reason"),
    )


def _refuse(status: int, text: str) -> None:
    if status == 503:
        raise EngineUnavailable(text)
    if status == 429:
        raise QueueFull(text, 1.0)
    if status == 504:
        raise DeadlineExceeded(text)
    raise GenerationLost(f"{status}: {text}")


def _error_of(error: dict[str, Any]) -> Exception:
    kind = DeadlineExceeded if error.get("code") == DeadlineExceeded.code else GenerationLost
    return kind(str(error))
