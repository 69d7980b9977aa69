"""HTTP connections with bounds that uvicorn does not have: on their time, their number and the size of headers.

connect ─► waits for a request ─► answered ─► waits for the next ─► … ─► closed by the server
           │ bytes without any of a body: MAX_HEAD_BYTES, else 431       └ client_timeout_s to read the rest
           │ requests behind the one that is answered: MAX_PIPELINED, else closed
           │ client_timeout_s, else closed
           └ at max_connections, or at max_per_address: the one (of its address) that waits longest gives way
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import functools
import ipaddress
import logging
import termios
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych.errors import EngineUnavailable, PermissionDenied, QueueFull
from triptych.rpc.tls import ServerTls
from triptych_services.frontend.http.errors import json_response, to_http_error

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Bytes that may come without any of a body among them: request line and headers, or trailers."""
CUT = "triptych.cut"
"""Extension of the ASGI scope. Its `cut` closes the connection behind what was sent of an answer, so that the client
sees it break off as if the server had died."""
WRITER = "triptych.writer"
"""Extension of the ASGI scope: an `AnswerWriter` for the answer to this request."""
GOODBYE_S = 1.0
"""Seconds for last words to reach a client: a close with unread bytes is a reset, which can overtake them."""
MAX_PIPELINED = 16
"""Requests that may wait on one connection behind the one that is being answered. Few clients send any."""
_PIECE_BYTES = 16 << 10  # parsed at once; so much more than MAX_HEAD_BYTES may be taken
_MAX_GOODBYES = 64  # refused connections that are still open; more are closed without an answer


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one HTTP server."""

    client_timeout_s: float = 60.0
    """Seconds for a request to arrive whole, or without a client that reads anything of its answer."""
    max_connections: int = 8192
    max_per_address: int = 0
    """Connections of one IPv4 address, or of one /64 of IPv6. 0: as many as of all."""


class Connections:
    """The connections of one HTTP server, and which of them wait for a request."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._addresses: dict[BoundedConnection, str] = {}
        """Each connection that was admitted, and its address."""
        self._num_of_address = Counter[str]()
        self._waiting: dict[BoundedConnection, None] = {}
        """Those that wait for a request, in the order in which they began to."""
        self._waiting_of_address: dict[str, dict[BoundedConnection, None]] = {}
        """The same for each address that has any."""
        self._num_refused = 0

    def admit(self, connection: BoundedConnection) -> bytes | None:
        """Count a connection. Return the answer that refuses it, or None if it may stay."""
        address = _network_of(connection.client[0] if connection.client else "")
        most = self._limits.max_per_address
        if most and self._num_of_address[address] >= most:
            if not self._make_room(self._waiting_of_address.get(address, {})):
                return _ADDRESS_FULL
        elif len(self._addresses) >= self._limits.max_connections and not self._make_room(self._waiting):
            return _FULL
        self._addresses[connection] = address
        self._num_of_address[address] += 1
        self.set_waiting(connection, True)
        return None

    def _make_room(self, waiting: dict[BoundedConnection, None]) -> bool:
        """Close the first of these, unless there is none; return whether there was."""
        longest = next(iter(waiting), None)
        if longest is None:
            return False
        self.remove(longest)
        longest.give_way()
        return True

    def remove(self, connection: BoundedConnection) -> None:
        """Forget a connection, unless that has been done before."""
        if (address := self._addresses.get(connection)) is None:
            return
        self.set_waiting(connection, False)
        del self._addresses[connection]
        self._num_of_address[address] -= 1
        if not self._num_of_address[address]:
            del self._num_of_address[address]

    def set_waiting(self, connection: BoundedConnection, is_waiting: bool) -> None:
        """Say whether a connection waits for a request, rather than for an answer."""
        if (address := self._addresses.get(connection)) is None:
            return
        if is_waiting:
            self._waiting.setdefault(connection)
            self._waiting_of_address.setdefault(address, {}).setdefault(connection)
        elif connection in self._waiting:
            del self._waiting[connection]
            of_address = self._waiting_of_address[address]
            del of_address[connection]
            if not of_address:
                del self._waiting_of_address[address]

    def begin_goodbye(self) -> bool:
        """Return whether one more refused connection may stay open for its answer to arrive."""
        if self._num_refused >= _MAX_GOODBYES:
            return False
        self._num_refused += 1
        return True

    def end_goodbye(self) -> None:
        """Count a refused connection as closed."""
        self._num_refused -= 1


class AnswerWriter:
    """Writes pieces of an answer straight into its connection: no coroutine, no ASGI message for each.

    Only between the beginning and the end of an answer that is sent in chunks, both of which are ASGI's.
    """

    def __init__(self, connection: BoundedConnection, cycle: RequestResponseCycle) -> None:
        # The scope has this writer, and the cycle the scope: an ended request is to be freed at once.
        self._connection = weakref.proxy(connection)
        self._cycle = weakref.proxy(cycle)

    @property
    def is_writable(self) -> bool:
        """Whether the client reads what is sent. Otherwise what is written now waits in memory."""
        return not self._connection.flow.write_paused

    def on_writable(self, function: Callable[[], None] | None) -> None:
        """Have a function called each time that it becomes writable. None: no more."""
        self._connection.on_writable = function

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty; nothing where the client has left."""
        cycle = self._cycle
        if cycle.disconnected or cycle.transport.is_closing():
            return
        assert cycle.chunked_encoding, "the answer has begun, and is sent in chunks"
        assert not cycle.response_complete, "its end is not sent yet"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class BoundedConnection(HttpToolsProtocol):
    """One connection of uvicorn's, within `ConnectionLimits`.

    The coroutine that answers a client that reads nothing is cancelled.
    """

    def __init__(
        self,
        *arguments: Any,
        limits: ConnectionLimits,
        connections: Connections,
        tls: ServerTls | None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._client_timeout_s = limits.client_timeout_s
        self._others = connections
        self._tls = tls
        self.on_writable: Callable[[], None] | None = None
        """See `AnswerWriter`, of the answer that is being sent."""
        self._is_refused = False
        self._num_head_bytes = 0
        """Bytes since the last of a body, or since a message began or ended."""
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the last that has come."""
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._goodbye: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        refusal = self._why_not_client() or self._others.admit(self)
        if refusal is not None:
            self._refuse(refusal)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            if self._arrival is None and not self._is_answering:
                self._expect_request()  # empty lines before a request count as a part of it
            piece = data[start : start + _PIECE_BYTES]
            self._num_head_bytes += len(piece)
            super().data_received(piece)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)
            elif len(self.pipeline) > MAX_PIPELINED:
                log.warning(
                    "closed the connection of %s, with more than %d requests behind one another",
                    self.client,
                    MAX_PIPELINED,
                )
                self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._others.remove(self)
        for timer in (self._arrival, self._stall, self._closing):
            self._cancel(timer)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the client has reset the connection
        if self._goodbye is not None:
            self._goodbye.cancel()
            self._others.end_goodbye()
        super().connection_lost(error)
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def give_way(self) -> None:
        """Close the connection, which waits for a request, since another one needs its place."""
        if self.transport.get_write_buffer_size():
            self.transport.close()  # when the last answer is sent
            self._closing = self.loop.call_later(GOODBYE_S, self.transport.abort)
        else:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The cycle has the scope: see `AnswerWriter`.
        cut = functools.partial(BoundedConnection._cut, weakref.proxy(self))
        self.scope["extensions"] = {CUT: {"cut": cut}}
        self._num_head_bytes = 0
        self._expect_request()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            self.scope["extensions"][WRITER] = AnswerWriter(self, self.cycle)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_head_bytes = 0
        self._cancel(self._arrival)
        self._arrival = None
        if not self.cycle.response_complete:
            self._others.set_waiting(self, False)
        else:  # the answer came before the end of the body
            self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._others.set_waiting(self, True)
        if self.transport.is_closing():
            self._expect_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_closing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._stall)
        if self.on_writable is not None:
            self.on_writable()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _cut(self) -> None:
        self.transport.close()
        self._expect_closing()

    def _expect_closing(self) -> None:
        """Wait for the client to read the rest of the last answer, without which a connection does not close."""
        self._cancel(self._closing)
        self._closing = self.loop.call_later(self._client_timeout_s, self._on_open_still, self._num_unread())

    def _on_open_still(self, num_unread_before: int) -> None:
        if self._num_unread() < num_unread_before:
            self._expect_closing()
        else:
            self._drop("did not read its answer")

    def _why_not_client(self) -> bytes | None:
        """Return the answer to a client whose certificate is not one of those asked for, or None."""
        if self._tls is not None:
            try:
                self._tls.check_certificate(self.transport.get_extra_info("peercert") or {})
            except PermissionDenied as error:
                return _to_bytes(error)
        return None

    def _refuse(self, answer: bytes) -> None:
        """Answer and close, reading nothing more."""
        self._is_refused = True
        if self._is_answering or not self._others.begin_goodbye():
            self.transport.abort()
            return
        self.transport.write(answer)
        self.transport.pause_reading()
        self._goodbye = self.loop.call_later(GOODBYE_S, self.transport.abort)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        self._cancel(self._arrival)
        self._arrival = self.loop.call_later(self._client_timeout_s, self._on_late_request)

    def _on_late_request(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            self._expect_request()  # it waits behind one that is being answered: the client is not late
            return
        self._drop("did not send a whole request")

    def _expect_reading(self) -> None:
        self._stall = self.loop.call_later(self._client_timeout_s, self._on_stall, self._num_unread())

    def _on_stall(self, num_unread_before: int) -> None:
        if self._num_unread() < num_unread_before:
            self._expect_reading()  # it reads slowly
        else:
            self._drop("did not read its answer")

    def _num_unread(self) -> int:
        """Bytes that wait here, and in the kernel for the client's machine to take them."""
        in_kernel = array.array("i", [0])
        if (descriptor := self.transport.get_extra_info("socket").fileno()) >= 0:
            fcntl.ioctl(descriptor, termios.TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + in_kernel[0]

    def _drop(self, what: str) -> None:
        log.warning(
            "closed the connection of %s, which %s for %g s", self.client, what, self._client_timeout_s
        )
        self.transport.abort()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def _network_of(host: str) -> str:
    """Return what counts as one address: one of IPv4, or a /64 of IPv6, any address of which one client may take."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else str(ipaddress.ip_network((address, 64), strict=False))
    return host


def _to_bytes(error: Exception) -> bytes:
    """Return the answer to a request that no route will see."""
    refusal = to_http_error(error, "")
    answer = json_response(refusal.body, headers=refusal.headers)
    headers = {**answer.headers, "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = f"{refusal.status} {HTTPStatus(refusal.status).phrase}"
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + bytes(answer.body)


_FULL = _to_bytes(EngineUnavailable("this server has as many connections as it may have; try again"))
_ADDRESS_FULL = _to_bytes(
    QueueFull(
        "this address has as many connections as one may have, and all are being answered; try again", 1
    )
)
_HEAD_TOO_LARGE = _to_bytes(
    HTTPException(
        431, f"the request line and the headers are above the limit {MAX_HEAD_BYTES} bytes (64 KiB)"
    )
)
