"""Reads the bodies of requests, each where its length does not hold up other requests.

    up to 8 kB       here, on the event loop
    up to 256 kB     on a thread
    longer           in a child process: thousands of small objects hold the interpreter's lock for 0.1 s a MB and more

A child process gives back what the route makes of the body. Of a conversation that is the messages as JSON, checked.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from triptych.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest
from triptych_services.frontend.http.body import Body, ClientGone, read_body
from triptych_services.frontend.offload.fair_threads import FairThreads
from triptych_services.frontend.offload.limited_process import KeptProcesses, ProcessEnded
from triptych_services.frontend.requests.parse import MAX_DEADLINE_S

log = logging.getLogger(__name__)

LONG_BODY = 256 << 10
"""Bytes above which a body is read in a child process."""
READ_LIMIT_S = 15.0
"""CPU time that a body may take in a child process."""
MAX_WARNED = 256  # names of unknown fields
# 8 kB hold at most 270 messages, which are read in about 3 ms.
_INLINE_BYTES = 8192
_NUM_PROCESSES = 2  # of which one tenant has one, so that the next is not behind its bodies
_SCRIPT = Path(__file__).with_name("body_process.py")

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class BodyReader:
    """Reads bodies for the routes; owned by the app. Bound to one event loop."""

    def __init__(
        self, *, refuses_unknown: bool = True, long_body: int = LONG_BODY, limit_s: float = READ_LIMIT_S
    ) -> None:
        """
        Args:
            refuses_unknown: Fields that the API does not have are refused. Otherwise they are left out, with one
                warning in the log for each name.
            long_body: Bytes above which a body is read in a child process.
            limit_s: CPU time that a body may take in a child process.
        """
        self._refuses_unknown = refuses_unknown
        self._long_body = long_body
        self._limit_s = limit_s
        self._warned: set[str] = set()
        # One thread: readers of JSON hold the interpreter's lock, so that a second one would only slow the loop.
        self._threads = FairThreads(1, inline_size=_INLINE_BYTES, what="long bodies")
        self._waiting_threads = FairThreads(_NUM_PROCESSES, inline_size=0, what="very long bodies")
        """Wait for the child processes."""
        self._processes = KeptProcesses(_SCRIPT, num_kept=1)

    async def read(
        self, request: Request, kind: type[B], convert: Callable[[B], T], *, deadline_s: float | None = None
    ) -> T:
        """Return what `convert` makes of the request's body.

        Args:
            convert: A function of a module, perhaps with arguments by `functools.partial`: it may be called in another
                process.
            deadline_s: Time that a body may wait for a child process and take there. None: any.

        Raises:
            InvalidRequest: The body is no JSON object, or takes too much time or memory. Errors of its fields are in
                `Body.violations`.
            QueueFull: Too many long bodies wait to be read.
            DeadlineExceeded: The time is over.
            EngineUnavailable: The child process ended twice.
            ClientGone: The client left.
        """
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
            work = self._read_in_child(len(data), read, deadline_s)
            result, unknown = await request.app.state.in_flight.run(request.receive, work)
        for name in unknown:
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                log.warning("left out the field %r of a request: the API has none of this name", name)
        return result

    async def _read_in_child(self, size: int, read: Callable[[], T], deadline_s: float | None) -> T:
        has_deadline = deadline_s is not None and 0 < deadline_s <= MAX_DEADLINE_S  # others are refused later
        try:
            async with asyncio.timeout(deadline_s if has_deadline else None):
                return await self._waiting_threads.run(size, self._ask, size, read)
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline of {deadline_s:g} s has passed") from None

    def _ask(self, size: int, read: Callable[[], T]) -> T:
        """Return what `read` returns in a child process, or raise what it raises there."""
        try:
            answer = self._processes.ask({}, self._limit_s, pickle.dumps(read))
        except ProcessEnded as error:
            if error.was_late:
                why = f"more time to read than the limit of {self._limit_s:g} s; make it shorter"
                raise InvalidRequest("", f"the {size} bytes of the body take {why}") from None
            raise EngineUnavailable(
                "the process that reads long bodies ended before it had read this one; try again"
            ) from None
        outcome: Any = pickle.loads(answer["data"])
        if "error" not in answer:
            result: T = outcome
            return result
        if isinstance(outcome, MemoryError):
            why = "the body takes more memory to read than there is; make it shorter"
            raise InvalidRequest("", why) from None
        raise outcome


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (subtype == "json" or subtype.endswith("+json"))
