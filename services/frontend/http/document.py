"""The OpenAPI document of the HTTP API."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from triptych_services.frontend.access.keys import X_API_KEY
from triptych_services.frontend.http.generation import TIMEOUT_HEADER
from triptych_services.frontend.http.guards import OPEN_PATHS
from triptych_services.frontend.requests.parse import MAX_DEADLINE_S

_REFERENCE = "#/components/schemas/{model}"
_TIMEOUT = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds that all of it may take; more is a 504.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S},
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": X_API_KEY, "description": "The same."},
}


class Exchange(NamedTuple):
    """The body and the events of a route, which the framework does not know."""

    body: type[BaseModel] | None
    """The class of its body. None: it reads none."""
    events: Sequence[type[BaseModel]]
    """The events of its streams. Empty: it never streams."""
    ends_with_done: bool
    """The last event of a whole stream is `[DONE]`."""
    has_timeout: bool = False
    """Its time may be bounded, as that of a generation always may."""

    @property
    def generates(self) -> bool:
        """Whether it starts a generation, which may stream."""
        return self.body is not None and bool(self.events)


_EXCHANGES: dict[Callable[..., Any], Exchange] = {}
"""Endpoint -> what it reads and streams."""

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def takes(
    body: type[BaseModel] | None = None,
    *,
    events: Sequence[type[BaseModel]] = (),
    ends_with_done: bool = False,
    has_timeout: bool = False,
) -> Callable[[_Endpoint], _Endpoint]:
    """Declare what an endpoint reads and streams. See `Exchange`."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        _EXCHANGES[endpoint] = Exchange(body, events, ends_with_done, has_timeout)
        return endpoint

    return declare


def exchanges(routers: Iterable[APIRouter]) -> Iterator[tuple[APIRoute, Exchange]]:
    """Yield the routes that were declared with `takes`."""
    for route in itertools.chain.from_iterable(router.routes for router in routers):
        if isinstance(route, APIRoute) and route.endpoint in _EXCHANGES:
            yield route, _EXCHANGES[route.endpoint]


def build_document(app: FastAPI, routers: Iterable[APIRouter], *, asks_key: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the app.

    Args:
        routers: Those that the app includes.
        asks_key: Requests need an API key.
    """
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    declared = list(exchanges(routers))
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}
    for _, exchange in declared:
        if exchange.body is not None:
            models[exchange.body, "validation"] = None
        models |= {(event, "serialization"): None for event in exchange.events}
    _, definitions = models_json_schema(list(models), ref_template=_REFERENCE)
    document["components"]["schemas"] |= definitions["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for route, exchange in declared:
        for method in route.methods or ():
            _describe(document["paths"][route.path_format][method.lower()], exchange)
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


def _describe(operation: dict[str, Any], exchange: Exchange) -> None:
    """Add what the framework does not know of an operation."""
    if exchange.body is not None:
        content = {"application/json": {"schema": _reference(exchange.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    if exchange.generates or exchange.has_timeout:
        operation["parameters"] = [_TIMEOUT]
    if exchange.events:
        answer = operation["responses"]["200"]
        whole = answer["content"] if exchange.generates else {}  # what only streams has no other answer
        event = _event_of(exchange.events, ends_with_done=exchange.ends_with_done)
        answer["content"] = {**whole, "text/event-stream": {"schema": event}}


def _event_of(kinds: Sequence[type[BaseModel]], *, ends_with_done: bool) -> dict[str, Any]:
    """Return the schema of one event of a stream."""
    data: list[dict[str, Any]] = [
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"oneOf": list(map(_reference, kinds))},
        }
    ]
    if ends_with_done:
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
