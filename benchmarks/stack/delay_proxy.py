"""A TCP proxy that holds every byte back for a fixed time in each direction, as a distant machine does.

    python -m benchmarks.stack.delay_proxy TARGET_PORT DELAY_MS     says its own port, then serves until killed

It delays and does not throttle: bytes on their way do not wait for those before them. Two threads per direction,
since an event loop's timers are no finer than a millisecond.
"""

from __future__ import annotations

import ctypes
import queue
import socket
import sys
import threading
import time

from benchmarks.harness.processes import Answers

_CHUNK = 1 << 16
_PR_SET_TIMERSLACK = 29  # linux/prctl.h; a thread's sleeps are late by this much, 50 us by default
_BACKLOG = 16


def serve(target_port: int, delay_s: float) -> None:
    answers = Answers()
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        answers.write({"port": listener.getsockname()[1]})
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", target_port))
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_receive, args=(source, sink, delay_s), daemon=True).start()


def _receive(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Queue the bytes of `source` for `sink`, each chunk with the time when it is due, until either ends."""
    chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_deliver, args=(chunks, sink), daemon=True).start()
    data = b"."
    while data:
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        chunks.put((time.monotonic() + delay_s, data))


def _deliver(chunks: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    try:
        while True:
            due_at, data = chunks.get()
            time.sleep(max(0.0, due_at - time.monotonic()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
    except OSError:
        return


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3)
