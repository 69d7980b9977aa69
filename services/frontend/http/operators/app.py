"""The app of operators' calls: its doors, and who may pass them."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.errors import PermissionDenied
from triptych_services.frontend.access.audit import log_admin_call
from triptych_services.frontend.access.keys import ApiKeys
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.http.body_reader import BodyReader
from triptych_services.frontend.http.errors import install_handlers
from triptych_services.frontend.http.guards import (
    DOCS_PATH,
    DOCUMENT_PATH,
    STATIC_PATH,
    KeyGuard,
    OnResponse,
    RequestGuard,
)
from triptych_services.frontend.http.operators.routes import router as routes
from triptych_services.frontend.http.state import InFlight
from triptych_services.frontend.http.status_routes import VERSION
from triptych_services.frontend.requests.long_reader import LongReader
from triptych_services.frontend.routing.router import Router


def create_operators_app(
    router: Router,
    generator: Generator,
    keys: ApiKeys | None = None,
    on_response: OnResponse = lambda route, status: None,
) -> FastAPI:
    """Return the app, not bound to a port yet.

    Args:
        on_response: See `RequestGuard`.
        keys: The API keys of which an administrator's must be sent. None: none is asked for.
    """
    app = FastAPIOffline(
        title="Triptych, for operators",
        version=VERSION,
        description="Calls of the gRPC AdminService under the names that vLLM has for them over HTTP.",
        openapi_url=DOCUMENT_PATH,
        docs_url=DOCS_PATH,
        static_url=STATIC_PATH,
        swagger_ui_parameters={"validatorUrl": None},
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.router = router
    app.state.generator = generator
    app.state.in_flight = InFlight()
    app.state.reader = BodyReader(LongReader())
    app.include_router(routes)
    install_handlers(app)
    app.add_middleware(OriginGuard)
    if keys is not None:
        app.add_middleware(KeyGuard, keys=keys, needs_admin=True)
    app.add_middleware(RequestGuard, on_response=on_response)
    app.add_middleware(AuditGuard)  # outside of the others, so that what they refuse has its line, too
    return app


class OriginGuard:
    """Refuses what a page of another site makes a browser send to this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != headers.get("host"):
                raise PermissionDenied(f"pages of {origin[:200]!r} may not call operators' routes")
        await self._app(scope, receive, send)


class AuditGuard:
    """Writes a line to the log for each call that may change something."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        outcome = "CANCELLED"

        async def send_with_note(message: Message) -> None:
            nonlocal outcome
            if message["type"] == "http.response.start":
                outcome = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_note)
        finally:
            host, port = scope["client"] or ("", 0)
            arguments = scope["query_string"].decode("latin-1")
            log_admin_call(f"{host}:{port}", scope["path"], arguments, outcome)
