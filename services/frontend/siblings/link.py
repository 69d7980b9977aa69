"""Messages between the processes of one frontend and the one that supervises them.

    process 0 ══╗
    process 1 ══╬══ supervisor      ══  a pair of sockets, inherited: it has no name that another program could dial
    process 2 ══╝

Both ends of a pair ask and answer. A question to the other processes goes by the supervisor, which passes it on unread.
A process that has died is an end that is closed, so nothing here is dialed twice, acknowledged or resumed. Messages are
pickled, as those of Python's own `multiprocessing` are: parent and child are one program of one user.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

_LENGTH_BYTES = 4

Handle: TypeAlias = Callable[[str, tuple[Any, ...]], Any]
"""Takes a method and its arguments. Returns the answer, or a coroutine that does."""


class LinkClosed(Exception):
    """The process at the other end is gone."""


class _Kind(IntEnum):
    """The four messages."""

    TELL = 0
    ASK = 1
    ANSWER = 2
    FAILURE = 3


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one process among its siblings, as the supervisor gives it at its start."""

    descriptor: int
    """Its end of the pair of sockets."""
    index: int
    count: int
    """Number of processes."""
    is_late: bool
    """It takes the place of one that has died: the others have its share of the connections until it is ready."""

    @property
    def name(self) -> str:
        """The name in the log."""
        return f"frontend/{self.index}"


class Link:
    """One end of a pair of sockets. Bound to one event loop."""

    def __init__(self, handle: Handle) -> None:
        """`handle`: Answers what the other end asks; what it tells has no answer. Messages are taken in their order."""
        self._handle = handle
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        """Number of a question -> its answer to come."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, end: socket.socket) -> None:
        """Take messages until the other end is closed. What waits for an answer then fails with LinkClosed."""
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                self._take(*pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writer.close()
            self._writer = None
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(LinkClosed())
            for task in self._tasks:
                task.cancel()

    def tell(self, method: str, *arguments: Any) -> None:
        """Send what needs no answer. It is lost if the other end is gone."""
        self._send(_Kind.TELL, 0, method, arguments)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Return the answer of the other end.

        Raises:
            LinkClosed: It is gone.
        """
        if self._writer is None:
            raise LinkClosed
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(_Kind.ASK, number, method, arguments)
        try:
            return await answer
        finally:
            del self._waiting[number]

    def _send(self, kind: _Kind, number: int, method: str, content: Any) -> None:
        if self._writer is None:
            return
        data = pickle.dumps((int(kind), number, method, content), pickle.HIGHEST_PROTOCOL)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def _take(self, kind: int, number: int, method: str, content: Any) -> None:
        if kind in (_Kind.ANSWER, _Kind.FAILURE):
            answer = self._waiting.get(number)
            if answer is None or answer.done():  # its asker waits no longer
                return
            if kind == _Kind.FAILURE:
                answer.set_exception(RuntimeError(f"{method}: {content}"))
            else:
                answer.set_result(content)
            return
        try:
            result = self._handle(method, content)
        except Exception as error:
            self._fail(kind, number, method, error)
            return
        if isinstance(result, Coroutine):
            task = asyncio.create_task(self._answer_later(kind, number, method, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif kind == _Kind.ASK:
            self._send(_Kind.ANSWER, number, method, result)

    async def _answer_later(
        self, kind: int, number: int, method: str, work: Coroutine[Any, Any, Any]
    ) -> None:
        try:
            result = await work
        except Exception as error:
            self._fail(kind, number, method, error)
            return
        if kind == _Kind.ASK:
            self._send(_Kind.ANSWER, number, method, result)

    def _fail(self, kind: int, number: int, method: str, error: Exception) -> None:
        """Report a bug here, and there as well where an answer is waited for."""
        log.error("a message of another process, %s, could not be handled: %r", method, error, exc_info=error)
        if kind == _Kind.ASK:
            self._send(_Kind.FAILURE, number, method, repr(error))
