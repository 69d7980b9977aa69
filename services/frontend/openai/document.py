"""The OpenAPI document of the HTTP API."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from services.frontend.openai import answers, schema
from services.frontend.openai.responses.answers import RESPONSES_EVENTS
from services.frontend.openai.responses.schema import ResponsesRequest
from services.frontend.requests.parse import MAX_DEADLINE_S

_REFERENCE = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/abort_requests": schema.AbortRequest,
}
_CHUNKS: dict[str, type[BaseModel]] = {
    "/v1/completions": answers.CompletionChunk,
    "/v1/chat/completions": answers.ChatCompletionChunk,
}
_EVENTS: dict[str, Sequence[type[BaseModel]]] = {"/v1/responses": RESPONSES_EVENTS}


def build_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the app."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [(kind, "validation") for kind in _BODIES.values()]
    chunks: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (kind, "serialization") for kind in (*_CHUNKS.values(), *itertools.chain(*_EVENTS.values()))
    ]
    _, definitions = models_json_schema([*bodies, *chunks], ref_template=_REFERENCE)
    document["components"]["schemas"] |= definitions["$defs"]
    for path, body in _BODIES.items():
        content = {"application/json": {"schema": _reference(body)}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path in (*_CHUNKS, *_EVENTS):
        (timeout,) = document["paths"][path]["post"]["parameters"]
        timeout["schema"] = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S}
    for path, kinds in _EVENTS.items():
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {
            "schema": {
                "description": "The `data` of each event. Its `event` is the type.",
                "oneOf": list(map(_reference, kinds)),
            }
        }
    for path, chunk in _CHUNKS.items():
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {
            "schema": {
                "description": "The `data` of each event is a chunk, or an error that ends it; the last is [DONE].",
                "oneOf": [_reference(chunk), _reference(answers.ErrorAnswer), {"const": "[DONE]"}],
            }
        }
    return document


def _reference(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=kind.__name__)}
