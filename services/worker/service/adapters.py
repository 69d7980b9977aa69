"""Loading of LoRA adapters beside the steps: one at a time, on a thread of its own, which no step waits for.

Of several ranks each reads the adapter and keeps its share. Rows may name it once all of them have it, and where one of
them refuses it none keeps it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from triptych.config import EngineConfig
from triptych.config.adapters import find_adapter, read_adapters
from triptych.errors import EngineUnavailable, FeatureDisabled, QueueFull
from triptych.hub import resolve_adapter
from triptych.observe.logging import with_fields
from triptych.types.adapters import AdapterFacts
from triptych_services.worker.runner.base import AdapterHolder, Runner, ServesAdapters
from triptych_services.worker.service.runner_thread import RunnerThread

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 300.0
"""Seconds that a load may take, with its wait for those before it: 10 GB from a slow disk."""
MAX_WAITING = 16
"""Loads that may wait for their turn."""

_RETRY_AFTER_S = 1.0

_T = TypeVar("_T")


class RankAdapters:
    """The adapters of one rank. Owned by the event loop of its process; one call at a time."""

    def __init__(
        self, config: EngineConfig, runner: Callable[[], Runner | None], thread: RunnerThread
    ) -> None:
        """
        Args:
            runner: Returns the runner; None until it has loaded.
            thread: The runner's thread.

        Raises:
            ConfigError: `model.adapters` is not understood.
        """
        self._root = config.model.adapter_root
        self._at_start = read_adapters(config.model.adapters)
        self._runner = runner
        self._thread = thread
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._settled: set[str] = set()
        """Digests of the adapters that all ranks have."""
        self._last_read = ""
        """Digest of the adapter that was read last, until it is settled."""

    def holder(self) -> AdapterHolder:
        """Return what holds the adapters.

        Raises:
            FeatureDisabled: This worker serves none.
            EngineUnavailable: There is no runner yet.
        """
        runner = self._runner()
        if runner is None:
            raise EngineUnavailable("the worker is on its way to readiness")
        if not runner.facts.max_adapters or not isinstance(runner, ServesAdapters):
            raise FeatureDisabled("adapter", "worker.max_adapters is 0: no adapters are served")
        return runner.adapters

    async def load(self, name: str, source: str) -> AdapterFacts:
        """Load an adapter on all ranks. Rows can name it when this returns.

        Raises:
            TriptychError: As `read` does; no rank keeps it.
        """
        facts = await self.read(name, source)
        self.settle(keeps=True)
        return facts

    async def unload(self, digest: str) -> None:
        """Free an adapter's memory on all ranks, between two steps. No effect if it is not loaded."""
        await self.free(digest)

    def list(self) -> tuple[AdapterFacts, ...]:
        """Return the adapters that rows may name, by name; none where none are served."""
        runner = self._runner()
        if runner is None or not runner.facts.max_adapters:
            return ()
        listed = (facts for facts in self.holder().list() if facts.digest in self._settled)
        return tuple(sorted(listed, key=lambda facts: facts.name))

    async def read(self, name: str, source: str) -> AdapterFacts:
        """Read this rank's share of an adapter, which `settle` keeps or drops.

        Raises:
            InvalidRequest: The name or the source cannot be one.
            FeatureDisabled: This worker serves no adapters, or none from there.
            ModelNotFound: The hub does not give the adapter.
            ModelError: The files are none of an adapter that this model can have.
            MemoryShort: All adapters together would take more than they may.
            EngineUnavailable: There is no runner yet.
        """
        holder = self.holder()

        def load() -> AdapterFacts:
            directory = find_adapter(
                name, source, root=self._root, at_start=self._at_start, resolve=resolve_adapter
            )
            return holder.load(name, source, directory)

        facts = await asyncio.get_running_loop().run_in_executor(self._threads, load)
        self._last_read = facts.digest
        return facts

    def settle(self, *, keeps: bool) -> None:
        """Keep what was read last if all ranks could read it. No effect if this rank could not."""
        digest, self._last_read = self._last_read, ""
        if digest and keeps:
            self._settled.add(digest)
        elif digest and digest not in self._settled:
            self.holder().unload(digest)

    async def free(self, digest: str) -> None:
        """Free this rank's share between the steps that are queued and those that come later.

        A row that enters with one of the former finds the adapter on every rank, and a later one on none.
        """
        holder = self.holder()
        self._settled.discard(digest)
        await self._thread.between_steps(lambda: holder.unload(digest))


class AdapterControl:
    """Carries out what an engine asks of a worker's adapters, in turn. Owned by the worker's event loop."""

    def __init__(self, adapters: RankAdapters, *, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """
        Args:
            adapters: Those of all ranks.
            timeout_s: Seconds that a call may take.
        """
        self._adapters = adapters
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._absent: dict[str, AdapterFacts] = {}
        """Adapters that were unloaded to be loaded again, by digest."""
        self._calls: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, source: str) -> AdapterFacts:
        """Load an adapter. Rows can name it when this returns.

        Raises:
            TriptychError: As `RankAdapters.read` does.
            QueueFull: Too many wait already.
            EngineUnavailable: There is no runner yet, or it took too long; the load goes on.
        """
        started = time.monotonic()
        facts = await self._call(self._adapters.load(name, source))
        self._absent.pop(facts.digest, None)
        log.info(
            "adapter loaded",
            extra=with_fields(
                name=name, digest=facts.digest, rank=facts.rank, after_s=time.monotonic() - started
            ),
        )
        return facts

    async def unload(self, digest: str, *, keeps_name: bool = False) -> None:
        """Free an adapter's memory. No effect if it is not loaded. Raises as `load` does.

        Args:
            keeps_name: Whether the adapter stays among the `absent`, so that another engine finds it there.
        """
        loaded = {facts.digest: facts for facts in self._adapters.list()}
        self._absent.pop(digest, None)
        if keeps_name and digest in loaded:
            self._absent[digest] = loaded[digest]
        await self._call(self._adapters.unload(digest))

    def list(self) -> tuple[AdapterFacts, ...]:
        """Return the adapters that rows may name, by name; none where none are served."""
        return self._adapters.list()

    def list_absent(self) -> tuple[AdapterFacts, ...]:
        """Return the adapters that are to be loaded again before a row names them."""
        return tuple(self._absent.values())

    async def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await something, behind what waits already."""
        if len(self._calls) > MAX_WAITING:
            work.close()
            raise QueueFull(f"{MAX_WAITING} loads of adapters wait already", _RETRY_AFTER_S)
        task = asyncio.create_task(self._in_turn(work), name="adapter")
        self._calls.add(task)
        task.add_done_callback(self._note_done)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)  # a thread that reads cannot be interrupted
        except TimeoutError:
            raise EngineUnavailable(f"it takes longer than {self._timeout_s:g} s, and goes on") from None

    async def _in_turn(self, work: Coroutine[Any, Any, _T]) -> _T:
        async with self._turn:
            return await work

    def _note_done(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have left
