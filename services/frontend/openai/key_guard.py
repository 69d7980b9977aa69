"""Asks HTTP requests for an API key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.access.caller import set_caller
from services.frontend.access.keys import ApiKeys

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Probes have no keys."""


class KeyGuard:
    """ASGI middleware that names the caller of each request by its API key. Belongs inside of `RequestGuard`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            set_caller(self._keys.find(Headers(scope=scope)))
        await self._app(scope, receive, send)
