"""Errors in OpenAI's shape, through the one error table."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from triptych.errors import (
    EngineUnavailable,
    FeatureDisabled,
    GenerationLost,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    TriptychError,
    Unauthenticated,
)
from triptych.observe.logging import with_fields
from triptych.rpc.status import UNAVAILABLE_RETRY_S, row_of
from triptych_services.frontend.http.answers import to_json
from triptych_services.frontend.http.body import ClientGone, to_violations

log = logging.getLogger(__name__)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 431: "headers_too_large"}
CLIENT_CLOSED_REQUEST = 499  # nginx's; never seen by the client, which has left


@dataclass(frozen=True, slots=True)
class HttpError:
    """An HTTP error as the client sees it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}"""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}


class Dialect(NamedTuple):
    """How an API spells its errors and the ids of requests, where that is not OpenAI's way."""

    path: str
    """The beginning of its routes' paths."""
    request_id_header: str
    """The header that has the id as well."""
    to_body: Callable[[HttpError, str], Mapping[str, Any]]
    """Returns the body of an error in a request of this id."""


def dialect_of(scope: Scope) -> Dialect | None:
    """Return the dialect of the route that a request is for; None: OpenAI's."""
    dialects: Sequence[Dialect] = scope["app"].state.dialects
    return next((each for each in dialects if scope["path"].startswith(each.path)), None)


def install_handlers(app: FastAPI, dialects: Sequence[Dialect] = ()) -> None:
    """Answer every error that a route raises; bugs go on to the middleware."""
    app.state.dialects = dialects
    for kind in (TriptychError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(ClientGone, _ignore_disconnect)


def error_response(error: Exception, scope: Scope) -> Response:
    """The answer to a request that failed before any of its answer was sent."""
    request_id: str = scope["state"]["request_id"]
    answer, dialect = to_http_error(error, request_id), dialect_of(scope)
    body = answer.body if dialect is None else dialect.to_body(answer, request_id)
    return json_response(body, status=answer.status, headers=answer.headers)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


def to_http_error(error: Exception, request_id: str) -> HttpError:
    """Return the HTTP form of an error. Internal errors are logged here, once."""
    match error:
        case RequestValidationError():
            return _from_triptych_error(_to_invalid_request(error))
        case HTTPException():
            return _from_http_error(error)
        case TriptychError() if row_of(error).http_status != HTTPStatus.INTERNAL_SERVER_ERROR:
            return _from_triptych_error(error)
        case TriptychError():
            log.error("request failed: %s", error, extra=with_fields(request_id=request_id), exc_info=error)
            return _from_triptych_error(error)
    log.error("request failed by a bug: %r", error, extra=with_fields(request_id=request_id), exc_info=error)
    message = f"internal error (request {request_id}); the server's log has the details"
    return HttpError(500, "server_error", "internal", message)


def _from_triptych_error(error: TriptychError) -> HttpError:
    row = row_of(error)
    param, headers = None, {}
    match error:
        case InvalidRequest():
            param = error.violations[0].field if error.violations else None
        case FeatureDisabled():
            param = error.features[0].partition(" ")[0]
        case ModelNotFound():
            param = "model"
        case Unauthenticated():
            headers = {"WWW-Authenticate": "Bearer"}
        case QueueFull():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        case EngineUnavailable() | GenerationLost():
            headers = {"Retry-After": str(math.ceil(UNAVAILABLE_RETRY_S))}
    return HttpError(
        row.http_status, row.openai_type, error.code.lower(), error.message, param or None, headers
    )


def _from_http_error(error: HTTPException) -> HttpError:
    """Errors of the HTTP layer itself: no such route, a method that it does not take, a body too large."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = _HTTP_CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal")
    return HttpError(error.status_code, kind, code, str(error.detail), headers=error.headers or {})


def _to_invalid_request(error: RequestValidationError) -> InvalidRequest:
    """The framework itself checks the queries of operators only."""
    return InvalidRequest(to_violations([{**detail, "loc": detail["loc"][1:]} for detail in error.errors()]))


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = _explained(error, request)
    return error_response(error, request.scope)


async def _ignore_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _explained(error: HTTPException, request: Request) -> HTTPException:
    """The framework's own errors say little: no such route."""
    detail = str(error.detail)
    if detail == HTTPStatus(error.status_code).phrase:
        detail += f": {request.method} {request.url.path}; GET /docs lists what there is"
    return HTTPException(error.status_code, detail, error.headers)
