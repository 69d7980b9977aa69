"""Whether the other ranks of a group live. A rank that is gone ends all, since collective operations would hang.

The leader and each follower send each other beats, on a socket and a thread of their own: neither an event loop that is
busy nor a runner thread that waits in an operation keeps a beat from being sent. A connection that ends is noticed at
once. One that is silent, because its process was stopped or its network has failed, is noticed within
`parallel.silence_timeout_s`.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from triptych.types.exit_codes import ExitCode

log = logging.getLogger(__name__)

BEATS = 5
"""Beats that are missed in a row before a rank counts as silent."""
STARTING_SILENCE_S = 60.0
"""While a rank loads: libraries of a GPU are loaded with the interpreter's lock held, from a disk that may be slow."""
_RANK = struct.Struct(">I")
_BEAT = b"\x01"


def end_process(why: str) -> NoReturn:
    """End this process at once, whatever its threads wait for."""
    log.error("%s; this rank ends, and all of them start anew", why)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(ExitCode.HUNG)


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    connection: socket.socket | None = None
    num_silent_beats: int = 0


class Liveness:
    """Beats between this rank and its peers: of the leader all followers, of a follower the leader.

    Created and stopped on the event loop; a thread of its own does the rest.
    """

    def __init__(
        self,
        silence_timeout_s: float,
        *,
        listener: socket.socket | None = None,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """
        Args:
            silence_timeout_s: For how long a rank that serves may be silent.
            listener: Of the leader: where followers' beats come in.
            on_lost: Called on the thread, once, with what is lost.
        """
        self._beat_s = silence_timeout_s / BEATS
        self._limit = max(BEATS, round(STARTING_SILENCE_S / self._beat_s))
        """Beats that may be missed in a row."""
        self._listener = listener
        self._on_lost = on_lost
        self._peers: dict[int, _Peer] = {}
        """Rank -> its connection."""
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._is_stopping = threading.Event()
        self._may_end = threading.Event()

    @property
    def port(self) -> int:
        """Port at which followers' beats come in."""
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def start(self, rank_to_name: Mapping[int, str]) -> None:
        """Expect these ranks' connections, and beats from then on. Of the leader."""
        assert self._listener is not None
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers = {rank: _Peer(name) for rank, name in rank_to_name.items()}
        self._thread.start()

    def start_to_leader(self, connection: socket.socket, *, rank: int) -> None:
        """Send beats to the leader, and expect its own. Of a follower.

        Args:
            connection: Connected to the leader's `listener`.
        """
        connection.sendall(_RANK.pack(rank))
        self._peers = {0: _Peer("rank 0, the leader,")}
        self._add(self._peers[0], connection)
        self._thread.start()

    def tighten(self) -> None:
        """Note that the group serves: from now on a rank may be silent for `silence_timeout_s` only."""
        self._limit = BEATS

    def let_end(self) -> None:
        """Take the end or the silence of a peer for what was asked of it. The others get beats until `stop`."""
        self._may_end.set()

    def stop(self) -> None:
        """Stop watching for the ends of the others, and close the connections to them."""
        self._is_stopping.set()

    def _run(self) -> None:
        try:
            next_beat = time.monotonic()
            while not self._is_stopping.is_set():
                for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                    self._receive(key)
                if time.monotonic() >= next_beat:
                    # Counted in turns of this loop: time for which the whole machine stood still (a laptop that
                    # slept) counts against none.
                    self._beat()
                    next_beat = time.monotonic() + self._beat_s
        except _Lost as lost:
            if not self._is_stopping.is_set():
                self._on_lost(str(lost))
        finally:
            self._selector.close()
            for peer in self._peers.values():
                if peer.connection is not None:
                    peer.connection.close()
            if self._listener is not None:
                self._listener.close()

    def _receive(self, key: selectors.SelectorKey) -> None:
        if self._listener is not None and key.fileobj is self._listener:
            connection, _ = self._listener.accept()
            connection.settimeout(self._beat_s)
            try:
                rank = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))[0]
                self._add(self._peers[rank], connection)
            except (OSError, struct.error, KeyError):  # a stranger
                connection.close()
            return
        peer: _Peer = key.data
        assert peer.connection is not None
        try:
            beats = peer.connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            beats = b""
        if not beats:
            self._lose(peer, "is gone")
        peer.num_silent_beats = 0

    def _add(self, peer: _Peer, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _beat(self) -> None:
        for peer in list(self._peers.values()):
            peer.num_silent_beats += 1
            if peer.num_silent_beats >= self._limit:
                self._lose(peer, f"has been silent for {self._limit * self._beat_s:g} s")
            try:
                if peer.connection is not None:
                    peer.connection.send(_BEAT)
            except BlockingIOError:
                pass  # it reads nothing, and is found silent
            except OSError:
                self._lose(peer, "is gone")

    def _lose(self, peer: _Peer, how: str) -> None:
        """End with a loss, or forget the peer if it may end."""
        if not self._may_end.is_set():
            raise _Lost(f"{peer.name} {how}") from None
        self._peers = {rank: other for rank, other in self._peers.items() if other is not peer}
        if peer.connection is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            peer.connection = None


class _Lost(Exception):
    """A rank is lost; says which and how."""
