"""Addresses of servers as operators write them: `host:port`, or `dns:name:port` for every address that a name has."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from triptych.errors import ConfigError

_DNS = "dns:"

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""Host and port to addresses, host:port each; none where the name does not exist."""


class ServiceName(NamedTuple):
    """A name with one address record for each server, as that of a headless Service."""

    host: str
    port: int


def read_addresses(text: str, *, option: str) -> tuple[list[str], list[ServiceName]]:
    """Return the addresses and the names in a comma-separated list.

    Args:
        option: Name of the config option that holds the list, for errors.

    Raises:
        ConfigError: An entry is neither host:port nor dns:name:port, or there is none.
    """
    addresses, names = [], []
    for entry in dict.fromkeys(part.strip() for part in text.split(",") if part.strip()):
        host, _, port = entry.removeprefix(_DNS).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{option}: {entry!r} is neither host:port nor dns:name:port, with a port of 1..65535"
            )
        if entry.startswith(_DNS):
            names.append(ServiceName(host, int(port)))
        else:
            addresses.append(entry)
    if not addresses and not names:
        raise ConfigError(f"{option}: names no address; give host:port or dns:name:port, comma-separated")
    return addresses, names


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name; those of IPv4, if it has any, since one server may have both.

    Raises:
        OSError: No resolver could be asked.
    """
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    hosts = [sockaddr[0] for family, _, _, _, sockaddr in entries if family == socket.AF_INET]
    return [f"{host}:{port}" for host in hosts] or [
        f"[{sockaddr[0]}]:{port}" for family, _, _, _, sockaddr in entries if family == socket.AF_INET6
    ]
