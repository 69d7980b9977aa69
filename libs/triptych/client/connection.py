"""The frontend of an `LLM` or `AsyncLLM`, which may be of a stack of its own, and its admin server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

from triptych.client.admin_client import AdminClient
from triptych.client.dialer import check_address
from triptych.client.grpc_client import GenerationClient
from triptych.config import EngineConfig, TlsConfig
from triptych.errors import ConfigError, EngineUnavailable
from triptych.launcher.launch import (
    CONNECT_TIMEOUT_S,
    READY_TIMEOUT_S,
    launch,
    request_model,
    stack_config,
)
from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.channel import ADDRESS_ENV, ADMIN_ADDRESS_ENV


class Connection:
    """Starts a stack or connects to one, once. Belongs to the event loop that it is started on."""

    def __init__(
        self,
        model: str | None,
        *,
        address: str | None,
        admin_address: str | None,
        api_key: str | None,
        tls: TlsConfig | None,
        metadata: Mapping[str, str] | None,
        ready_timeout_s: float | None,
        overrides: dict[str, Any],
    ) -> None:
        """See `LLM`."""
        address = os.environ.get(ADDRESS_ENV) or None if address is None else address or None
        if admin_address is not None and address is None:
            raise ConfigError("admin_address: only with address; a stack of our own has one by itself")
        if admin_address is None:
            admin_address = os.environ.get(ADMIN_ADDRESS_ENV) or None
        for given in filter(None, (address, admin_address)):
            check_address(given)
        self._config = stack_config(model, address, overrides)
        self._address = address
        self._admin_address = admin_address
        self.model_name = request_model(model, address)
        """The model that requests name; empty where the stack serves only one."""
        self._access: dict[str, Any] = {
            "api_key": api_key,
            "tls": tls if self._config is None else self._config.tls,
            "metadata": metadata,
        }
        self._ready_timeout_s = ready_timeout_s
        self._cluster: LocalCluster | None = None
        self._client: GenerationClient | None = None
        self._admin: AdminClient | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> GenerationClient:
        """Start the stack or connect to it, unless that is done, and return the client.

        Raises:
            ConfigError, ModelError, ModelNotFound, EngineUnavailable: There is no server; says why.
        """
        async with self._starting:
            if self._client is None:
                if self._config is not None and self._cluster is None:
                    self._cluster = await _launch_on_thread(self._config, self._ready_timeout_s)
                address = self._cluster.address if self._cluster else str(self._address)
                self._client = await GenerationClient.connect(
                    address, self._ready_timeout_s or CONNECT_TIMEOUT_S, **self._access
                )
            return self._client

    async def admin(self) -> AdminClient:
        """Return the client of the admin server.

        Raises:
            ConfigError: The server is not ours, and its address was not given.
        """
        await self.start()
        if self._admin is None:
            address = self._admin_address if self._cluster is None else self._cluster.admin_address
            if address is None:
                raise ConfigError(
                    "admin_address: give it with address; this call goes to the frontend's admin port "
                    "(frontend.admin_port), as 127.0.0.1:50050"
                )
            self._admin = AdminClient(address, **self._access)
        return self._admin

    def check(self) -> None:
        """Raise what took our own stack down, if anything did."""
        if self._cluster is not None:
            self._cluster.check()

    async def disconnect(self) -> LocalCluster | None:
        """Abort what runs and hang up; returns the stack if it is ours, for the caller to stop."""
        clients, cluster = self.detach()
        for client in clients:
            await client.close()
        return cluster

    def detach(self) -> tuple[list[GenerationClient | AdminClient], LocalCluster | None]:
        """Forget clients and stack, and return them for the caller to close and to stop."""
        clients = [client for client in (self._client, self._admin) if client is not None]
        cluster, self._client, self._admin, self._cluster = self._cluster, None, None, None
        return clients, cluster


async def _launch_on_thread(config: EngineConfig, ready_timeout_s: float | None) -> LocalCluster:
    """`launch` without blocking the loop; cancelled, it returns when nothing is left running."""
    is_cancelled = threading.Event()

    def check() -> None:
        if is_cancelled.is_set():
            raise EngineUnavailable("the start was cancelled")

    launching = asyncio.create_task(
        asyncio.to_thread(launch, config, ready_timeout_s=ready_timeout_s or READY_TIMEOUT_S, check=check)
    )
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        is_cancelled.set()
        try:
            cluster = await launching
        except Exception:  # ours, or another reason not to have started
            raise asyncio.CancelledError from None
        await asyncio.to_thread(cluster.stop)
        raise
