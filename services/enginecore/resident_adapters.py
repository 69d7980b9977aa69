"""The LoRA adapters that a worker holds in the host's memory: as many as fit, those that were used last.

    in memory ──► no request has it, and another needs the room ──► dropped; its name stays
        ▲                                                              │ a request names it
        └────────── read again, with the same digest ◄── its requests wait, all others go on
                                                   └───► files gone or changed: its requests fail

The worker bounds the bytes, and refuses a load that does not fit. The engine chooses what makes way, since it knows
which adapters its requests have: one with rows is never dropped, so every rank has the adapters of its rows.

Adapters are read one after the other, those of tenants in turn: the adapter of a tenant that names one waits for the
read in progress, and for no more of a tenant that names a thousand.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import (
    EngineFailure,
    EngineUnavailable,
    FeatureDisabled,
    MemoryShort,
    QueueFull,
    TriptychError,
)
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import EngineStatus, WorkerFacts
from triptych.wire.worker import adapter_from_proto
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.scheduler.policy import TURN_S
from triptych_services.enginecore.workers.base import Executor

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 330.0
"""Seconds that the worker may take for one call: more than it takes before it gives up itself."""
_POLL_S = 0.05
"""Seconds between two looks at whether an adapter has made way for one that requests wait for."""
_RETRY_S = 1.0
"""Seconds until an adapter is read again that a worker could not read for the moment."""


@dataclass(slots=True)
class _Wait:
    """An adapter that requests wait for."""

    since_s: float
    """When the first of them came, on the clock."""
    pause_s: float = 0.0
    """Seconds until the next attempt to read it. 0: none was made; `_POLL_S`: there was no memory; `_RETRY_S`: the
    worker could not."""

    @property
    def is_short(self) -> bool:
        """Whether it waits for memory."""
        return self.pause_s == _POLL_S


@dataclass(slots=True)
class _Held:
    """An adapter in the worker's memory."""

    num_bytes: int
    since_s: float
    """When it was read, on the clock."""
    used_s: float
    """When a request had it last."""


class ReadTurns:
    """The order of reads: in each round every tenant that waits has one, that which has waited for longest first."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        """Tenants that have had a read in this round, and wait for more."""

    def choose(self, since_s: Mapping[str, float], tenants: Mapping[str, set[str]]) -> str:
        """Return the digest of the adapter that is read next. Its tenants have had their turn.

        Args:
            since_s: Digest -> when requests began to wait for the adapter, at least one.
            tenants: Digest -> the tenants of these requests. One that no request has any more is missing.
        """
        waiting = {digest: tenants.get(digest, set()) for digest in since_s}
        self._served &= set().union(*waiting.values())
        candidates = [digest for digest, own in waiting.items() if not own or not own <= self._served]
        if not candidates:
            self._served.clear()
        chosen = min(candidates or waiting, key=since_s.__getitem__)
        self._served |= waiting[chosen]
        return chosen


class ResidentAdapters:
    """Owned by the engine loop. The engine core is told which adapters requests wait for before it plans with them."""

    def __init__(
        self,
        engine: EngineCore,
        executor: Executor,
        *,
        find: Callable[[str], AdapterFacts | None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engine: The engine core, which knows the requests.
            executor: The calls to the worker.
            find: Returns the adapter with a digest, which requests may have; None: it is not known any more.
            on_change: Called when requests have ceased to wait.
            clock: Monotonic time in seconds.
        """
        self._engine = engine
        self._executor = executor
        self._find = find
        self._on_change = on_change
        self._clock = clock
        self.worker: WorkerFacts | None = None
        self.turn = asyncio.Lock()
        """Held while the worker reads or frees an adapter, but for one that begins to serve."""
        self._num_workers = 0
        """Workers that have begun to serve: a load that has seen two of them is carried out again."""
        self._held: dict[str, _Held] = {}
        """By digest."""
        self._awaited: dict[str, _Wait] = {}
        """By digest."""
        self._turns = ReadTurns()
        self._leaving = ""
        """Digest of an adapter that gets no more rows and makes way when those that it has end. Empty: none."""
        self._reported: tuple[str, ...] = ()
        """Adapters without new rows, as the engine core knows them."""
        self.broken: dict[str, str] = {}
        """Digests of adapters that cannot be read again -> why."""
        self._bringing: asyncio.Task[None] | None = None
        self._dropping = asyncio.Lock()
        """Held until the worker has dropped an adapter, so that no list of what it has is out of date."""
        self._num_reads = 0
        self._num_drops = 0

    def holds(self, digest: str) -> bool:
        """Return whether rows may have an adapter."""
        return digest in self._held

    def use(self, digest: str) -> None:
        """Have the adapter of a request in memory, which waits for it.

        Raises:
            EngineFailure: It cannot be read again; says why.
        """
        if (why := self.broken.get(digest)) is not None:
            raise EngineFailure(why)
        held = self._held.get(digest)
        if held is not None:
            held.used_s = self._clock()
        elif digest not in self._awaited:
            self._await(digest)

    async def begin(self, worker: WorkerFacts) -> list[AdapterFacts]:
        """Take note of what a worker has in memory that begins to serve, and return all adapters that it knows.

        Raises:
            EngineUnavailable: It is lost again.
        """
        self.worker = worker
        self._num_workers += 1
        self._held.clear()
        async with self._dropping:
            listed = await self._call("ListAdapters")
            adapters = [adapter_from_proto(adapter) for adapter in listed.adapters]
            for facts in adapters:
                if facts.digest not in listed.absent:
                    self._note_held(facts)
        return adapters

    def serve_waiting(self) -> None:
        """Have the adapters of all requests in memory, those of a worker that was lost among them."""
        in_use = self._engine.adapters.in_use()
        now_s = self._clock()
        self._awaited = {digest: _Wait(now_s) for digest in sorted(in_use) if digest not in self._held}
        self._report()

    async def load(
        self, name: str, source: str, *, makes_room: bool = True, digest: str = ""
    ) -> AdapterFacts:
        """Have the worker read an adapter. Others make way for it, see `_victim`.

        Args:
            makes_room: Whether they do; if not, it is read only if there is room.
            digest: What requests that wait for it know it by; empty: none does.

        Raises:
            MemoryShort: There is no room, as long as those that are in memory have rows.
            TriptychError: There is no worker, or it refuses; says why.
        """
        while True:
            num_workers = self._num_workers
            try:
                answer = await self._call("LoadAdapter", name=name, source=source)
            except MemoryShort:
                victim = self._victim(digest) if makes_room else None
                if victim is None:
                    raise
                await self._drop(victim)
                continue
            facts = adapter_from_proto(answer.adapter)
            if num_workers == self._num_workers:
                self._note_held(facts)
                return facts

    async def free(self, digest: str) -> None:
        """Forget an adapter that no request has. Raises as `load` does."""
        self._held.pop(digest, None)
        self.broken.pop(digest, None)
        await self._call("UnloadAdapter", digest=digest)
        for wait in self._awaited.values():
            wait.pause_s = 0.0  # there may be room

    def add_counts(self, status: EngineStatus) -> EngineStatus:
        """Return a status with the numbers of adapters in memory."""
        return replace(
            status,
            num_resident_adapters=len(self._held),
            resident_adapter_bytes=sum(held.num_bytes for held in self._held.values()),
            num_adapter_reads=self._num_reads,
            num_adapter_drops=self._num_drops,
        )

    def close(self) -> None:
        """Read no more adapters: the engine ends."""
        if self._bringing is not None:
            self._bringing.cancel()

    async def _call(self, method: str, **fields: object) -> Any:
        if self.worker is None:
            raise EngineUnavailable("the engine has no worker yet")
        if not self.worker.max_adapters:
            raise FeatureDisabled("adapter", "worker.max_adapters is 0: no adapters are served")
        return await self._executor.call(method, timeout_s=CALL_TIMEOUT_S, **fields)

    def _note_held(self, facts: AdapterFacts) -> None:
        now_s = self._clock()
        self._held[facts.digest] = _Held(facts.num_bytes, now_s, now_s)
        self.broken.pop(facts.digest, None)

    def _victim(self, digest: str) -> str | None:
        """Return what makes way for an adapter; None: all have rows, have not had their turn, or are more urgent.

        That is the one that was used longest ago of those that no request has. If requests have all of them, it is one
        without rows that has been in memory for longest, a turn at least, so that adapters for which many requests wait
        do not drive each other out before a row is computed. It makes way for none that is less urgent.
        """
        now_s, priorities = self._clock(), self._engine.adapters.priorities()
        for each in priorities.keys() & self._held.keys():
            self._held[each].used_s = now_s
        idle = self._held.keys() - priorities.keys()
        if idle:
            return min(idle, key=lambda each: (self._held[each].used_s, each))
        running = self._engine.adapters.running()
        return next((each for each in self._in_turn(digest, priorities) if each not in running), None)

    def _in_turn(self, digest: str, priorities: Mapping[str, int]) -> list[str]:
        """Return the adapters with requests, none more urgent than those for another, that have had their turn.

        Args:
            digest: The other one.
            priorities: As of `RequestedAdapters`.

        Returns:
            Those that have been in memory for longest first.
        """
        if (own := priorities.get(digest)) is None:
            return []
        latest_s = self._clock() - TURN_S
        had_turn = (each for each, held in self._held.items() if held.since_s <= latest_s)
        return sorted(
            (each for each in had_turn if priorities.get(each, own) >= own),
            key=lambda each: (self._held[each].since_s, each),
        )

    async def _drop(self, digest: str) -> None:
        """Have the worker forget the numbers of an adapter without rows. New rows wait from here on."""
        del self._held[digest]
        if digest in self._engine.adapters.in_use():
            self._await(digest)
        async with self._dropping:
            await self._call("UnloadAdapter", digest=digest, keeps_name=True)
        self._num_drops += 1
        log.debug("adapter %s has made way for another", digest)

    def _await(self, digest: str) -> None:
        self._awaited[digest] = _Wait(self._clock())
        self._report()

    async def _bring_all(self) -> None:
        """Have the worker read the adapters that requests wait for, one after the other."""
        while self._awaited:
            if await self._bring_each() and self._awaited:
                await asyncio.sleep(min(wait.pause_s for wait in self._awaited.values()))

    async def _bring_each(self) -> bool:
        """Look once at each adapter that requests wait for, those that come meanwhile among them.

        Returns:
            Whether all were looked at. Not so after `_RETRY_S`, since those that were refused are due again.
        """
        end_s, seen = self._clock() + _RETRY_S, set[str]()
        while not seen or self._clock() < end_s:
            async with self.turn:
                rest = {digest: wait.since_s for digest, wait in self._awaited.items() if digest not in seen}
                if not rest:
                    return True
                tenants = self._engine.adapters.tenants()
                digest = self._turns.choose(rest, tenants)
                try:
                    await self._bring(digest)
                except Exception:  # a defect, which must not keep the requests for this and others waiting
                    log.exception("adapter with the digest %s cannot be read again", digest)
                    self._fail(digest, f"adapter with the digest {digest[:12]}: reading it again has failed")
                seen |= {digest, *self._behind(digest, tenants)}
        return False

    def _behind(self, digest: str, tenants: Mapping[str, set[str]]) -> Iterator[str]:
        """Yield what waits for memory behind an adapter of the same tenants, if that waits for it itself."""
        if (wait := self._awaited.get(digest)) is None or not wait.is_short:
            return
        own, priorities = tenants.get(digest, set()), self._engine.adapters.priorities()
        for each, other in self._awaited.items():
            if (
                other.is_short
                and tenants.get(each, set()) <= own
                and priorities.get(each, 0) >= priorities.get(digest, 0)
            ):
                yield each

    async def _bring(self, digest: str) -> None:
        """Have the worker read one adapter, unless no request waits for it any more.

        It is read again only when another one may make way: a refusal for lack of memory stays one until then.
        """
        if (wait := self._awaited.get(digest)) is None:
            return
        facts = self._find(digest)
        if digest in self._held or digest not in self._engine.adapters.in_use():
            self._end_wait(digest)
        elif facts is None:
            self._fail(digest, f"adapter with the digest {digest[:12]}: is not known any more")
        elif wait.is_short and self._victim(digest) is None:
            self._close_another(digest, wait)
        else:
            try:
                found = await self.load(facts.name, facts.source, digest=digest)
            except MemoryShort:
                wait.pause_s = _POLL_S
            except (EngineUnavailable, QueueFull) as error:
                wait.pause_s = _RETRY_S
                log.warning("adapter %s is not read for the moment: %s", facts.name, error)
            except TriptychError as error:
                self._fail(digest, f"adapter {facts.name!r} cannot be read again: {error}")
            else:
                await self._take(digest, facts, found)

    def _close_another(self, digest: str, wait: _Wait) -> None:
        """Let the adapter that has been in memory for longest get no more rows, if another has waited for its turn."""
        if self._leaving not in self._held and self._clock() - wait.since_s >= TURN_S:
            self._leaving = next(iter(self._in_turn(digest, self._engine.adapters.priorities())), "")
            self._report()

    async def _take(self, digest: str, facts: AdapterFacts, found: AdapterFacts) -> None:
        """Let the requests for an adapter go on if what was read is the same."""
        self._num_reads += 1
        if found.digest == digest:
            self._end_wait(digest)
            return
        self._fail(
            digest,
            f"adapter {facts.name!r}: the files at {facts.source!r} have changed since it was loaded: their digest is "
            f"{found.digest}, and was {digest}; load it again",
        )
        if self._find(found.digest) is None:
            try:
                await self.free(found.digest)
            except TriptychError as error:  # the worker is lost, and what it held with it
                log.warning("adapter %s is not freed: %s", found.digest, error)

    def _fail(self, digest: str, why: str) -> None:
        """End the requests for an adapter, and refuse those to come until it is loaded anew."""
        log.error("%s", why)
        self.broken[digest] = why
        self._engine.adapters.fail(digest, why)
        self._end_wait(digest)

    def _end_wait(self, digest: str) -> None:
        self._awaited.pop(digest, None)
        self._report()
        self._on_change()

    def _report(self) -> None:
        """Let the engine core know which adapters get no rows, and begin to read those."""
        if self._leaving not in self._held or not any(wait.is_short for wait in self._awaited.values()):
            self._leaving = ""
        reported = (*self._awaited, *([self._leaving] if self._leaving else []))
        if reported != self._reported:
            self._reported = reported
            self._engine.adapters.keep_waiting(reported)
        if self._awaited and (self._bringing is None or self._bringing.done()):
            self._bringing = asyncio.create_task(self._bring_all(), name="read-adapters")
