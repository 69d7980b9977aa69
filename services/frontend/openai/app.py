"""The HTTP API as an ASGI app."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.anthropic import objects as anthropic_objects
from triptych_services.frontend.anthropic import routes as anthropic_routes
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.openai import routes, status_routes, token_routes
from triptych_services.frontend.openai.convert import REQUEST_ID_HEADER
from triptych_services.frontend.openai.document import build_document
from triptych_services.frontend.openai.errors import install_handlers
from triptych_services.frontend.openai.in_flight import InFlight
from triptych_services.frontend.openai.key_guard import DOCS_PATH, DOCUMENT_PATH, STATIC_PATH, KeyGuard
from triptych_services.frontend.openai.request_body import BodyReader
from triptych_services.frontend.openai.request_guard import OnResponse, RequestGuard
from triptych_services.frontend.openai.responses import routes as responses_routes
from triptych_services.frontend.openai.status_routes import VERSION
from triptych_services.frontend.openai.streams import NOT_ENFORCED_HEADER


def create_app(
    generator: Generator,
    keys: ApiKeys | None = None,
    cors_origins: Sequence[str] = (),
    *,
    refuses_unknown: bool = True,
    ping_interval_s: float = 15.0,
    on_response: OnResponse = lambda route, status: None,
) -> FastAPI:
    """Return the app, not bound to a port yet. The server uses `app.state.in_flight` to stop it.

    Args:
        keys: The API keys that requests must send. None: none is asked for.
        cors_origins: Origins whose pages may call from a browser; `*`: any.
        refuses_unknown: See `BodyReader`.
        ping_interval_s: Time after which a stream that has nothing to say sends a line without data. 0: never.
        on_response: See `RequestGuard`.
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
    app.state.reader = BodyReader(refuses_unknown=refuses_unknown)
    for module in (routes, responses_routes, anthropic_routes, token_routes, status_routes):
        app.include_router(module.router)
    app.openapi = functools.cache(functools.partial(build_document, app, asks_key=keys is not None))  # type: ignore[method-assign]
    install_handlers(app, dialects=[anthropic_objects.DIALECT])
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
