"""Pulls KV blocks from another worker over plain TCP, on a thread per pull."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from triptych_services.worker.kv_transfer.base import PullSink, PullStopped
from triptych_services.worker.kv_transfer.frames import (
    CHUNK_BYTES,
    HEAD_BYTES,
    SILENCE_S,
    BrokenFrame,
    ConnectionEnded,
    FrameHead,
    FrameKind,
    PullRequest,
    checksum_of,
    receive_into,
)

log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_ASK_AGAIN_S = 0.25
"""Seconds until a puller asks again that found no place. It does so until its engine stops it."""
_MAX_UNANSWERED = 3
"""Connections in a row that may end without an answer: a busy machine may be late with its request."""


class SocketPulls:
    """A `PullTransport`."""

    def __init__(self, layout: bytes) -> None:
        """`layout`: 32 bytes, of this worker's blocks."""
        self._layout = layout

    def begin(self, sink: PullSink) -> Callable[[], None]:
        pull = _SocketPull(sink, self._layout)
        threading.Thread(target=pull.run, name=f"kv-pull-{sink.pull.pull_id}", daemon=True).start()
        return pull.interrupt


class _SocketPull:
    """One pull. Its thread runs `run`."""

    def __init__(self, sink: PullSink, layout: bytes) -> None:
        self._sink = sink
        self._layout = layout
        self._connection: socket.socket | None = None
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """Wake the thread from what it waits for. Any thread may call it."""
        self._interrupted.set()
        if (connection := self._connection) is not None:
            with suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            self._pull()
        except PullStopped:
            pass
        except (OSError, BrokenFrame) as error:
            self._sink.fail(f"{self._sink.pull.address}: {error or type(error).__name__}")
        except Exception as error:
            log.exception("a pull of KV blocks failed by a bug")
            self._sink.fail(repr(error))

    def _pull(self) -> None:
        """Ask until the server has a place, and receive all blocks."""
        num_unanswered = 0
        while not self._interrupted.is_set():
            head = self._ask()
            if head is not None and head.kind is not FrameKind.BUSY:
                return
            num_unanswered = 0 if head is not None else num_unanswered + 1
            if num_unanswered == _MAX_UNANSWERED:
                raise ConnectionEnded("the connection has ended before an answer")
            self._interrupted.wait(_ASK_AGAIN_S)

    def _ask(self) -> FrameHead | None:
        """Connect, ask for the blocks and receive what is sent.

        Returns:
            The head of the first frame; None: the connection has ended before it, or the pull was interrupted.
        """
        pull = self._sink.pull
        host, _, port = pull.address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            self._connection = connection
            if self._interrupted.is_set():
                return None
            connection.settimeout(SILENCE_S)
            request = PullRequest(self._layout, pull.lease, pull.first_index, len(pull.hashes))
            try:
                connection.sendall(request.to_bytes())
                head = _receive_head(connection)
            except (ConnectionEnded, ConnectionError):
                return None
            if head.kind is not FrameKind.BUSY:
                self._receive(connection, head)
            return head

    def _receive(self, connection: socket.socket, head: FrameHead) -> None:
        """Receive all blocks.

        Args:
            head: Of the first frame; its content is still to come.
        """
        pull, sink = self._sink.pull, self._sink
        buffer = memoryview(bytearray(CHUNK_BYTES))
        place, offset = 0, 0
        while True:
            content = buffer[: head.num_bytes]
            receive_into(connection, content)
            if checksum_of(content) != head.checksum and head.kind is not FrameKind.WAITING:
                raise BrokenFrame(f"the checksum of block {head.index} is wrong")
            if head.kind is FrameKind.CHUNK:
                self._check(head, place, offset)
                sink.write(place, offset, content)
                offset += head.num_bytes
            elif head.kind is not FrameKind.WAITING:
                sink.fail(
                    f"{pull.address}: {content.tobytes().decode(errors='replace')}",
                    is_spoiled=head.kind is FrameKind.SPOILED,
                )
                return
            if offset == sink.num_bytes(place):
                place, offset = place + 1, 0
                sink.note_blocks(place)
                if place == len(pull.hashes):
                    return
            head = _receive_head(connection)

    def _check(self, head: FrameHead, place: int, offset: int) -> None:
        """Raise BrokenFrame unless this is the chunk that is due."""
        pull = self._sink.pull
        index = pull.first_index + place
        num_left = self._sink.num_bytes(place) - offset
        if (head.index, head.offset) != (index, offset) or not 0 < head.num_bytes <= num_left:
            raise BrokenFrame(
                f"bytes {head.offset} to {head.offset + head.num_bytes} of block {head.index}, but block {index} is "
                f"due from {offset} on"
            )
        if head.block_hash != pull.hashes[place]:
            raise BrokenFrame(f"block {index} is of another prompt")


def _receive_head(connection: socket.socket) -> FrameHead:
    """Receive the head of the next frame."""
    head_bytes = memoryview(bytearray(HEAD_BYTES))
    receive_into(connection, head_bytes)
    return FrameHead.from_bytes(head_bytes)
