"""Messages of a server to its client in one session, over all the session's streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from triptych.errors import EngineFailure, ProtocolViolation
from triptych.rpc.session.replay_buffer import ReplayBuffer

MessageT = TypeVar("MessageT")
NoticeT = TypeVar("NoticeT")


class Outbox(Generic[MessageT, NoticeT]):
    """Messages and notices for one client. Written by the server's core, read by one stream at a time.

    Messages are numbered and kept until the client confirms them. A notice says what holds now: only the latest one
    is sent, before the messages that wait, and it is not kept.

        put ──► [confirmed] [sent] [not sent] ──► the stream that reads
    """

    def __init__(self, *, max_messages: int = 1 << 62, max_bytes: int = 1 << 62) -> None:
        """`max_messages`, `max_bytes`: above them the client is too far behind, and the session cannot go on."""
        self._buffer: ReplayBuffer[MessageT] = ReplayBuffer(max_messages=max_messages, max_bytes=max_bytes)
        self._limits = f"{max_messages} messages or {max_bytes} bytes"
        self._reader: _Reader | None = None
        """The stream that reads, or None."""
        self._notice: NoticeT | None = None
        self._repeats: list[int] = []
        """Numbers of messages to be sent again."""
        self._error: Exception | None = None
        """Error that closed the outbox, or None."""
        self._changed = asyncio.Event()
        self.is_closed = False
        self.is_overrun = False
        """A message found the outbox full. The session cannot go on."""

    @property
    def last_number(self) -> int:
        """Number of the last message. 0: there was none."""
        return self._buffer.last_number

    def put(self, message: MessageT, num_bytes: int = 0) -> None:
        """Send a message, and keep it until it is confirmed."""
        if self.is_closed or self.is_overrun:
            return
        if self._buffer.is_full:
            self.is_overrun, self._notice = True, None
            self._buffer.clear()
        else:
            self._buffer.append(message, num_bytes)
        self._changed.set()

    def notify(self, notice: NoticeT) -> None:
        """Send a notice, which replaces one that is not sent yet."""
        if not self.is_closed and not self.is_overrun:
            self._notice = notice
            self._changed.set()

    def repeat(self, number: int) -> None:
        """Send a message again if it is still kept."""
        if self._buffer.num_confirmed < number <= self._buffer.last_number:
            self._repeats.append(number)
            self._changed.set()

    def confirm(self, number: int) -> None:
        """Forget the messages up to this number: the client has them.

        Raises:
            ProtocolViolation: There is no such message yet.
        """
        if not self.is_overrun:
            self._buffer.confirm(number)

    def can_resume_after(self, number: int) -> bool:
        """Return whether a client that has the messages up to this number loses nothing by going on here."""
        return not self.is_closed and not self.is_overrun and self._buffer.can_replay_after(number)

    def close(self, error: Exception | None = None) -> None:
        """End the session's streams behind what is not sent yet, with `error` if that is given."""
        if not self.is_closed:
            self.is_closed, self._error = True, error
        self._changed.set()

    def messages(self) -> AsyncIterator[MessageT | NoticeT]:
        """Return what is not confirmed, then what comes. The stream that read before gets nothing more.

        The iterator ends when `stop_reading` is called, or behind the last message once the outbox is closed. It raises
        what either was given, EngineFailure if the outbox is overrun, and ProtocolViolation if a newer stream reads.
        """
        self.stop_reading(ProtocolViolation("a newer stream has taken this one's place in its session"))
        self._repeats.clear()
        self._reader = reader = _Reader()
        return self._read(reader)

    def stop_reading(self, error: Exception | None = None) -> None:
        """End the stream that reads now, if there is one; with `error` if that is given."""
        if self._reader is not None:
            self._reader.is_stopped, self._reader.error = True, error
            self._reader = None
            self._changed.set()

    async def _read(self, reader: _Reader) -> AsyncIterator[MessageT | NoticeT]:
        buffer, changed = self._buffer, self._changed
        last_sent = 0
        while not reader.is_stopped:
            if self._notice is not None:
                notice, self._notice = self._notice, None
                yield notice
            elif (number := max(last_sent, buffer.num_confirmed) + 1) <= buffer.last_number:
                last_sent = number
                yield buffer.get(number)
            elif self._repeats:
                repeated = self._repeats.pop(0)
                if repeated > buffer.num_confirmed:
                    yield buffer.get(repeated)
            elif self.is_overrun:
                raise EngineFailure(f"the client is more than {self._limits} behind")
            elif self._error is not None:
                raise self._error
            elif self.is_closed:
                return
            else:
                changed.clear()
                await changed.wait()
        if reader.error is not None:
            raise reader.error


class _Reader:
    """One stream that reads, or has read."""

    __slots__ = ("error", "is_stopped")

    def __init__(self) -> None:
        self.is_stopped = False
        self.error: Exception | None = None
        """Error that stopped it, or None."""
