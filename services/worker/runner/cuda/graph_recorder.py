"""Launches that are recorded once and repeated as CUDA graphs; the only user of torch's capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from triptych.errors import ConfigError
from triptych_services.worker.context.garbage import without_collection
from triptych_services.worker.runner.device_loss import is_lost_at_capture

log = logging.getLogger(__name__)

_MIB = 1 << 20

Replay = Callable[[], None]

Cut = Callable[[], None]
"""Ends one recording and begins the next."""


class GraphRecorder(Protocol):
    """Records launches, to repeat them."""

    num_bytes: int
    """Memory of all recordings, in bytes."""

    def record(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        """Record the launches of `launch` without running them. `launch` is called twice if memory is short.

        Memory that is allocated and freed while recording may be used by later recordings. A tensor for the recording
        after the next cut must be held until then, and a tensor for others as long as the recording is replayed.

        Returns:
            One replay more than there were cuts, to be called in order.

        Raises:
            torch.OutOfMemoryError: There is not enough memory; nothing was recorded.
            RuntimeError: An operation cannot be recorded. No further recording is possible.
        """
        ...


class CudaGraphRecorder:
    """A `GraphRecorder` of graphs that share one pool."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._is_pool_held = False
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # cuBLAS keeps a workspace for each stream: allocated in a capture, it would keep the pool alive after the
            # graphs
            one = torch.ones(1, 1, device=device)
            torch.mm(one, one)

    def record(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        torch.cuda.synchronize(self._device)
        with suppress(torch.OutOfMemoryError):
            return self._capture(launch)
        # A capture cannot use memory in torch's cache, so the cache is emptied before another attempt.
        torch.cuda.empty_cache()
        return self._capture(launch)

    def _capture(self, launch: Callable[[Cut], None]) -> tuple[Replay, ...]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # the event loop's thread makes no CUDA calls, but a library's thread might, and these must not fail
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        reserved = torch.cuda.memory_reserved(self._device)
        # Collecting garbage might free device memory, which ends a capture.
        with torch.cuda.stream(self._stream), without_collection():
            begin()
            try:
                launch(cut)
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    graphs[-1].capture_end()
                if not self._is_pool_held:  # torch discards a pool without graphs
                    self._pool = torch.cuda.graph_pool_handle()
                raise
            graphs[-1].capture_end()
        self._is_pool_held = True
        self.num_bytes += torch.cuda.memory_reserved(self._device) - reserved
        return tuple(graph.replay for graph in graphs)


def record_if_it_fits(
    recorder: GraphRecorder, launch: Callable[[Cut], None], *, what: str
) -> tuple[Replay, ...] | None:
    """Record as `GraphRecorder.record` does. Return None, and log a warning, if there is not enough memory.

    Args:
        what: Name of the recorded steps, for messages.

    Raises:
        ConfigError: An operation cannot be recorded, so a restart does not help.
        RuntimeError: The device is lost.
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
        if is_lost_at_capture(error):
            raise
        reason = str(error).partition("\n")[0]  # below it is torch's advice for those who develop it
        raise ConfigError(
            f"worker.enforce_eager: {what} of this model cannot be captured as CUDA graphs ({reason}); set it to true"
        ) from error
    log.debug(
        "captured %s in %.0f ms; graphs hold %.0f MiB",
        what,
        (time.perf_counter() - started) * 1e3,
        recorder.num_bytes / _MIB,
    )
    return replays
