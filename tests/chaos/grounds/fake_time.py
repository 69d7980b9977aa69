"""An event loop whose clock jumps to the next thing that happens, and processes on it that can be killed and stopped.

A task belongs to the process whose code created it; that is told by its context, which tasks and callbacks inherit.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
_MOST_TURNS = 400_000  # twenty times those of a usual run
_process: ContextVar[Process | None] = ContextVar("process", default=None)


class NothingHappens(Exception):
    """All tasks wait for something that nobody will do."""


class EndlessRun(Exception):
    """Something goes round and round."""


class Process:
    """One life of a process: its tasks, which end together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.held: list[asyncio.Handle] = []
        """Callbacks that have come due while it is stopped."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have what is created inside belong to this process."""
        token = _process.set(self)
        try:
            yield
        finally:
            _process.reset(token)

    def kill(self) -> None:
        """End it as SIGKILL does: nothing of it runs any more, but for what cancelling a task runs."""
        self.is_dead = True
        self.go_on()
        for task in tuple(self.tasks):
            task.cancel()

    def go_on(self) -> None:
        """End a stop; what has come due meanwhile happens now."""
        loop: Any = asyncio.get_running_loop()
        self.is_stopped = False
        held, self.held = self.held, []
        loop._ready.extend(held)


def current_process() -> Process | None:
    """Return the process whose code runs now."""
    return _process.get()


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """Owned by one run. Threads have no place on it: what would run on one runs at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._num_turns = 0
        super().__init__(_Selector(self))
        self.set_task_factory(_create_task)

    def time(self) -> float:
        return self.now

    def count_turn(self) -> None:
        """Note one turn of the loop.

        Raises:
            EndlessRun: There were more than any run takes.
        """
        self._num_turns += 1
        if self._num_turns > _MOST_TURNS:
            raise EndlessRun(f"{_MOST_TURNS} turns, and it is {self.now - 1000.0:.3f} s")

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        process = _process.get() if context is None else context.get(_process)
        if process is not None and process.is_stopped:
            handle = asyncio.Handle(callback, args, self, context)
            process.held.append(handle)
            return handle
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = _process.get() if context is None else context.get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)

        def fire() -> None:
            if process.is_stopped:
                process.held.append(asyncio.Handle(callback, args, self, context))
            else:
                callback(*args)

        return super().call_at(when, fire, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: it moves the clock."""

    def __init__(self, loop: FakeTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.count_turn()
        events = super().select(0)
        if not events:
            if timeout is None:
                raise NothingHappens
            self._loop.now += max(timeout, 0.0)
        return events


def _create_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T], **options: Any
) -> asyncio.Task[T]:
    task = asyncio.Task(coro, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


def run_in_fake_time(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on such a loop, with every clock of ours replaced by the loop's."""
    loop, real = FakeTimeLoop(), time.monotonic
    monkeypatch.setattr(time, "monotonic", loop.time)
    monkeypatch.setattr(time, "perf_counter", loop.time)
    for function in _functions_of_ours():
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        if real in defaults:
            fake = tuple(loop.time if default is real else default for default in defaults)
            monkeypatch.setattr(function, "__defaults__", fake)
        if real in keywords.values():
            faked = {name: loop.time if default is real else default for name, default in keywords.items()}
            monkeypatch.setattr(function, "__kwdefaults__", faked)
    try:
        return loop.run_until_complete(work())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()


def in_fake_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on such a loop. It may use no sockets and no threads; its fixtures are made outside."""

    @functools.wraps(test)
    def run(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
        if "monkeypatch" in signature.parameters:
            arguments["monkeypatch"] = monkeypatch
        run_in_fake_time(monkeypatch, lambda: test(**arguments))

    signature = inspect.signature(test)
    own = inspect.Parameter("monkeypatch", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = [each for each in signature.parameters.values() if each.name != own.name]
    run.__signature__ = signature.replace(parameters=[own, *others])  # type: ignore[attr-defined]
    return run


def _functions_of_ours() -> Iterator[Any]:
    """Return the functions and methods of services and libs, which may have a clock as a default."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(("triptych_services.", "triptych.")):
            continue
        for value in list(vars(module).values()):
            members = vars(value).values() if isinstance(value, type) else (value,)
            yield from (member for member in members if hasattr(member, "__kwdefaults__"))
