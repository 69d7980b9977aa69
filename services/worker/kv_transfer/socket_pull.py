"""Pulls KV blocks from another worker over plain TCP, on a thread per pull."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from services.worker.kv_transfer.base import PullSink, PullStopped
from services.worker.kv_transfer.frames import (
    CHUNK_BYTES,
    HEAD_BYTES,
    SILENCE_S,
    BrokenFrame,
    FrameHead,
    FrameKind,
    PullRequest,
    checksum_of,
    receive_into,
)

log = logging.getLogger(__name__)

_CONNECT_S = 2.0


class SocketPulls:
    """A `PullTransport`."""

    def __init__(self, layout: bytes) -> None:
        """`layout`: 32 bytes, of this worker's blocks."""
        self._layout = layout

    def begin(self, sink: PullSink, block_bytes: int) -> Callable[[], None]:
        pull = _SocketPull(sink, self._layout, block_bytes)
        threading.Thread(target=pull.run, name=f"kv-pull-{sink.pull.pull_id}", daemon=True).start()
        return pull.interrupt


class _SocketPull:
    """One pull. Its thread runs `run`."""

    def __init__(self, sink: PullSink, layout: bytes, block_bytes: int) -> None:
        self._sink = sink
        self._layout = layout
        self._block_bytes = block_bytes
        self._connection: socket.socket | None = None
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Wake the thread from what it waits for. Any thread may call it."""
        self._is_interrupted = True
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
        pull = self._sink.pull
        host, _, port = pull.address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            self._connection = connection
            if self._is_interrupted:
                return
            connection.settimeout(SILENCE_S)
            request = PullRequest(self._layout, pull.lease, pull.first_index, len(pull.block_ids))
            connection.sendall(request.to_bytes())
            self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        pull, sink = self._sink.pull, self._sink
        head_bytes = memoryview(bytearray(HEAD_BYTES))
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for place in range(len(pull.block_ids)):
            offset = 0
            while offset < self._block_bytes:
                receive_into(connection, head_bytes)
                head = FrameHead.from_bytes(head_bytes)
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
            sink.note_blocks(place + 1)

    def _check(self, head: FrameHead, place: int, offset: int) -> None:
        """Raise BrokenFrame unless this is the chunk that is due."""
        pull = self._sink.pull
        index = pull.first_index + place
        if (head.index, head.offset) != (
            index,
            offset,
        ) or not 0 < head.num_bytes <= self._block_bytes - offset:
            raise BrokenFrame(
                f"bytes {head.offset} to {head.offset + head.num_bytes} of block {head.index}, but block {index} is "
                f"due from {offset} on"
            )
        if head.block_hash != pull.hashes[place]:
            raise BrokenFrame(f"block {index} is of another prompt")
