"""Addresses at which an engine finds a worker: one, or those of a pool, which it tries in turn."""

from __future__ import annotations

import asyncio
import random

from triptych.errors import EngineUnavailable
from triptych.rpc.addresses import Resolve, read_addresses, resolve

OPTION = "engine.worker_address"
_LOOK_UP_S = 2.0  # that one look-up of a name may take
_FIRST_ANSWER_S, _MAX_ANSWER_S = 2.0, 10.0  # for a worker of a pool to answer, doubling with each round


class WorkerAddresses:
    """The addresses that `engine.worker_address` names, and the one of them that is dialed.

    One host:port is that worker for good. Several, or `dns:name:port`, are a pool of which the engine takes any worker
    that no other engine holds. It stays with its worker until that worker fails it.

        choose ──► keep (welcomed) ──► choose: the same again
          ▲  │ refused, held, silent       │ the worker is gone
          └──┴──────── pass_over ◄─────────┘

    Owned by the executor.
    """

    def __init__(self, text: str, *, resolve: Resolve = resolve) -> None:
        """
        Raises:
            ConfigError: The text is no list of addresses.
        """
        self._text = text
        self._listed, self._names = read_addresses(text, option=OPTION)
        self._resolve = resolve
        self.is_pool = bool(self._names) or len(self._listed) > 1
        self.current = "" if self.is_pool else self._listed[0]
        """The address that is or was dialed last, host:port. Empty: none of the pool was."""
        self._is_kept = False
        self._untried: list[str] = []
        """Addresses that this round has left, the next one last."""
        self._answer_s = _FIRST_ANSWER_S

    @property
    def answer_s(self) -> float | None:
        """Seconds within which a worker of a pool must answer before the next one is tried. None: no limit."""
        return self._answer_s if self.is_pool else None

    async def choose(self) -> str:
        """Return the address to dial for a new session.

        Raises:
            EngineUnavailable: The names have no address now, or could not be looked up.
        """
        if not self.is_pool or self._is_kept:
            return self.current
        if not self._untried:
            self._untried = await self._begin_round()
        self.current = self._untried.pop()
        return self.current

    def keep(self) -> None:
        """Note that the worker at the current address has taken this engine."""
        self._is_kept, self._untried, self._answer_s = True, [], _FIRST_ANSWER_S

    def pass_over(self) -> None:
        """Note that the worker at the current address does not serve this engine: another one is next."""
        self._is_kept = False

    async def is_listed(self, address: str) -> bool:
        """Return whether an address still belongs to the pool. A name that cannot be looked up is taken to."""
        if not self._names or address in self._listed:
            return True
        try:
            return address in await self._look_up()
        except EngineUnavailable:
            return True

    async def _begin_round(self) -> list[str]:
        addresses = {*self._listed, *await self._look_up()}
        if not addresses:
            raise EngineUnavailable(f"{OPTION}: {self._text} has no address now")
        others = [address for address in addresses if address != self.current]
        random.shuffle(others)  # engines that start together do not ask the same worker first
        if others and self.current in addresses:
            self._answer_s = min(2 * self._answer_s, _MAX_ANSWER_S)
        # The one that was tried last is tried after all others.
        return [self.current, *others] if self.current in addresses else others

    async def _look_up(self) -> set[str]:
        addresses = set[str]()
        for host, port in self._names:
            try:
                async with asyncio.timeout(_LOOK_UP_S):
                    addresses.update(await self._resolve(host, port))
            except (OSError, TimeoutError) as error:
                raise EngineUnavailable(f"{OPTION}: {host} cannot be looked up: {error!r}") from None
        return addresses
