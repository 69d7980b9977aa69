"""One client's HTTP connection, which ends when its client keeps the server waiting for too long."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with two deadlines, which uvicorn does not have.

    A request must have arrived whole `client_timeout_s` after the connection was made or its first byte came. A
    client that reads nothing of an answer for so long is dropped; whoever makes the answer learns that it has left.
    """

    def __init__(self, *arguments: Any, client_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._client_timeout_s = client_timeout_s
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel(self._arrival)
        self._cancel(self._stall)
        super().connection_lost(error)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._cancel(self._arrival)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._stall)

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
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
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
