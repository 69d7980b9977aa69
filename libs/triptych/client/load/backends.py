"""The servers that load can be put on: this project's gRPC, and any with OpenAI's HTTP API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.client.grpc_client import GenerationClient
from triptych.client.http_client import HttpClient, error_text
from triptych.client.load.datasets import LoadRequest
from triptych.client.prompts import is_conversation
from triptych.client.request import RequestOptions
from triptych.errors import InvalidRequest, ProtocolViolation, TriptychError
from triptych.types.events import DeltaEvent, FinishedEvent

_OUTPUTS = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a chat's chunk that hold what the model wrote."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one request, as the server counts them."""

    num_input: int
    num_output: int


class Backend(Protocol):
    """A way to send a request and see its answer come."""

    async def answer(self, request: LoadRequest, on_piece: Callable[[], None]) -> TokenCounts:
        """Call `on_piece` whenever output arrives; return at the end of the answer.

        Raises:
            TriptychError: There is no answer, or no whole one.
        """
        ...


class GrpcBackend:
    """The GenerationService of a frontend."""

    def __init__(self, client: GenerationClient, sampling: Mapping[str, Any], model: str) -> None:
        """
        Args:
            sampling: Fields that each request sends.
            model: Empty: the only one.
        """
        self._client = client
        self._sampling = sampling
        self._options = RequestOptions(model=model)

    async def answer(self, request: LoadRequest, on_piece: Callable[[], None]) -> TokenCounts:
        sampling = {**self._sampling, "max_tokens": request.max_tokens}
        async for event in self._client.generate(request.prompt, sampling, self._options):
            if isinstance(event, DeltaEvent) and event.token_ids:
                on_piece()
            elif isinstance(event, FinishedEvent):
                return TokenCounts(event.usage.num_prompt_tokens, event.usage.num_output_tokens)
        raise ProtocolViolation("the answer ended without its last event")


class OpenAiBackend:
    """Completions or chat completions of any server, streamed. Its `usage` says how many tokens there were."""

    def __init__(self, client: HttpClient, endpoint: str, sampling: Mapping[str, Any], model: str) -> None:
        """
        Args:
            endpoint: COMPLETIONS or CHAT.
        """
        self._client = client
        self._endpoint = endpoint
        self._body = {
            "model": model,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def answer(self, request: LoadRequest, on_piece: Callable[[], None]) -> TokenCounts:
        body = {**self._body, **self._prompt(request)}
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        usage: Any = None
        async with self._client.stream(self._endpoint, json.dumps(body).encode()) as stream:
            if stream.status != 200:
                whole = b"".join([piece async for piece in stream.pieces()])
                raise TriptychError(error_text(stream.status, whole))
            async for data in stream.events():
                if data == b"[DONE]":
                    continue  # the body's end follows, and the connection is kept
                try:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise TriptychError(error_text(stream.status, data))
                    if any(map(_has_output, chunk["choices"])):
                        on_piece()
                    usage = chunk.get("usage") or usage
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ProtocolViolation(
                        f"a chunk in another form than OpenAI's ({error!r:.80})"
                    ) from None
        if usage is None:
            raise ProtocolViolation("the server sent no usage, without which tokens cannot be counted")
        return TokenCounts(usage["prompt_tokens"], usage["completion_tokens"])

    def _prompt(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        if self._endpoint == COMPLETIONS:
            if is_conversation(prompt):
                raise InvalidRequest("prompt", f"messages need {CHAT}")
            return {"prompt": prompt}
        if isinstance(prompt, str):
            return {"messages": [{"role": "user", "content": prompt}]}
        if is_conversation(prompt):
            return {"messages": prompt}
        raise InvalidRequest("prompt", f"token ids need {COMPLETIONS}")


def _has_output(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk brings anything that the model wrote."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in _OUTPUTS)
