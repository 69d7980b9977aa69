"""Asks HTTP requests for an API key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_services.frontend.access.caller import set_caller
from triptych_services.frontend.access.keys import ApiKeys

DOCS_PATH, DOCUMENT_PATH, STATIC_PATH = "/docs", "/openapi.json", "/static-offline-docs"
OPEN_PATHS = frozenset({"/health", "/ping", DOCS_PATH, DOCUMENT_PATH})
"""Probes have no keys, and a browser has none before the page for people asks for one."""


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
