"""The OpenAPI document of the HTTP API."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from triptych_services.frontend.access.keys import X_API_KEY
from triptych_services.frontend.anthropic.answers import MESSAGES_EVENTS
from triptych_services.frontend.anthropic.schema import CountTokensRequest, MessagesRequest
from triptych_services.frontend.openai import answers, schema
from triptych_services.frontend.openai.convert import TIMEOUT_HEADER
from triptych_services.frontend.openai.key_guard import OPEN_PATHS
from triptych_services.frontend.openai.responses.answers import RESPONSES_EVENTS
from triptych_services.frontend.openai.responses.schema import ResponsesRequest
from triptych_services.frontend.requests.parse import MAX_DEADLINE_S

_REFERENCE = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/abort_requests": schema.AbortRequest,
}
_EVENTS: dict[str, Sequence[type[BaseModel]]] = {
    "/v1/completions": (answers.CompletionChunk, answers.ErrorAnswer),
    "/v1/chat/completions": (answers.ChatCompletionChunk, answers.ErrorAnswer),
    "/v1/responses": RESPONSES_EVENTS,
    "/v1/messages": MESSAGES_EVENTS,
}
_ENDED_BY_DONE = ("/v1/completions", "/v1/chat/completions")
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": X_API_KEY, "description": "The same."},
}


def build_document(app: FastAPI, *, asks_key: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the app.

    Args:
        asks_key: Requests need an API key.
    """
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [(kind, "validation") for kind in _BODIES.values()]
    events: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (kind, "serialization") for kind in itertools.chain(*_EVENTS.values())
    ]
    _, definitions = models_json_schema([*bodies, *events], ref_template=_REFERENCE)
    document["components"]["schemas"] |= definitions["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path, body in _BODIES.items():
        content = {"application/json": {"schema": _reference(body)}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path, kinds in _EVENTS.items():
        parameters = document["paths"][path]["post"]["parameters"]
        (timeout,) = (parameter for parameter in parameters if parameter["name"] == TIMEOUT_HEADER)
        timeout["schema"] = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S}
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": _event_of(kinds, is_ended_by_done=path in _ENDED_BY_DONE)}
    rest = _event_of(
        [kind for path in _ENDED_BY_DONE for kind in _EVENTS[path][:1]] + [answers.ErrorAnswer],
        is_ended_by_done=True,
    )
    document["paths"]["/v1/streams/{token}"]["get"]["responses"]["200"]["content"] = {
        "text/event-stream": {"schema": rest}
    }
    if asks_key:
        document["components"]["securitySchemes"] = _SCHEMES
        document["security"] = [{name: []} for name in _SCHEMES]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # the framework's own, whose errors are 400 here
            if not asks_key or path in OPEN_PATHS:
                del operation["responses"]["401"]
                operation["responses"].pop("403", None)
            if asks_key and path in OPEN_PATHS:
                operation["security"] = []
    return document


def _event_of(kinds: Sequence[type[BaseModel]], *, is_ended_by_done: bool) -> dict[str, Any]:
    """Return the schema of one event of a stream."""
    data: list[dict[str, Any]] = [
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"oneOf": list(map(_reference, kinds))},
        }
    ]
    if is_ended_by_done:
        data.append({"const": "[DONE]", "description": "The end of a whole answer."})
    return {
        "description": "One event.",
        "type": "object",
        "properties": {
            "data": {"anyOf": data},
            "id": {"type": "string", "description": "For Last-Event-ID."},
        },
        "required": ["data"],
    }


def _reference(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=kind.__name__)}
