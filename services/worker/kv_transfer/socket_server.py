"""Serves this worker's KV blocks over plain TCP: a thread accepts, and each connection has one of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from services.worker.kv_transfer.exports import ExportTable, LeaseGone
from services.worker.kv_transfer.frames import (
    CHUNK_BYTES,
    MAX_REASON_BYTES,
    REQUEST_BYTES,
    SILENCE_S,
    WAITING_S,
    BrokenFrame,
    FrameHead,
    FrameKind,
    PullRequest,
    checksum_of,
    receive_into,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
UNKNOWN_LEASE_S = 60.0
"""Seconds for which a puller may wait for a lease that is not here yet: its prompt may still wait for other prompts."""
_BACKLOG = 16


class BlockServer:
    """Owned by the worker's `KvTransferService`, which runs one while the worker serves."""

    def __init__(self, exports_now: Callable[[], tuple[bytes, ExportTable] | None]) -> None:
        """`exports_now`: returns the layout, 32 bytes, and the blocks of the current session; None: there is none."""
        self._exports_now = exports_now
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        """Pulls that are being served."""
        return len(self._connections)

    def bind(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        threading.Thread(target=self._accept, args=(self._listener,), name="kv-accept", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            connections = [*self._connections]
        if self._listener is not None:
            _shut(self._listener)
            self._listener.close()
        for connection in connections:
            _shut(connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a connection for KV blocks was not accepted: %s", error)
                time.sleep(WAITING_S)  # such as too many open files
                continue
            with self._lock:
                is_full = self._is_closed or len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answer(connection)
        except (OSError, BrokenFrame) as error:  # the puller notices, and computes itself
            log.info("a pull of KV blocks broke: %s", error)
        except Exception:
            log.exception("a pull of KV blocks failed by a bug")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        message = bytearray(REQUEST_BYTES)
        receive_into(connection, memoryview(message))
        request = PullRequest.from_bytes(bytes(message))
        now = self._exports_now()
        if now is None:
            _refuse(connection, "this worker has no engine")
        elif now[0] != request.layout:
            _refuse(connection, "the layouts of the two workers' blocks differ")
        else:
            try:
                _send_blocks(connection, request, now[1])
            except LeaseGone as gone:
                _refuse(connection, str(gone), is_spoiled=gone.is_spoiled)


def _send_blocks(connection: socket.socket, request: PullRequest, exports: ExportTable) -> None:
    """Send block after block, each once it is computed. Raises LeaseGone."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    unknown_until, was_known = time.monotonic() + UNKNOWN_LEASE_S, False
    for index in range(request.first_index, request.first_index + request.num_blocks):
        while (block_hash := exports.wait_for(request.lease, index, WAITING_S, was_known=was_known)) is None:
            was_known = was_known or exports.is_known(request.lease)
            if not was_known and time.monotonic() > unknown_until:
                raise LeaseGone("no such lease")
            connection.sendall(FrameHead(FrameKind.WAITING).to_bytes())
        was_known = True
        for offset in range(0, exports.block_bytes, CHUNK_BYTES):
            content = buffer[: min(CHUNK_BYTES, exports.block_bytes - offset)]
            exports.copy(request.lease, index, offset, content)
            head = FrameHead(FrameKind.CHUNK, index, offset, len(content), block_hash, checksum_of(content))
            connection.sendall(head.to_bytes())
            connection.sendall(content)
        exports.note_sent(request.lease, index + 1)


def _refuse(connection: socket.socket, why: str, *, is_spoiled: bool = False) -> None:
    content = why.encode()[:MAX_REASON_BYTES]
    kind = FrameKind.SPOILED if is_spoiled else FrameKind.REFUSED
    head = FrameHead(kind, num_bytes=len(content), checksum=checksum_of(memoryview(content)))
    connection.sendall(head.to_bytes() + content)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
