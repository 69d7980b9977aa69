"""The place of a process in its worker group, as it is known when all ranks have met. Needs no torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """One rank among those that have met."""

    generation: str
    """The group's identity, which its leader draws at its start."""
    hosts: tuple[str, ...]
    """The machine or container of each rank, by rank; see `host_name`."""
    rank: int
    store_address: str
    """Address at which torch.distributed meets, host:port."""
    store_fd: int | None = None
    """Rank 0: the listening socket of that address."""

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks that share this machine or container."""
        return self.hosts.count(self.hosts[self.rank])


def host_name() -> str:
    """Return a name of this machine or container that no other has."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot_id = ""
    return f"{socket.gethostname()}/{boot_id}"


def split_address(address: str, *, port_may_be_free: bool = False) -> tuple[str, int]:
    """Return host and port of `parallel.rendezvous_address`.

    Args:
        port_may_be_free: Whether port 0 may stand for any free port.

    Raises:
        ConfigError: It is not host:port; names it.
    """
    host, _, port = address.rpartition(":")
    lowest = 0 if port_may_be_free else 1
    if not host or not port.isdecimal() or not lowest <= int(port) < 1 << 16:
        raise ConfigError(
            f"parallel.rendezvous_address: {address!r} is not host:port with a port of {lowest} to 65535; "
            "name a host and a free port of rank 0's machine"
        )
    return host.strip("[]"), int(port)
