"""Loading of LoRA adapters beside the steps: one at a time, on a thread of its own, which no step waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from triptych.config import EngineConfig
from triptych.config.adapters import find_adapter, read_adapters
from triptych.errors import EngineUnavailable, FeatureDisabled, QueueFull
from triptych.observe.logging import with_fields
from triptych.types.adapters import AdapterFacts
from triptych_services.worker.runner.base import AdapterHolder, Runner, ServesAdapters

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 300.0
"""Seconds that a load may take, with its wait for those before it: 10 GB from a slow disk."""
MAX_WAITING = 16
"""Loads that may wait for their turn."""

_RETRY_AFTER_S = 1.0

_T = TypeVar("_T")


class AdapterControl:
    """Has the runner load and unload adapters. Owned by the worker's event loop."""

    def __init__(
        self, config: EngineConfig, runner: Callable[[], Runner | None], *, timeout_s: float = LOAD_TIMEOUT_S
    ) -> None:
        """
        Args:
            runner: Returns the runner; None until it has loaded.
            timeout_s: Seconds that a call may take.

        Raises:
            ConfigError: `model.adapters` is not understood.
        """
        self._root = config.model.adapter_root
        self._at_start = read_adapters(config.model.adapters)
        self._is_one_rank = config.parallel.num_ranks == 1
        self._runner = runner
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._num_calls = 0

    async def load(self, name: str, source: str) -> AdapterFacts:
        """Load an adapter. Rows can use it when this returns.

        Raises:
            InvalidRequest: The name or the source cannot be one.
            FeatureDisabled: This worker serves no adapters, or none from there.
            ModelError: The files are none of an adapter that this model can have.
            QueueFull: Too many wait already.
            EngineUnavailable: There is no runner yet, or it took too long; the load goes on.
        """
        holder = self._holder()
        started = time.monotonic()
        facts = await self._call(
            lambda: holder.load(
                name, source, find_adapter(name, source, root=self._root, at_start=self._at_start)
            )
        )
        log.info(
            "adapter loaded",
            extra=with_fields(
                name=name, digest=facts.digest, rank=facts.rank, after_s=time.monotonic() - started
            ),
        )
        return facts

    async def unload(self, digest: str) -> None:
        """Free an adapter's memory. No effect if it is not loaded. Raises as `load` does."""
        holder = self._holder()
        await self._call(lambda: holder.unload(digest))

    def list(self) -> tuple[AdapterFacts, ...]:
        """Return the adapters that are loaded, by name; none where none are served."""
        runner = self._runner()
        if runner is None or not runner.facts.max_adapters:
            return ()
        return tuple(sorted(self._holder().list(), key=lambda facts: facts.name))

    def _holder(self) -> AdapterHolder:
        runner = self._runner()
        if runner is None:
            raise EngineUnavailable("the worker is on its way to readiness")
        if not runner.facts.max_adapters or not isinstance(runner, ServesAdapters):
            raise FeatureDisabled("adapter", "worker.max_adapters is 0: no adapters are served")
        if not self._is_one_rank:
            raise FeatureDisabled("adapter", "adapters are served by workers of one rank only")
        return runner.adapters

    async def _call(self, act: Callable[[], _T]) -> _T:
        """Call a function on the thread, behind those that wait."""
        if self._num_calls > MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} loads of adapters wait already", _RETRY_AFTER_S)
        self._num_calls += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, act)
        work.add_done_callback(self._note_done)
        return await self._within_time(work)

    async def _within_time(self, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(work)  # a thread cannot be interrupted
        except TimeoutError:
            raise EngineUnavailable(f"it takes longer than {self._timeout_s:g} s, and goes on") from None

    def _note_done(self, work: asyncio.Future[Any]) -> None:
        self._num_calls -= 1
        if not work.cancelled():
            work.exception()  # its caller may have left
