"""Launches recorded once and launched again as CUDA graphs; the one user of torch's capture."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_MIB = 1 << 20

Replay = Callable[[], None]

Cut = Callable[[], None]
"""Ends one recording and begins the next."""


class GraphRecorder(Protocol):
    """Turns launches into something that launches them again."""

    num_bytes: int
    """Memory that all recordings hold."""

    def record(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        """Note what `launch` launches, without running it; `launch` is called twice where memory is short.

        Memory that it allocates and gives back may serve whatever is recorded later: what a recording leaves for the
        one behind its cut must be held until then, and what it leaves for others for as long as it is replayed.

        Returns:
            One more than there were cuts, to be replayed in their order.
        Raises:
            torch.OutOfMemoryError: there is no memory for what it allocates; nothing was recorded.
            RuntimeError: it does something that cannot be recorded; nothing can be from then on.
        """
        ...


class CudaGraphRecorder:
    """A `GraphRecorder` whose graphs share one pool."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._is_pool_held = False
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # cuBLAS keeps a workspace for each stream: taken in a capture, it would hold on to the pool when graphs go
            one = torch.ones(1, 1, device=device)
            torch.mm(one, one)

    def record(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        torch.cuda.synchronize(self._device)
        with suppress(torch.OutOfMemoryError):
            return self._capture(launch)
        # A capture cannot take what torch keeps for later, so that is given back before another try.
        torch.cuda.empty_cache()
        return self._capture(launch)

    def _capture(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # the event loop's thread makes no CUDA calls, but a library's thread might: they are not ours to forbid
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        reserved = torch.cuda.memory_reserved(self._device)
        with torch.cuda.stream(self._stream), _without_collection():
            begin()
            try:
                launch(cut)
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    graphs[-1].capture_end()
                if not self._is_pool_held:  # a pool that all graphs have left is none to torch
                    self._pool = torch.cuda.graph_pool_handle()
                raise
            graphs[-1].capture_end()
        self._is_pool_held = True
        self.num_bytes += torch.cuda.memory_reserved(self._device) - reserved
        return tuple(graph.replay for graph in graphs)


def record_if_it_fits(
    recorder: GraphRecorder, launch: Callable[[Cut], None], *, what: str
) -> tuple[Replay, ...] | None:
    """See `GraphRecorder.record`; None: there is no memory for it, and the log says so.

    Args:
        what: the steps that it records, in words.
    Raises:
        ConfigError: it cannot be recorded.
    """
    started = time.perf_counter()
    try:
        replays = recorder.record(launch)
    except torch.OutOfMemoryError as error:
        log.warning(
            "no memory for a CUDA graph of %s, so such steps stay slower; lower cache.memory_fraction: %s",
            what,
            error,
        )
        return None
    except RuntimeError as error:
        raise ConfigError(
            f"worker.enforce_eager: {what} of this model cannot be captured as CUDA graphs ({error}); set it to true"
        ) from error
    log.debug(
        "captured %s in %.0f ms; graphs hold %.0f MiB",
        what,
        (time.perf_counter() - started) * 1e3,
        recorder.num_bytes / _MIB,
    )
    return replays


@contextmanager
def _without_collection() -> Iterator[None]:
    """Whatever a collection would destroy might free device memory, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
