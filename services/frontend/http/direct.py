"""Routes that are called without the framework's routing, which costs as much as all else around an endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_services.frontend.http.body import ClientGone
from triptych_services.frontend.http.errors import CLIENT_CLOSED_REQUEST

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


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
