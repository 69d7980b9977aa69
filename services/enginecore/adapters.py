"""The LoRA adapters that requests to an engine may name: loaded into its worker, and into each that takes its place.

load ──► the worker reads it ──► frontends learn the name ──► requests bring name and digest
unload ──► frontends forget the name; its requests go on ──► none has the digest any more ──► the worker frees it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from triptych.config.adapters import check_adapter_name, read_adapters
from triptych.errors import (
    ConfigError,
    EngineUnavailable,
    FeatureDisabled,
    InvalidRequest,
    QueueFull,
    TriptychError,
    WrongState,
)
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import WorkerFacts
from triptych.types.submit import SubmitRequest
from triptych.wire.worker import adapter_from_proto
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.workers.base import Executor

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 330.0
"""Seconds that the worker may take for one call: more than it takes before it gives up itself."""
MAX_NAMES = 1024
"""Adapters of one engine; frontends are sent all of them when one changes."""
_MAX_WAITING = 16
_RETRY_AFTER_S = 1.0
_RELEASE_POLL_S = 0.1
"""Seconds between two looks at whether an adapter that was unloaded is still used."""


class EngineAdapters:
    """Names of adapters -> what the worker has loaded. Owned by the engine loop."""

    def __init__(
        self, engine: EngineCore, executor: Executor, *, at_start: str, on_change: Callable[[], None]
    ) -> None:
        """
        Args:
            engine: The engine core, which knows the requests.
            executor: The calls to the worker.
            at_start: `model.adapters`.
            on_change: Called without arguments when names have changed.

        Raises:
            ConfigError: `model.adapters` is not understood.
        """
        self._engine = engine
        self._executor = executor
        self._on_change = on_change
        self._at_start = read_adapters(at_start)
        """Adapters of the config that have not been loaded yet: name -> source."""
        self._by_name: dict[str, AdapterFacts] = {}
        self._is_first_worker = True
        self._worker: WorkerFacts | None = None
        self._turn = asyncio.Lock()
        """Held while the worker loads or frees an adapter for an operator."""
        self._num_loads = 0
        self._num_restores = 0
        """Workers that have been given the adapters: a load that has seen two of them is carried out again."""
        self._released: dict[str, AdapterFacts] = {}
        """Adapters without a name, which the worker is to free when no request has their digest any more."""
        self._releasing: asyncio.Task[None] | None = None

    @property
    def facts(self) -> tuple[AdapterFacts, ...]:
        """The adapters that requests may name, by name."""
        return tuple(facts for _, facts in sorted(self._by_name.items()))

    def check(self, submit: SubmitRequest) -> None:
        """Refuse a request for an adapter that this engine does not have, or has with other tensors.

        Raises:
            EngineUnavailable: Another engine may have it.
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

    async def load(self, name: str, source: str) -> AdapterFacts:
        """Load an adapter for requests to come. One that is loaded from there already is returned.

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
            async with self._turn:
                return await self._load(name, source)
        finally:
            self._num_loads -= 1

    async def _load(self, name: str, source: str) -> AdapterFacts:
        if self._worker is None:
            raise EngineUnavailable("the engine has no worker yet")
        if name == self._worker.model.name:
            raise InvalidRequest("name", f"{name!r} is the name of the model")
        if (known := self._by_name.get(name)) is not None:
            if known.source != source:
                raise WrongState(f"LoadAdapter: {name!r} is loaded from {known.source!r}; unload it first")
            return known
        if len(self._by_name) >= MAX_NAMES:
            raise QueueFull(f"{MAX_NAMES} adapters are loaded, the limit; unload one", _RETRY_AFTER_S)
        while True:
            num_restores = self._num_restores
            facts = await self._load_into_worker(name, source)
            if num_restores == self._num_restores:
                break
        self._by_name[name] = facts
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
        config are loaded. A later one loads what it lacks, and frees what this engine does not know. An adapter that
        cannot be loaded any more loses its name.

        Raises:
            ConfigError: An adapter of the config cannot be loaded into the first worker.
        """
        self._worker = worker
        self._num_restores += 1
        if not worker.max_adapters:
            self._give_up_all()
            return
        try:
            listed = (await self._call("ListAdapters")).adapters
            present = {facts.digest: facts for facts in map(adapter_from_proto, listed)}
            if self._is_first_worker:
                self._by_name.update((facts.name, facts) for facts in present.values())
            await self._load_missing(present)
            await self._load_at_start()
            self._is_first_worker = False
        except EngineUnavailable as error:  # lost again: the next worker is given them
            log.warning("the worker has not got its adapters: %s", error)
        self._on_change()

    async def _load_missing(self, present: dict[str, AdapterFacts]) -> None:
        for name, facts in list(self._by_name.items()):
            if facts.digest in present:
                continue
            try:
                found = await self._load_into_worker(name, facts.source)
            except EngineUnavailable:
                raise
            except TriptychError as error:
                log.error("adapter %s is given up, the new worker cannot load it: %s", name, error)
                del self._by_name[name]
                continue
            if found.digest != facts.digest:
                log.warning("adapter %s has changed at %s since it was loaded", name, facts.source)
            self._by_name[name] = found
        in_use = self._engine.adapters_in_use()
        for digest, facts in list(self._released.items()):
            if digest in in_use and digest not in present:
                await self._load_again(facts)
        known = {facts.digest for facts in self._by_name.values()}
        for digest in present.keys() - known:
            self._release(present[digest])

    async def _load_again(self, facts: AdapterFacts) -> None:
        """Load an adapter without a name, for the requests that still have it; without it each of them fails."""
        try:
            await self._load_into_worker(facts.name, facts.source)
        except EngineUnavailable:
            raise
        except TriptychError as error:
            log.error("adapter %s, which requests have, cannot be loaded again: %s", facts.name, error)

    async def _load_at_start(self) -> None:
        for name, source in list(self._at_start.items()):
            if self._worker is not None and name == self._worker.model.name:
                raise ConfigError(f"model.adapters: {name!r} is the name of the model")
            try:
                self._by_name[name] = await self._load_into_worker(name, source)
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

    async def _load_into_worker(self, name: str, source: str) -> AdapterFacts:
        return adapter_from_proto((await self._call("LoadAdapter", name=name, source=source)).adapter)

    async def _call(self, method: str, **fields: object) -> Any:
        if self._worker is not None and not self._worker.max_adapters:
            raise FeatureDisabled("adapter", "worker.max_adapters is 0: no adapters are served")
        return await self._executor.call(method, timeout_s=CALL_TIMEOUT_S, **fields)

    def _release(self, facts: AdapterFacts) -> None:
        self._released[facts.digest] = facts
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._free_unused(), name="free-adapters")

    async def _free_unused(self) -> None:
        """Have the worker free each adapter without a name as soon as no request has it."""
        while self._released:
            async with self._turn:
                for facts in self._by_name.values():
                    self._released.pop(facts.digest, None)
                for digest in self._released.keys() - self._engine.adapters_in_use():
                    try:
                        await self._call("UnloadAdapter", digest=digest)
                    except (
                        TriptychError
                    ) as error:  # another worker, which was not given it, or has to be asked again
                        log.warning("adapter %s is not freed: %s", digest, error)
                    self._released.pop(digest, None)
            await asyncio.sleep(_RELEASE_POLL_S)

    def close(self) -> None:
        """Free no more adapters: the engine ends."""
        if self._releasing is not None:
            self._releasing.cancel()
