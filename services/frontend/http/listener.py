"""The socket of an HTTP server, bound before the modules that serve it are imported."""

from __future__ import annotations

import socket

from triptych.errors import ConfigError

BACKLOG = 2048
# A host that vanished without a word is noticed after 30 + 3 * 10 s, for its request holds KV blocks.
_TCP_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


def listen(
    host: str, port: int, option: str, *, shares_port: bool = False, takes_connections: bool = True
) -> socket.socket:
    """Return a listening socket. Connections wait in its queue until they are accepted.

    Args:
        shares_port: Siblings listen on the port, too (SO_REUSEPORT). Without it a second server on a port must fail,
            and not share it.
        takes_connections: Otherwise it only holds the port, and does not listen.

    Raises:
        ConfigError: The port is taken or the address is not ours; names the option.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT, not past a listener
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these
        for keepalive, value in _TCP_KEEPALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, keepalive, value)
        listener.bind(address)
        if takes_connections:
            listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"{option}: cannot bind {host}:{port} ({error.strerror}); another process has it, or the address "
            "is not ours"
        ) from None
    return listener
