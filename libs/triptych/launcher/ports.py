"""The ports of a local stack: those that its clients know, and any free ones for the rest."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import fields, replace

from triptych.config import EngineConfig
from triptych.errors import ConfigError

INTERNAL_PORTS = ("engine.port", "worker.port")
"""Options of ports that only the services of the stack dial."""
_SECTIONS = ("frontend", "engine", "worker")
_HOST_OF = {"metrics_port": "metrics_host", "admin_port": "admin_host", "admin_http_port": "admin_host"}
"""Option of a port -> option of its address; `host` for others."""
_REASONS = {
    errno.EADDRINUSE: (
        "in use",
        "end what listens there, perhaps another stack, or choose other ports: 0 is any free one",
    ),
    errno.EADDRNOTAVAIL: ("no address of this machine", "0.0.0.0 is all of them"),
    errno.EACCES: ("not allowed", "ports below 1024 are often the system's; choose others"),
}
"""Number of an error -> the reason and the remedy, in words."""


def with_free_ports(config: EngineConfig) -> EngineConfig:
    """Return the config with every port a free one, so that any number of stacks fit on a machine."""
    leaves = {
        leaf: replace(
            getattr(config, leaf),
            **{f.name: 0 for f in fields(getattr(config, leaf)) if f.name.endswith("port")},
        )
        for leaf in _SECTIONS
    }
    return replace(config, **leaves)


def with_free_internal_ports(config: EngineConfig, said: Collection[str]) -> EngineConfig:
    """Return the config with a free port wherever only the stack itself dials it.

    Args:
        said: Keys that the user has set; these ports stay.
    """
    for key in INTERNAL_PORTS:
        leaf, name = key.split(".")
        if key not in said:
            config = replace(config, **{leaf: replace(getattr(config, leaf), **{name: 0})})
    return config


def check_ports(config: EngineConfig) -> None:
    """Raise ConfigError if ports of a stack are taken; names all of them, before anything is started."""
    problems = []
    remedies = set()
    with contextlib.ExitStack() as held:
        for key, host, port in _used_ports(config):
            try:
                held.enter_context(_bind(host, port))
            except OSError as error:
                why, remedy = _REASONS.get(error.errno or 0, (os.strerror(error.errno or 0), ""))
                problems.append(f"{key} {host}:{port} ({why})")
                remedies.add(remedy)
    if problems:
        advice = "".join(f"; {remedy}" for remedy in sorted(remedies) if remedy)
        raise ConfigError(f"ports that cannot be used: {', '.join(problems)}{advice}")


def _used_ports(config: EngineConfig) -> Iterator[tuple[str, str, int]]:
    """Yield key, address and number of each port that is used; 0 is any free one."""
    for leaf in _SECTIONS:
        section = getattr(config, leaf)
        for item in fields(section):
            key = f"{leaf}.{item.name}"
            if not item.name.endswith("port") or not _is_used(config, key):
                continue
            yield key, getattr(section, _HOST_OF.get(item.name, "host")), getattr(section, item.name)


def _is_used(config: EngineConfig, key: str) -> bool:
    uses = {
        "frontend.http_port": config.frontend.serve_http,
        "frontend.admin_http_port": config.frontend.serve_admin_http,
        "worker.kv_transfer_port": config.worker.kv_transfer,
    }
    return uses.get(key, True)


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port; raises OSError if it is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:  # the service says so in its own words
        return socket.socket()
    held = socket.socket(family, kind, protocol)
    try:
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: what has just ended counts not
        held.bind(address)
        held.listen(1)  # Linux lets two bind with SO_REUSEADDR as long as neither listens
    except OSError:
        held.close()
        raise
    return held
