"""Finds the engines of this frontend: those that are listed, and those that a name resolves to."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from triptych.rpc.addresses import Resolve, read_addresses, resolve
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.routing.router import Router

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Seconds between two look-ups of a name."""
MAX_DIALED = 64
"""Engines that are dialed for the first time at once: a fleet that starts together is not held up by itself."""
_LOOK_UP_S = 10.0  # that one look-up may take
_FIRST_DIAL_S = 2.0  # after which an engine that does not answer makes room for the next
_JITTER_S = 0.1
_POLL_S = 0.02


class EngineDiscovery:
    """The engines that the router chooses from. Owned by the app, which runs `run` as long as it serves.

    A look-up only adds engines: an answer may be incomplete. An engine goes when its session is over, its stream is not
    to be had again, and its name does not resolve to it any more.
    """

    def __init__(
        self,
        text: str,
        router: Router,
        create: Callable[[str], EngineClient],
        *,
        work: Sequence[Callable[[EngineClient], Coroutine[Any, Any, None]]] = (EngineClient.run,),
        resolve: Resolve = resolve,
    ) -> None:
        """Begin with the engines that are listed.

        Args:
            text: As `frontend.engine_addresses`.
            create: Makes the client of an engine, given its address.
            work: What is done with each engine until it goes.
            resolve: Looks a name up.

        Raises:
            ConfigError: As `read_addresses` says.
        """
        self._listed, self._names = read_addresses(text, option="frontend.engine_addresses")
        self._router = router
        self._create = create
        self._work = work
        self._resolve = resolve
        self._clients: dict[str, EngineClient] = {address: create(address) for address in self._listed}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._dialed = asyncio.Semaphore(MAX_DIALED)
        self._publish()

    async def run(self) -> None:
        """Serve the engines that are known and look for others, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for client in self._clients.values():
                self._start(client, group)
            while self._names:
                await self._look(group)
                await asyncio.sleep(INTERVAL_S * random.uniform(0.9, 1.1))

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Look all names up once. Where one cannot be looked up, no engine goes."""
        found, is_complete = set(self._listed), True
        for name in self._names:
            try:
                async with asyncio.timeout(_LOOK_UP_S):
                    found.update(await self._resolve(name.host, name.port))
            except OSError as error:  # TimeoutError is one
                is_complete = False
                log.warning("dns:%s:%d was not looked up: %s", name.host, name.port, error or "no answer")
        for address in sorted(found - self._clients.keys()):
            log.info("engine at %s found", address)
            client = self._clients[address] = self._create(address)
            self._start(client, group)
        gone = [
            address
            for address, client in self._clients.items()
            if is_complete and address not in found and not client.dialer.has_session
        ]
        for address in gone:
            log.info("engine %s at %s is gone", self._clients[address].name, address)
            del self._clients[address]
            for task in self._tasks.pop(address):
                task.cancel()
        if gone or found - set(self._listed):
            self._publish()

    def _start(self, client: EngineClient, group: asyncio.TaskGroup) -> None:
        self._tasks[client.address] = [
            group.create_task(self._work_on(client, group), name=f"engine-{client.address}")
        ]

    async def _work_on(self, client: EngineClient, group: asyncio.TaskGroup) -> None:
        """Dial an engine when it is its turn, and do the work."""
        async with self._dialed:
            if len(self._clients) > MAX_DIALED:
                await asyncio.sleep(random.uniform(0, _JITTER_S))
            tasks = [group.create_task(work(client)) for work in self._work]
            self._tasks[client.address] += tasks
            ends_at = asyncio.get_running_loop().time() + _FIRST_DIAL_S
            while client.welcome is None and asyncio.get_running_loop().time() < ends_at:
                await asyncio.sleep(_POLL_S)

    def _publish(self) -> None:
        self._router.engines = list(self._clients.values())
        self._router.on_change()
