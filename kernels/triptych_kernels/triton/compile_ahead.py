"""Kernels compiled before their first launch: noted in a pass that launches none, then compiled side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime import JITFunction


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

        Most of it is done without the interpreter's lock, so that threads do not wait for each other.
        """
        compiled = self.kernel.preload(self.specialization)
        compiled.run  # noqa: B018 - loads it; up to Triton 3.6 this compiles the launcher, too


@contextmanager
def noted_launches() -> Iterator[dict[NotedLaunch, None]]:
    """Launches of this thread that would compile, each once, in order. None of its launches is carried out, compiled or
    not: what they would have written holds anything, and nobody shall take it for an index.
    """
    noted: dict[NotedLaunch, None] = {}
    thread = threading.get_ident()
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def prepare(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_noted = threading.get_ident() == thread
        return run(kernel, *args, grid=grid, warmup=warmup or is_noted, **options)

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False  # go on as ever
        noted[NotedLaunch(fn.jit_function, compile["specialization_data"])] = None
        return True

    JITFunction.run, knobs.runtime.jit_cache_hook = prepare, note
    try:
        yield noted
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
