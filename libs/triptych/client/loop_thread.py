"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for synchronous callers, from any thread, until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Wait for the coroutine's result. KeyboardInterrupt cancels it and waits for it to clean up."""
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
        started: list[asyncio.Task[_T]] = []

        def start() -> None:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(lambda ended: _copy(ended, outcome))
            started.append(task)

        def cancel() -> None:
            if started:
                started[0].cancel()
            else:  # interrupted before `start` was scheduled
                coroutine.close()
                outcome.set_exception(concurrent.futures.CancelledError())

        try:
            self._loop.call_soon_threadsafe(start)
            return outcome.result()
        except BaseException:
            if not outcome.done():  # we were interrupted, not the coroutine
                self._loop.call_soon_threadsafe(cancel)
                concurrent.futures.wait([outcome])
            raise

    def is_current(self) -> bool:
        """Whether the caller is on the loop's own thread, where `run` would wait for itself."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel what runs, stop the loop and join the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if tasks := asyncio.all_tasks(self._loop):  # of other threads, which wait for them
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _copy(task: asyncio.Task[_T], outcome: concurrent.futures.Future[_T]) -> None:
    if task.cancelled():
        outcome.set_exception(concurrent.futures.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
