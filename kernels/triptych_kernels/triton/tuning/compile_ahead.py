"""Compilation of kernels before their first launch: a pass without launches notes them, then they are compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime import JITFunction, driver

_NOTED = object()


@dataclass(frozen=True, slots=True)
class NotedLaunch:
    """A kernel, and the specialization that its launch would compile."""

    kernel: JITFunction
    specialization: str
    """JSON as `JITFunction.preload` takes it."""

    @property
    def name(self) -> str:
        """Return a readable name for logs."""
        return str(self.kernel.__name__)

    def compile(self) -> None:
        """Compile for the calling thread's device, or find the kernel in Triton's cache on disk, and load it.

        A later launch finds it loaded. Most of the work is done without the interpreter's lock, so that threads do
        not wait for each other. A thread that launches the same kernel at the same time, to quantize weights,
        compiles one for itself: Triton does not wait for a kernel that another thread is loading.
        """
        device = driver.active.get_current_device()
        compiled_of_launch, *rest = self.kernel.device_caches[device]
        apart = copy(self.kernel)
        apart.device_caches = {device: ({}, *rest)}
        compiled = apart.preload(self.specialization)
        compiled.run  # noqa: B018 - loads it; up to Triton 3.6 this compiles the launcher, too
        for key in apart.device_caches[device][0]:
            compiled_of_launch.setdefault(key, compiled)


@contextmanager
def noted_launches() -> Iterator[dict[NotedLaunch, None]]:
    """Yield the launches of this thread that would compile, each once, in order.

    No launch is carried out, whether it would compile or not. The memory that they would have written is undefined
    and must not be used as an index. Other threads must not launch the same kernels at the same time.
    """
    noted: dict[NotedLaunch, None] = {}
    marked: list[tuple[dict[Any, Any], Any]] = []
    thread = threading.get_ident()
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def prepare(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_noted = threading.get_ident() == thread
        return run(kernel, *args, grid=grid, warmup=warmup or is_noted, **options)

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False  # go on as ever
        kernel = fn.jit_function
        noted[NotedLaunch(kernel, compile["specialization_data"])] = None
        # taken for compiled: all layers launch the same, and to note a launch takes ten times as long as to find it
        compiled_of_launch = kernel.device_caches[compile["device"]][0]
        compiled_of_launch[key] = _NOTED
        marked.append((compiled_of_launch, key))
        return True

    JITFunction.run, knobs.runtime.jit_cache_hook = prepare, note
    try:
        yield noted
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
        for compiled_of_launch, key in marked:
            del compiled_of_launch[key]
