"""The state of an HTTP app: its generator, its reader of bodies, and the work of the requests that run now."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from triptych.errors import EngineUnavailable
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.http.body import ClientGone
from triptych_services.frontend.http.body_reader import BodyReader

_T = TypeVar("_T")


class InFlight:
    """Owned by the app; requests enter themselves, the server ends what outlasts its grace."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    async def run(self, receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`, whose request's body has been read, and cancel it as soon as its client leaves.

        It runs in the task of the request, so that an answer need not wait for another task to end.

        Raises:
            ClientGone: the client left first.
            EngineUnavailable: the server is stopping.
        """
        if self._is_ending:
            work.close()
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        watcher = asyncio.create_task(_wait_for_disconnect(receive))
        is_running = True  # a request may call this again, and then has the same task
        watcher.add_done_callback(lambda _: self._end(task) if is_running else None)
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_ending:
                raise _stopping() from None
            if watcher.done():
                raise ClientGone from None
            raise  # by the server
        finally:
            is_running = False
            self._tasks.discard(task)
            if task.cancelling() and (self._is_ending or watcher.done()):
                task.uncancel()
            watcher.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Cancel the work of a request, once, if it still runs."""
        if task in self._tasks and not task.cancelling():
            task.cancel()

    def end_all(self) -> int:
        """End what runs now, and at once whatever still comes, each with an error to its client.

        Returns how many ran.
        """
        self._is_ending = True
        for task in self._tasks:
            self._end(task)
        return len(self._tasks)


def _stopping() -> EngineUnavailable:
    return EngineUnavailable("the server is stopping; try again, or try another one")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def generator_of(request: Request) -> Generator:
    """Return the generator of the app that serves a request."""
    generator: Generator = request.app.state.generator
    return generator


def reader_of(request: Request) -> BodyReader:
    """Return the reader of bodies of the app that serves a request."""
    reader: BodyReader = request.app.state.reader
    return reader
