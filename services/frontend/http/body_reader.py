"""Reads the bodies of requests, each where its length does not hold up other requests.

up to 8 kB       here, on the event loop
up to 64 kB      on a thread
longer           in a child process, see `LongReader`
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from email.message import Message
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from triptych.errors import InvalidRequest
from triptych_services.frontend.http.body import Body, ClientGone, read_body
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.requests.long_reader import LONG_REQUEST, LongReader

log = logging.getLogger(__name__)

MAX_WARNED = 256  # names of unknown fields
# 8 kB hold at most 270 messages, which are read in about 3 ms.
_INLINE_BYTES = 8192

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class BodyReader:
    """Reads bodies for the routes; owned by the app. Bound to one event loop."""

    def __init__(
        self, long_reader: LongReader, *, refuses_unknown: bool = True, long_body: int = LONG_REQUEST
    ) -> None:
        """
        Args:
            long_reader: Reads long bodies.
            refuses_unknown: Fields that the API does not have are refused. Otherwise they are left out, with one
                warning in the log for each name.
            long_body: Bytes above which a body is read in a child process.
        """
        self._long_reader = long_reader
        self._refuses_unknown = refuses_unknown
        self._long_body = long_body
        self._warned: set[str] = set()
        # One thread: readers of JSON hold the interpreter's lock, so that a second one would only slow the loop.
        self._threads = FairThreads(1, inline_size=_INLINE_BYTES, what="long bodies")

    async def read(
        self, request: Request, kind: type[B], convert: Callable[[B], T], *, deadline_s: float | None = None
    ) -> T:
        """Return what `convert` makes of the request's body.

        Args:
            convert: A function of a module, perhaps with arguments by `functools.partial`: it may be called in another
                process.
            deadline_s: Time from now on in which a body may come, wait for a child process and be read there. None:
                any. One that is read here is not looked at before.

        Raises:
            InvalidRequest: The body is no JSON object. Errors of its fields are in `Body.violations`.
            QueueFull: Too many long bodies wait to be read.
            InvalidRequest, DeadlineExceeded, EngineUnavailable: As `LongReader.read`.
            ClientGone: The client left.
        """
        arrived = time.monotonic()
        try:
            data = await request.body()
        except ClientDisconnect:
            raise ClientGone from None
        if not data:
            raise InvalidRequest("", "the body is missing; send a JSON object")
        if not _is_json(request.headers.get("content-type", "")):
            raise InvalidRequest(
                "", "the body must be a JSON object, sent with Content-Type: application/json"
            )
        read = functools.partial(read_body, data, kind, convert, refuses_unknown=self._refuses_unknown)
        if len(data) <= self._long_body:
            result, unknown = await self._threads.run(len(data), read)
        else:
            work = self._long_reader.read(len(data), read, deadline_s=deadline_s, arrived=arrived)
            result, unknown = await request.app.state.in_flight.run(request.receive, work)
        for name in unknown:
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                log.warning("left out the field %r of a request: the API has none of this name", name)
        return result


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (subtype == "json" or subtype.endswith("+json"))
