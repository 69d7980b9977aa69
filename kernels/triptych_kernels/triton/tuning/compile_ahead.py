"""Kernels compiled before their first launch: noted in a pass that launches none, then compiled side by side."""

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
    """A kernel, and what its launch would have it compiled for."""

    kernel: JITFunction
    specialization: str
    """As `JITFunction.preload` takes it."""

    @property
    def name(self) -> str:
        """For people."""
        return str(self.kernel.__name__)

    def compile(self) -> None:
        """Compile for the calling thread's device, or find it in Triton's cache on disk, and load it: a launch finds it
        there.

        Most of it is done without the interpreter's lock, so that threads do not wait for each other. A thread that
        launches the same kernel meanwhile, to quantize weights, compiles one for itself: Triton takes a kernel that
        another thread is loading for one that is loaded.
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
    """Launches of this thread that would compile, each once, in order. None of its launches is carried out, compiled or
    not: what they would have written holds anything, and nobody shall take it for an index.

    Other threads must not launch the same kernels meanwhile.
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
