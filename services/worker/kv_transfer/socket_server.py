"""Serves this worker's KV blocks over plain TCP, to any peer that knows the name of a lease.

    connection ──► asking: 0.2 s, no thread ──► request ──► known lease:    one of 64 places, with a thread
                   the oldest leaves for new ones     └───► unknown lease:  one of 8 of them, until it is known
                                                            no place:       busy, ask again

A lease's name is a secret, so a peer that names one that is here is what it claims to be. All others share the rest,
and cannot keep it from a place.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from triptych_services.worker.kv_transfer.exports import ExportTable, LeaseGone
from triptych_services.worker.kv_transfer.frames import (
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
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Pulls that are served at once."""
MAX_UNKNOWN = 8
"""Places among them for leases that are not here yet."""
MAX_UNKNOWN_PER_PEER = 4
MAX_ASKING = 64
"""Connections without their request yet."""
MAX_ASKING_PER_PEER = 16
REQUEST_S = 0.2
"""Seconds in which a connection must send its request."""
UNKNOWN_LEASE_S = 60.0
"""Seconds for which a puller may wait for a lease that is not here yet: its prompt may still wait for other prompts."""
_BACKLOG = 64
_CLOSE_S = 1.0
"""Seconds that closing waits for the port to be free."""


@dataclass(slots=True, eq=False)
class _Asking:
    """A connection without its whole request yet."""

    connection: socket.socket
    peer: str
    """Its host."""
    until: float
    """When it must have come, on the monotonic clock."""
    received: bytearray = field(default_factory=bytearray)


class BlockServer:
    """Owned by the worker's `KvTransferService`, which runs one while the worker serves."""

    def __init__(self, exports_now: Callable[[], tuple[bytes, ExportTable] | None]) -> None:
        """`exports_now`: returns the layout, 32 bytes, and the blocks of the current session; None: there is none."""
        self._exports_now = exports_now
        self._thread: threading.Thread | None = None
        self._places = _Places()
        self._stop_reader, self._stop_writer = socket.socketpair()

    def bind(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        listener = socket.create_server((host, port), backlog=_BACKLOG)
        listener.setblocking(False)
        bound_port = int(listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, args=(listener,), name="kv-accept", daemon=True)
        self._thread.start()
        return bound_port

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._places.close()
        with suppress(OSError):  # it is closed already
            self._stop_writer.send(b"\0")
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self, listener: socket.socket) -> None:
        """Accept connections and read their requests, until the server is closed."""
        asking: dict[socket.socket, _Asking] = {}  # by arrival
        with listener, self._stop_reader, self._stop_writer, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)

            def leave(item: _Asking) -> None:
                del asking[item.connection]
                selector.unregister(item.connection)

            while not self._places.is_closed:
                oldest = next(iter(asking.values()), None)
                timeout_s = None if oldest is None else max(oldest.until - time.monotonic(), 0.0)
                for key, _ in selector.select(timeout_s):
                    if key.fileobj is listener:
                        if (item := _accept(listener)) is not None:
                            asking[item.connection] = item
                            selector.register(item.connection, selectors.EVENT_READ, item)
                    elif key.data is not None and self._read(key.data):
                        leave(key.data)
                while (late := _first_to_leave(asking.values())) is not None:
                    leave(late)
                    late.connection.close()
        for item in asking.values():
            item.connection.close()

    def _read(self, item: _Asking) -> bool:
        """Read more of a request, and serve it once it is whole. Return whether nothing more is to be read."""
        connection = item.connection
        try:
            part = connection.recv(REQUEST_BYTES - len(item.received))
            item.received += part
            if part and len(item.received) < REQUEST_BYTES:
                return False
            if part:
                self._place(connection, item.peer, PullRequest.from_bytes(bytes(item.received)))
            else:
                connection.close()
        except BlockingIOError:
            return False
        except (OSError, BrokenFrame) as error:
            log.info("no pull of KV blocks came from %s: %s", item.peer, error)
            connection.close()
        return True

    def _place(self, connection: socket.socket, peer: str, request: PullRequest) -> None:
        """Serve a request on a thread of its own, or answer that it is not served."""
        now = self._exports_now()
        if now is None or now[0] != request.layout:
            why = (
                "this worker has no engine"
                if now is None
                else "the layouts of the two workers' blocks differ"
            )
            _send_reason(connection, FrameKind.REFUSED, why)
            connection.close()
            return
        exports = now[1]
        if not self._places.take(connection, peer, is_known=exports.is_known(request.lease)):
            _send_reason(connection, FrameKind.BUSY)
            connection.close()
            return
        threading.Thread(
            target=self._serve, args=(connection, request, exports), name="kv-serve", daemon=True
        ).start()

    def _serve(self, connection: socket.socket, request: PullRequest, exports: ExportTable) -> None:
        try:
            connection.settimeout(SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send_blocks(connection, request, exports, lambda: self._places.note_known(connection))
        except LeaseGone as gone:
            _send_reason(connection, FrameKind.SPOILED if gone.is_spoiled else FrameKind.REFUSED, str(gone))
        except OSError as error:  # the puller notices, and computes itself
            log.info("a pull of KV blocks broke: %s", error)
        except Exception:
            log.exception("a pull of KV blocks failed by a bug")
        finally:
            self._places.leave(connection)
            connection.close()


class _Places:
    """The pulls that are served. Any thread may call it."""

    def __init__(self) -> None:
        self._connections: set[socket.socket] = set()
        self._unknown: dict[socket.socket, str] = {}
        """Those of them without their lease yet -> host of the peer."""
        self._lock = threading.Lock()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._connections)

    def take(self, connection: socket.socket, peer: str, *, is_known: bool) -> bool:
        """Return whether there is a place for a pull, which takes it then."""
        with self._lock:
            num_of_peer = sum(other == peer for other in self._unknown.values())
            may_wait = len(self._unknown) < MAX_UNKNOWN and num_of_peer < MAX_UNKNOWN_PER_PEER
            if self.is_closed or len(self._connections) >= MAX_CONNECTIONS or not (is_known or may_wait):
                return False
            self._connections.add(connection)
            if not is_known:
                self._unknown[connection] = peer
            return True

    def note_known(self, connection: socket.socket) -> None:
        """Note that the lease that a pull has waited for is here."""
        with self._lock:
            self._unknown.pop(connection, None)

    def leave(self, connection: socket.socket) -> None:
        """Give a place back."""
        with self._lock:
            self._connections.discard(connection)
            self._unknown.pop(connection, None)

    def close(self) -> None:
        """End all pulls, and give no place any more."""
        with self._lock:
            self.is_closed = True
            connections = [*self._connections]
        for connection in connections:
            with suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> _Asking | None:
    """Return the next connection, None if it is gone again."""
    try:
        connection, address = listener.accept()
    except BlockingIOError:
        return None
    except OSError as error:
        log.warning("a connection for KV blocks was not accepted: %s", error)
        time.sleep(REQUEST_S)  # such as too many open files
        return None
    connection.setblocking(False)
    return _Asking(connection, str(address[0]), time.monotonic() + REQUEST_S)


def _first_to_leave(asking: Collection[_Asking]) -> _Asking | None:
    """Return a connection that is late or one too many, None if there is none.

    Of too many, the peer with most of them loses its oldest: a puller sends its request at once.

    Args:
        asking: By arrival.
    """
    oldest = next(iter(asking), None)
    if oldest is None or oldest.until <= time.monotonic():
        return oldest
    ((peer, count),) = Counter(item.peer for item in asking).most_common(1)
    if count <= MAX_ASKING_PER_PEER and len(asking) <= MAX_ASKING:
        return None
    return next(item for item in asking if item.peer == peer)


def _send_blocks(
    connection: socket.socket, request: PullRequest, exports: ExportTable, on_known: Callable[[], None]
) -> None:
    """Send block after block, each once it is computed.

    Args:
        on_known: Called when the lease is here.

    Raises:
        LeaseGone: No more will be sent.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    unknown_until, was_known = time.monotonic() + UNKNOWN_LEASE_S, False
    for index in range(request.first_index, request.first_index + request.num_blocks):
        while (block_hash := exports.wait_for(request.lease, index, WAITING_S, was_known=was_known)) is None:
            was_known = was_known or exports.is_known(request.lease)
            if not was_known and time.monotonic() > unknown_until:
                raise LeaseGone("no such lease")
            if was_known:
                on_known()
            connection.sendall(FrameHead(FrameKind.WAITING).to_bytes())
        was_known = True
        on_known()
        num_bytes = exports.num_bytes(request.lease, index)
        for offset in range(0, num_bytes, CHUNK_BYTES):
            content = buffer[: min(CHUNK_BYTES, num_bytes - offset)]
            exports.copy(request.lease, index, offset, content)
            head = FrameHead(FrameKind.CHUNK, index, offset, len(content), block_hash, checksum_of(content))
            connection.sendall(head.to_bytes())
            connection.sendall(content)
        exports.note_sent(request.lease, index + 1)


def _send_reason(connection: socket.socket, kind: FrameKind, why: str = "") -> None:
    """Send the frame that ends a pull; a peer that does not take it has no use for it."""
    content = why.encode()[:MAX_REASON_BYTES]
    head = FrameHead(kind, num_bytes=len(content), checksum=checksum_of(memoryview(content)))
    with suppress(OSError):
        connection.sendall(head.to_bytes() + content)
