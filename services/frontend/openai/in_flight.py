"""The work of the HTTP requests that run now: it ends when its client leaves, or when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from triptych.errors import EngineUnavailable

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client has closed its connection and reads no answer."""


class InFlight:
    """Owned by the app; requests enter themselves, the server ends what outlasts its grace."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    async def run(self, receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`, whose request's body has been read, and cancel it as soon as its client leaves.

        Raises:
            ClientGone: the client left first.
            EngineUnavailable: the server is stopping.
        """
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_wait_for_disconnect(receive))
        self._tasks.add(task)
        try:
            if not self._is_ending:
                await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if self._is_ending:
                raise EngineUnavailable("the server is stopping; try again, or try another one")
            raise ClientGone
        finally:
            self._tasks.discard(task)
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    def end_all(self) -> int:
        """End what runs now, and at once whatever still comes, each with an error to its client.

        Returns how many ran.
        """
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
