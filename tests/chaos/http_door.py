"""Requests over HTTP, as events: what a client of OpenAI's API sees of an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.chaos.recorder import Request
from tests.helpers.http_api import TRUSTS_NOBODY
from triptych.errors import (
    AttachedElsewhere,
    DeadlineExceeded,
    EngineUnavailable,
    GenerationLost,
    NotKept,
    QueueFull,
    TriptychError,
)
from triptych.types.events import DeltaEvent, Event, FinishedEvent
from triptych.types.logprobs import TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, Usage

_READ_S = 180.0


async def generate_over_http(address: str, request: Request) -> AsyncIterator[Event]:
    """Stream one answer.

    Raises:
        EngineUnavailable, QueueFull: It was refused; nothing has come.
        DeadlineExceeded: It ran out of its time.
        GenerationLost: It broke off.
    """
    body = body_of(request)
    headers = {} if request.timeout_s is None else {"X-Request-Timeout-S": f"{request.timeout_s:.3f}"}
    has_output, usage = False, None
    try:
        async with (
            httpx.AsyncClient(timeout=_READ_S, verify=TRUSTS_NOBODY) as client,
            client.stream("POST", f"http://{address}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise refusal_of(response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    yield FinishedEvent(Usage(*usage) if usage else Usage(), StageTimings())
                    return
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise error_of(chunk["error"])
                if chunk.get("usage"):
                    usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
                for choice in chunk["choices"]:
                    has_output = True
                    yield delta_of(choice)
    except httpx.HTTPError as error:
        raise (GenerationLost if has_output else EngineUnavailable)(
            f"the connection broke: {error!r}"
        ) from None
    raise GenerationLost("the stream ended without its last line")


def body_of(request: Request) -> dict[str, Any]:
    """Return the body of a request."""
    return {
        "prompt": list(request.prompt),
        **request.sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def delta_of(choice: dict[str, Any]) -> DeltaEvent:
    """Return what a choice of a chunk brings."""
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


def refusal_of(status: int, text: str) -> TriptychError:
    """Return the error of an answer that is no stream."""
    match status:
        case 503:
            return EngineUnavailable(text)
        case 429:
            return QueueFull(text, 1.0)
        case 504:
            return DeadlineExceeded(text)
        case 404 if NotKept.code.lower() in text:
            return NotKept(text)
    return GenerationLost(f"{status}: {text}")


def error_of(error: dict[str, Any]) -> TriptychError:
    """Return the error of an event."""
    kinds = {kind.code.lower(): kind for kind in (DeadlineExceeded, AttachedElsewhere, EngineUnavailable)}
    return kinds.get(str(error.get("code")).lower(), GenerationLost)(str(error))
