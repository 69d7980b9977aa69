"""A gRPC server as every tier runs it: health, reflection, limits, one error table, drain."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from triptych.errors import ConfigError
from triptych.rpc.channel import KEEPALIVE, message_limits
from triptych.rpc.health import NOT_SERVING, SERVING, Health
from triptych.rpc.interceptors import server_interceptors
from triptych.rpc.tls import ServerTls

log = logging.getLogger(__name__)

_MAX_CALLS = 4096  # each costs its server some kilobytes, whatever it waits for
_HEALTH_SET_TIMEOUT_S = 1.0  # a watcher that does not read holds health's lock


class RpcServer:
    """One gRPC server. Health: `""` is alive, each service's name is ready.

    Owned by a service's app: add servicers to `.grpc`, then `bind`, `start`, `set_ready`, and at the end
    `set_ready(False)` and `stop`.
    """

    def __init__(
        self,
        *,
        services: Sequence[str],
        limit_bytes: int,
        other_services: Mapping[str, bool] = MappingProxyType({}),
        max_connection_age_s: float = 0.0,
        max_connections: int = 0,
        max_calls_per_connection: int = _MAX_CALLS,
        client_timeout_s: float = 0.0,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: ServerTls | None = None,
        shares_port: bool = False,
    ) -> None:
        """Make a server that is bound to nothing yet.

        Args:
            services: Full names of the services that are healthy while `set_ready` says so.
            other_services: Full names of services with a health of their own, and whether that is SERVING.
            max_connection_age_s: Connections are asked to end after so long; their calls finish. 0: never.
            max_connections: One more is closed. 0: any number.
            max_calls_per_connection: Clients let more of them wait (HTTP/2's MAX_CONCURRENT_STREAMS).
            client_timeout_s: Connections end that take longer to say hello. 0: gRPC's own limit.
            interceptors: In front of those that every server has, outermost first.
            tls: None: plain text.
            shares_port: Several processes are bound to its port (SO_REUSEPORT), each with a share of the connections.
        """
        self._tls = tls
        optional = {
            "grpc.max_connection_age_ms": round(max_connection_age_s * 1000),
            "grpc.max_allowed_incoming_connections": max_connections,
            "grpc.server_handshake_timeout_ms": round(client_timeout_s * 1000),
        }
        self.grpc = grpc.aio.server(
            interceptors=(*interceptors, *server_interceptors(None if tls is None else tls.check_peer)),
            options=(
                *message_limits(limit_bytes),
                *KEEPALIVE,
                ("grpc.so_reuseport", int(shares_port)),
                ("grpc.max_concurrent_streams", max_calls_per_connection),
                # Calls that no handler has taken yet. Above the first limit gRPC cancels some, above the second all.
                ("grpc.server.max_pending_requests", max(_MAX_CALLS, max_calls_per_connection)),
                ("grpc.server.max_pending_requests_hard_limit", max(_MAX_CALLS, max_calls_per_connection)),
                *((name, value) for name, value in optional.items() if value),
            ),
        )
        self._other_services = dict(other_services)
        self._services = tuple(services)
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (
            *services,
            *other_services,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self.grpc)
        self.is_ready = False
        self.is_dead = False
        """The process cannot do its work any more."""

    def bind(self, host: str, port: int, *, option: str) -> int:
        """Bind and return the port.

        Args:
            port: 0 for any free one.
            option: the config key of the port, for the error.

        Raises:
            ConfigError: the port is taken or not ours; names it.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self.grpc.add_insecure_port(address)
            else:
                bound = self.grpc.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"{option}: cannot bind {address}; another process has it, or the address is not ours ({error})"
            ) from None
        return int(bound)

    async def start(self) -> None:
        await self.set_ready(False)
        for name, is_serving in self._other_services.items():
            await self._set_health(name, is_serving)
        await self.grpc.start()

    async def set_ready(self, is_ready: bool) -> None:
        """Flip the readiness of every service; `""` stays as it is."""
        self.is_ready = is_ready
        for name in self._services:
            await self._set_health(name, is_ready)

    async def set_dead(self) -> None:
        """Report that this process cannot do its work any more: `""` turns NOT_SERVING."""
        self.is_dead = True
        await self.set_ready(False)
        for name in ("", *self._other_services):
            await self._set_health(name, False)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` to end, cancel the rest."""
        await self.grpc.stop(grace_s)

    async def _set_health(self, name: str, is_serving: bool) -> None:
        try:
            async with asyncio.timeout(_HEALTH_SET_TIMEOUT_S):
                await self._health.set(name, SERVING if is_serving else NOT_SERVING)
        except TimeoutError:
            log.warning("a health watcher of %r does not read; it may have missed a change", name)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a port that is bound to a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def write_ready_file(path: Path | None, ports: Mapping[str, int]) -> None:
    """Write the bound ports as JSON, atomically, for the process that has started this one.

    Raises:
        ConfigError: it cannot be written; names it.
    """
    if path is None:
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"pid": os.getpid(), **ports}, file)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: cannot be written ({error.strerror or error})") from None


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; call it on the loop that shall wait for it."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
