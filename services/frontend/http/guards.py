"""Guards in front of every route: they name requests, bound their bodies, ask for API keys, and answer what fails.

Behind them `DirectRoutes` calls most routes without the framework's routing, which costs as much as all else around an
endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.observe.trace import set_trace
from triptych.rpc.interceptors import new_request_id
from triptych_services.frontend.access.caller import set_caller
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.http.body import ClientGone
from triptych_services.frontend.http.errors import CLIENT_CLOSED_REQUEST, dialect_of, error_response
from triptych_services.frontend.http.generation import REQUEST_ID_HEADER

MAX_BODY_BYTES = 10 << 20
MAX_HEADERS = 256
"""Headers of a request. All of them are read several times: 13,000 took 35 ms."""
_MAX_DIGITS = 20  # of a declared length; Python reads no number of more than a few thousand
OTHER_ROUTES = "other"
"""The name of what is no route, or was refused before its route was looked for."""

DOCS_PATH, DOCUMENT_PATH, STATIC_PATH = "/docs", "/openapi.json", "/static-offline-docs"
OPEN_PATHS = frozenset({"/health", "/ping", DOCS_PATH, DOCUMENT_PATH})
"""Probes have no keys, and a browser has none before the page for people asks for one."""

OnResponse: TypeAlias = Callable[[str, int], None]
"""Takes the template of the route's path, never the path that a client sent, and the status."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class RequestGuard:
    """ASGI middleware outside of Starlette's own handling of errors, which would log a bug twice."""

    def __init__(self, app: ASGIApp, on_response: OnResponse) -> None:
        """`on_response`: Hears of each answer."""
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered like GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        num_headers = len(scope["headers"])
        headers = Headers(raw=scope["headers"][:MAX_HEADERS])
        set_trace(headers.items())
        request_id = headers.get(REQUEST_ID_HEADER) or new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._on_response(getattr(scope.get("route"), "path", OTHER_ROUTES), message["status"])
                sent = MutableHeaders(scope=message)
                sent[REQUEST_ID_HEADER] = request_id
                if (dialect := dialect_of(scope)) is not None:
                    sent[dialect.request_id_header] = request_id
            await send(message)

        try:
            if num_headers > MAX_HEADERS:
                raise HTTPException(431, f"{num_headers} headers are above the limit {MAX_HEADERS}")
            num_declared_bytes = headers.get("content-length", "0").lstrip("0")
            if num_declared_bytes.isdecimal() and (
                len(num_declared_bytes) > _MAX_DIGITS or int(num_declared_bytes) > MAX_BODY_BYTES
            ):
                raise _body_too_large(f"{num_declared_bytes[:_MAX_DIGITS]} bytes are")
            await self._app(scope, _Counted(receive), send_with_id)
        except Exception as error:
            if has_started:
                raise  # too late for an answer; the server closes the connection and logs it
            await error_response(error, scope)(scope, receive, send_with_id)


class _Counted:
    """Receives a body of unknown length up to the bound."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > MAX_BODY_BYTES:
                raise _body_too_large("it is")
        return message


def _body_too_large(what: str) -> HTTPException:
    return HTTPException(
        413, f"the body is too large: {what} above the limit {MAX_BODY_BYTES} bytes (10 MiB)"
    )


class KeyGuard:
    """ASGI middleware that names the caller of each request by its API key. Belongs inside of `RequestGuard`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, needs_admin: bool = False) -> None:
        """`needs_admin`: only keys of administrators will do."""
        self._app = app
        self._keys = keys
        self._needs_admin = needs_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            set_caller(self._keys.find(headers))
            if self._needs_admin:
                self._keys.find_admin(headers)
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(f"{STATIC_PATH}/")


class DirectRoute(NamedTuple):
    """A route that is called by its path."""

    route: APIRoute
    endpoint: Endpoint


class DirectRoutes:
    """ASGI middleware that calls POST routes itself. Belongs inside of the guards, which answer what fails.

    Such a route has a fixed path, and its endpoint takes the request and nothing else. The framework keeps what people
    and monitors ask for, and the answers to wrong paths and methods.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._routes = find_direct_routes(routers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if direct is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = direct.route
        try:
            response = await direct.endpoint(Request(scope, receive, send))
        except ClientGone:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        await response(scope, receive, send)


def find_direct_routes(routers: Iterable[APIRouter]) -> Mapping[str, DirectRoute]:
    """Return the routes that need nothing of the framework, by their paths."""
    return {
        route.path: DirectRoute(route, route.endpoint)
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.methods == {"POST"} and _takes_request_only(route)
    }


def _takes_request_only(route: APIRoute) -> bool:
    dependant = route.dependant
    others = (
        *dependant.path_params,
        *dependant.query_params,
        *dependant.header_params,
        *dependant.cookie_params,
        *dependant.body_params,
        *dependant.dependencies,
    )
    return dependant.request_param_name is not None and not others
