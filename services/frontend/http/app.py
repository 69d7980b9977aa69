"""The HTTP API as an ASGI app."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.http import status_routes
from triptych_services.frontend.http.anthropic import objects as anthropic_objects
from triptych_services.frontend.http.anthropic import routes as anthropic_routes
from triptych_services.frontend.http.body_reader import BodyReader
from triptych_services.frontend.http.document import build_document
from triptych_services.frontend.http.errors import install_handlers
from triptych_services.frontend.http.generation import REQUEST_ID_HEADER
from triptych_services.frontend.http.guards import (
    DOCS_PATH,
    DOCUMENT_PATH,
    STATIC_PATH,
    DirectRoutes,
    KeyGuard,
    OnResponse,
    RequestGuard,
)
from triptych_services.frontend.http.openai import routes, token_routes
from triptych_services.frontend.http.openai.pooling import routes as pooling_routes
from triptych_services.frontend.http.openai.responses import routes as responses_routes
from triptych_services.frontend.http.sse import NOT_ENFORCED_HEADER
from triptych_services.frontend.http.state import InFlight
from triptych_services.frontend.http.status_routes import VERSION
from triptych_services.frontend.requests.long_reader import LongReader

_ROUTERS = (
    routes.router,
    responses_routes.router,
    pooling_routes.router,
    token_routes.router,
    anthropic_routes.router,
    status_routes.router,
)
"""The routes of every dialect, and those of monitors. `http` names its dialects here, and in no other file."""


def create_app(
    generator: Generator,
    keys: ApiKeys | None = None,
    cors_origins: Sequence[str] = (),
    *,
    refuses_unknown: bool = True,
    ping_interval_s: float = 15.0,
    on_response: OnResponse = lambda route, status: None,
    long_reader: LongReader | None = None,
) -> FastAPI:
    """Return the app, not bound to a port yet. The server uses `app.state.in_flight` to stop it.

    Args:
        keys: The API keys that requests must send. None: none is asked for.
        cors_origins: Origins whose pages may call from a browser; `*`: any.
        refuses_unknown: See `BodyReader`.
        ping_interval_s: Time after which a stream that has nothing to say sends a line without data. 0: never.
        on_response: See `RequestGuard`.
        long_reader: Reads long bodies. None: one that no other API shares.
    """
    app = FastAPIOffline(
        title="Triptych",
        version=VERSION,
        description="OpenAI-compatible completions and chat completions, and a few routes for operators.",
        openapi_url=DOCUMENT_PATH,
        docs_url=DOCS_PATH,  # Swagger UI; the framework's own page loads it from a CDN
        static_url=STATIC_PATH,
        swagger_ui_parameters={"validatorUrl": None, "persistAuthorization": True},
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.generator = generator
    app.state.in_flight = InFlight()
    app.state.ping_interval_s = ping_interval_s
    app.state.reader = BodyReader(long_reader or LongReader(), refuses_unknown=refuses_unknown)
    for router in _ROUTERS:
        app.include_router(router)
    app.openapi = functools.cache(functools.partial(build_document, app, _ROUTERS, asks_key=keys is not None))  # type: ignore[method-assign]
    app.router.routes.insert(0, Route(DOCUMENT_PATH, _create_document_endpoint(app), include_in_schema=False))
    install_handlers(app, dialects=[anthropic_objects.DIALECT])
    app.add_middleware(DirectRoutes, routers=_ROUTERS)
    if keys is not None:
        app.add_middleware(KeyGuard, keys=keys)
    app.add_middleware(
        RequestGuard, on_response=on_response
    )  # outside of the others, whose errors it answers
    if cors_origins:
        # Outside of that: a page reads no error without these headers, and a preflight has no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, NOT_ENFORCED_HEADER, "Retry-After"),
        )
    return app


def _create_document_endpoint(app: FastAPI) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with the document, which the first call builds in a quarter of a second, on a thread.

    Anybody may ask for its 200 kB, so they are written once.
    """
    turns = asyncio.Lock()

    @functools.cache
    def write() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    async def endpoint(request: Request) -> Response:
        async with turns:
            content = await asyncio.to_thread(write)
        return Response(content, media_type="application/json")

    return endpoint
