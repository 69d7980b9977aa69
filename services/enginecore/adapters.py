"""The LoRA adapters that requests to an engine may name: loaded into its worker, and into each that takes its place.

load ──► the worker reads it ──► frontends learn the name ──► requests bring name and digest
unload ──► frontends forget the name; its requests go on ──► none has the digest any more ──► the worker frees it

Which of them the worker has in memory is the business of `ResidentAdapters`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from triptych.config.adapters import check_adapter_name, read_adapters
from triptych.errors import (
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    MemoryShort,
    QueueFull,
    TriptychError,
    WrongState,
)
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import EngineStatus, WorkerFacts
from triptych.types.submit import SubmitRequest
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.resident_adapters import ResidentAdapters
from triptych_services.enginecore.workers.base import Executor

log = logging.getLogger(__name__)

MAX_NAMES = 1024
"""Adapters of one engine; frontends are sent all of them when one changes."""
_MAX_WAITING = 16
_RETRY_AFTER_S = 1.0
_RELEASE_POLL_S = 0.1
"""Seconds between two looks at whether an adapter that was unloaded is still used."""


class EngineAdapters:
    """Names of adapters -> what the worker has loaded. Owned by the engine loop."""

    def __init__(
        self,
        engine: EngineCore,
        executor: Executor,
        *,
        at_start: str,
        on_change: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            engine: The engine core, which knows the requests.
            executor: The calls to the worker.
            at_start: `model.adapters`.
            on_change: Called without arguments when names have changed.
            wake: Lets the engine loop plan; called when an adapter is there that requests wait for.

        Raises:
            ConfigError: `model.adapters` is not understood.
        """
        self._engine = engine
        self._memory = ResidentAdapters(engine, executor, find=self._find, on_change=wake)
        self._on_change = on_change
        self._at_start = read_adapters(at_start)
        """Adapters of the config that have not been loaded yet: name -> source."""
        self._by_name: dict[str, AdapterFacts] = {}
        self._is_first_worker = True
        self._num_loads = 0
        self._released: dict[str, AdapterFacts] = {}
        """Adapters without a name, which the worker is to free when no request has their digest any more."""
        self._releasing: asyncio.Task[None] | None = None

    @property
    def facts(self) -> tuple[AdapterFacts, ...]:
        """The adapters that requests may name, by name."""
        return tuple(facts for _, facts in sorted(self._by_name.items()))

    def check(self, submit: SubmitRequest) -> None:
        """Refuse a request for an adapter that this engine does not have, or has with other tensors.

        One that the worker has not in memory is read again, and the request waits for it.

        Raises:
            EngineUnavailable: Another engine may have it.
            EngineFailure: It could not be read again; says why.
        """
        if not submit.adapter:
            return
        facts = self._by_name.get(submit.adapter)
        if facts is None:
            raise EngineUnavailable(f"adapter: {submit.adapter!r} is not loaded in this engine")
        if facts.digest != submit.adapter_digest:
            raise EngineUnavailable(
                f"adapter: this engine has {submit.adapter!r} with the digest {facts.digest}, "
                f"not {submit.adapter_digest!r}"
            )
        self._memory.use(facts.digest)

    def is_resident(self, facts: AdapterFacts) -> bool:
        """Return whether the worker has an adapter in memory."""
        return self._memory.holds(facts.digest)

    def add_counts(self, status: EngineStatus) -> EngineStatus:
        """Return a status with the numbers of adapters."""
        return replace(self._memory.add_counts(status), num_adapters=len(self._by_name))

    async def load(self, name: str, source: str) -> AdapterFacts:
        """Load an adapter for requests to come. One that is loaded from there already is returned, unless it could not
        be read again since.

        Raises:
            InvalidRequest: The name cannot be one, or the worker takes nothing from this source.
            WrongState: The name is that of an adapter from another source.
            QueueFull: Too many loads wait, or too many adapters are loaded.
            TriptychError: There is no worker, or it refuses; says why. Nothing has changed.
        """
        check_adapter_name(name)
        if self._num_loads >= _MAX_WAITING:
            raise QueueFull(f"{_MAX_WAITING} adapters are being loaded already", _RETRY_AFTER_S)
        self._num_loads += 1
        try:
            async with self._memory.turn:
                return await self._load(name, source)
        finally:
            self._num_loads -= 1

    async def _load(self, name: str, source: str) -> AdapterFacts:
        worker = self._memory.worker
        if worker is not None and name == worker.model.name:
            raise InvalidRequest("name", f"{name!r} is the name of the model")
        if (known := self._by_name.get(name)) is not None:
            if known.source != source:
                raise WrongState(f"LoadAdapter: {name!r} is loaded from {known.source!r}; unload it first")
            if known.digest not in self._memory.broken:
                return known
        elif len(self._by_name) >= MAX_NAMES:
            raise QueueFull(f"{MAX_NAMES} adapters are loaded, the limit; unload one", _RETRY_AFTER_S)
        facts = await self._memory.load(name, source)
        self._by_name[name] = facts
        if known is not None and known.digest != facts.digest:
            self._release(known)
        self._released.pop(facts.digest, None)
        log.info("adapter %s is loaded: rank %d, digest %s", name, facts.rank, facts.digest)
        self._on_change()
        return facts

    def unload(self, name: str) -> None:
        """Forget a name. Requests that have it go on, and when the last has ended the worker frees the memory.

        Raises:
            InvalidRequest: No adapter has this name.
        """
        facts = self._by_name.pop(name, None)
        if facts is None:
            raise InvalidRequest("name", f"{name!r} is not loaded; ListAdapters lists those that are")
        log.info("adapter %s is unloaded", name)
        self._on_change()
        self._release(facts)

    async def restore(self, worker: WorkerFacts) -> None:
        """Make a worker that has no rows have the adapters of this engine.

        The first one may have served an engine of this name before: its adapters are taken over, and those of the
        config are loaded. A later one loads what it lacks if there is room, those of requests first, and frees
        what this engine does not know. An adapter that cannot be loaded any more loses its name.

        Raises:
            ConfigError: An adapter of the config cannot be loaded into the first worker.
        """
        if not worker.max_adapters:
            self._memory.worker = worker
            self._give_up_all()
            return
        try:
            listed = await self._memory.begin(worker)
            if self._is_first_worker:
                self._by_name.update((facts.name, facts) for facts in listed)
            await self._load_missing()
            await self._load_at_start()
            self._is_first_worker = False
            self._free_unknown(listed)
        except EngineUnavailable as error:  # lost again: the next worker is given them
            log.warning("the worker has not got its adapters: %s", error)
        self._memory.serve_waiting()
        self._on_change()

    async def _load_missing(self) -> None:
        in_use = self._engine.adapters.in_use()
        missing = [
            *self._by_name.values(),
            *(self._released[each] for each in in_use & self._released.keys()),
        ]
        for facts in sorted(missing, key=lambda each: each.digest not in in_use):
            if self._memory.holds(facts.digest):
                continue
            try:
                found = await self._memory.load(facts.name, facts.source, makes_room=False)
            except EngineUnavailable:
                raise
            except MemoryShort as error:
                log.info("no room for more adapters until requests name them: %s", error)
                return
            except TriptychError as error:
                log.error("adapter %s is given up, the new worker cannot load it: %s", facts.name, error)
                self._by_name.pop(facts.name, None)
                continue
            if found.digest != facts.digest:
                log.warning("adapter %s has changed at %s since it was loaded", facts.name, facts.source)
            if facts.name in self._by_name:
                self._by_name[facts.name] = found

    def _free_unknown(self, listed: Iterable[AdapterFacts]) -> None:
        """Free the adapters of a worker that this engine has no name for."""
        known = {facts.digest for facts in self._by_name.values()}
        for facts in listed:
            if facts.digest not in known:
                self._release(facts)

    def _find(self, digest: str) -> AdapterFacts | None:
        named = (facts for facts in self._by_name.values() if facts.digest == digest)
        return next(named, self._released.get(digest))

    async def _load_at_start(self) -> None:
        for name, source in list(self._at_start.items()):
            worker = self._memory.worker
            if worker is not None and name == worker.model.name:
                raise ConfigError(f"model.adapters: {name!r} is the name of the model")
            try:
                self._by_name[name] = await self._memory.load(name, source)
            except EngineUnavailable:
                raise
            except TriptychError as error:
                raise ConfigError(f"model.adapters: {name}={source}: {error}") from error
            del self._at_start[name]

    def _give_up_all(self) -> None:
        """Forget all names: the worker serves no adapters."""
        if self._at_start:
            raise ConfigError("model.adapters: worker.max_adapters is 0, so none can be served")
        if self._by_name:
            log.error("the new worker serves no adapters: %s are given up", ", ".join(self._by_name))
            self._by_name.clear()
            self._on_change()

    def _release(self, facts: AdapterFacts) -> None:
        self._released[facts.digest] = facts
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._free_unused(), name="free-adapters")

    async def _free_unused(self) -> None:
        """Have the worker free each adapter without a name as soon as no request has it."""
        while self._released:
            async with self._memory.turn:
                for facts in self._by_name.values():
                    self._released.pop(facts.digest, None)
                for digest in self._released.keys() - self._engine.adapters.in_use():
                    try:
                        await self._memory.free(digest)
                    except (
                        TriptychError
                    ) as error:  # another worker, which was not given it, or has to be asked again
                        log.warning("adapter %s is not freed: %s", digest, error)
                    self._released.pop(digest, None)
            await asyncio.sleep(_RELEASE_POLL_S)

    def close(self) -> None:
        """Read and free no more adapters: the engine ends."""
        self._memory.close()
        if self._releasing is not None:
            self._releasing.cancel()
