"""A TCP proxy between two workers that delays, cuts, silences or damages what goes to the puller."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Damage = Callable[[int, bytes], bytes | None]
"""Given how many bytes have passed and the next ones, returns what passes instead; None: the connection is cut."""


def flip_bit(at: int) -> Damage:
    """Flip one bit of byte `at` of what is sent to the puller."""

    def damage(passed: int, data: bytes) -> bytes:
        if not passed <= at < passed + len(data):
            return data
        changed = bytearray(data)
        changed[at - passed] ^= 1 << (at % 8)
        return bytes(changed)

    return damage


def cut(at: int) -> Damage:
    """End the connection before byte `at`."""
    return lambda passed, data: data if passed + len(data) <= at else None


def silence(at: int) -> Damage:
    """Let nothing pass from byte `at` on, and keep the connection."""

    def damage(passed: int, data: bytes) -> bytes:
        if passed + len(data) <= at:
            return data
        threading.Event().wait()
        raise AssertionError

    return damage


def slow(bytes_per_s: float) -> Damage:
    """Let so many bytes pass in a second."""

    def damage(passed: int, data: bytes) -> bytes:
        time.sleep(len(data) / bytes_per_s)
        return data

    return damage


class KvProxy:
    """Its `damage` applies to connections that begin after it was set."""

    def __init__(self) -> None:
        self.target: tuple[str, int] = ("127.0.0.1", 0)
        self.damage: Damage = lambda passed, data: data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                puller, _ = self._listener.accept()
                self.num_connections += 1
                try:
                    server = socket.create_connection(self.target)
                except OSError:
                    puller.close()
                    continue
                threading.Thread(target=self._copy, args=(puller, server, None), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, puller, self.damage), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, damage: Damage | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 14):
                out = data if damage is None else damage(passed, data)
                passed += len(data)
                if out is None:
                    break
                sink.sendall(out)
        for connection in (source, sink):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@contextmanager
def kv_proxy() -> Iterator[KvProxy]:
    proxy = KvProxy()
    try:
        yield proxy
    finally:
        proxy.close()
