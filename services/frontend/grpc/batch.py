"""The items of one call that streams both ways: read while there is space, run together, answered as they come."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from triptych.errors import TriptychError
from triptych.rpc.status import internal_rich_status, to_rich_status

log = logging.getLogger(__name__)

MAX_BYTES_IN_FLIGHT = 64 << 20
"""Bytes of the items of one call that run at a time."""
_MIN_IN_FLIGHT = 256
_MAX_UNSENT = 32  # messages; a client that reads no faster finds its output merged


def items_in_flight(max_running: int) -> int:
    """Return how many items of one call run at a time: enough for the engines to have the next ones waiting.

    Args:
        max_running: Choices that all engines can run at a time. 0: not known.
    """
    return max(_MIN_IN_FLIGHT, 2 * max_running)


class BatchItem(Protocol):
    """A message of the client's: one item."""

    tag: int

    def ByteSize(self) -> int:  # protobuf's
        """Return its size in bytes."""
        ...


_Item = TypeVar("_Item", bound=BatchItem)
_Answer = TypeVar("_Answer")


class BatchRun(Generic[_Item, _Answer]):
    """Owned by the call. Items share nothing but the order in which their messages are written."""

    def __init__(
        self,
        answer: Callable[[_Item], AsyncGenerator[_Answer]],
        max_in_flight: Callable[[], int],
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
        *,
        to_error: Callable[[_Item, Any], _Answer],
        id_of: Callable[[_Item], str],
    ) -> None:
        """
        Args:
            answer: Streams the answer to one item. Closing it aborts the item.
            to_error: Returns the message of an item that failed with a status.
            id_of: Returns the request id of an item.
            max_in_flight: Returns how many items may run at a time now. The next one is read when there is space.
            max_bytes_in_flight: Bytes of all items that run, at most; a larger item runs alone.
        """
        self._answer = answer
        self._to_error = to_error
        self._id_of = id_of
        self._max_in_flight = max_in_flight
        self._max_bytes_in_flight = max_bytes_in_flight
        self._num_bytes = 0
        self._has_ended = asyncio.Event()
        """Set when an item ends."""
        self._items: set[asyncio.Task[None]] = set()
        # An exception is the reader's; None ends the call.
        self._responses: asyncio.Queue[_Answer | Exception | None] = asyncio.Queue(_MAX_UNSENT)

    async def run(self, requests: AsyncIterator[_Item]) -> AsyncGenerator[_Answer]:
        """Yield the messages of all items. Closing it aborts those that run."""
        reader = asyncio.create_task(self._read(requests), name="read-batch")
        try:
            while (response := await self._responses.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            tasks = (reader, *self._items)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[_Item]) -> None:
        end: Exception | None = None
        try:
            async for request in requests:
                num_bytes = request.ByteSize()
                while not self._has_space(num_bytes):
                    self._has_ended.clear()
                    await self._has_ended.wait()
                item = asyncio.create_task(self._run_item(request), name=f"batch-item-{request.tag}")
                self._items.add(item)
                self._num_bytes += num_bytes
                item.add_done_callback(functools.partial(self._forget, num_bytes))
            await asyncio.gather(*self._items)
        except Exception as error:
            end = error
        await self._responses.put(end)

    def _has_space(self, num_bytes: int) -> bool:
        if not self._items:
            return True
        return (
            len(self._items) < self._max_in_flight()
            and self._num_bytes + num_bytes <= self._max_bytes_in_flight
        )

    def _forget(self, num_bytes: int, item: asyncio.Task[None]) -> None:
        self._items.discard(item)
        self._num_bytes -= num_bytes
        self._has_ended.set()

    async def _run_item(self, request: _Item) -> None:
        """Put the item's messages into the queue, at last the status of its error if it fails."""
        try:
            async with aclosing(self._answer(request)) as messages:
                async for message in messages:
                    await self._responses.put(message)
            return
        except TriptychError as error:
            status = to_rich_status(error, self._id_of(request))
        except Exception as error:
            request_id = self._id_of(request)
            log.error(
                "an item of a batch (request %s) failed by a bug: %r", request_id, error, exc_info=error
            )
            status = internal_rich_status(request_id)
        await self._responses.put(self._to_error(request, status))
