"""A TCP proxy that holds every byte back for a fixed time in each direction: a distant machine on this one.

    python benchmarks/delay_proxy.py TARGET_PORT DELAY_MS     prints its own port, then serves until killed

It delays and does not throttle: what is on its way does not wait for what went before. Two threads per
direction, since an event loop's timers are no finer than a millisecond.
"""

from __future__ import annotations

import argparse
import ctypes
import queue
import socket
import threading
import time

_CHUNK = 1 << 16
_PR_SET_TIMERSLACK = 29  # linux/prctl.h; a thread's sleeps are late by this much, 50 us by default
_BACKLOG = 16


def _pump(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Carry bytes from `source` to `sink` until either ends."""
    on_their_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_deliver, args=(on_their_way, sink), daemon=True).start()
    while True:
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        on_their_way.put((time.monotonic() + delay_s, data))
        if not data:
            return


def _deliver(on_their_way: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    while True:
        due_at, data = on_their_way.get()
        time.sleep(max(0.0, due_at - time.monotonic()))
        try:
            if data:
                sink.sendall(data)
            else:
                sink.shutdown(socket.SHUT_WR)
                return
        except OSError:
            return


def serve(target_port: int, delay_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", target_port))
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink, delay_s), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target_port", type=int)
    parser.add_argument("delay_ms", type=float, help="one way")
    arguments = parser.parse_args()
    serve(arguments.target_port, arguments.delay_ms / 1000)


if __name__ == "__main__":
    main()
