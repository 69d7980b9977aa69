"""The items of one BatchGenerate call: read while there is space, run together, answered as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from triptych.errors import TriptychError
from triptych.rpc.status import internal_rich_status, to_rich_status
from triptych.v1 import generation_pb2

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
"""Items of one call that run at a time. The next one is read when one of them has ended."""
_MAX_UNSENT = 32  # messages; a client that reads no faster finds its output merged


class BatchRun:
    """Owned by the call. Items share nothing but the order in which their messages are written."""

    def __init__(
        self,
        answer: Callable[
            [generation_pb2.BatchGenerateRequest], AsyncGenerator[generation_pb2.StreamGenerateResponse]
        ],
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        """
        Args:
            answer: Streams the answer to one item. Closing it aborts the item.
        """
        self._answer = answer
        self._places = asyncio.Semaphore(max_in_flight)
        self._items: set[asyncio.Task[None]] = set()
        # An exception is the reader's; None ends the call.
        self._responses: asyncio.Queue[generation_pb2.BatchGenerateResponse | Exception | None] = (
            asyncio.Queue(_MAX_UNSENT)
        )

    async def run(
        self, requests: AsyncIterator[generation_pb2.BatchGenerateRequest]
    ) -> AsyncGenerator[generation_pb2.BatchGenerateResponse]:
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

    async def _read(self, requests: AsyncIterator[generation_pb2.BatchGenerateRequest]) -> None:
        end: Exception | None = None
        try:
            async for request in requests:
                await self._places.acquire()
                item = asyncio.create_task(self._run_item(request), name=f"batch-item-{request.tag}")
                self._items.add(item)
                item.add_done_callback(self._forget)
            await asyncio.gather(*self._items)
        except Exception as error:
            end = error
        await self._responses.put(end)

    def _forget(self, item: asyncio.Task[None]) -> None:
        self._items.discard(item)
        self._places.release()

    async def _run_item(self, request: generation_pb2.BatchGenerateRequest) -> None:
        """Put the item's messages into the queue, at last the status of its error if it fails."""
        tag = request.tag
        try:
            async with aclosing(self._answer(request)) as messages:
                async for message in messages:
                    await self._responses.put(generation_pb2.BatchGenerateResponse(tag=tag, event=message))
            return
        except TriptychError as error:
            status = to_rich_status(error, request.request.request_id)
        except Exception as error:
            request_id = request.request.request_id
            log.error(
                "an item of a batch (request %s) failed by a bug: %r", request_id, error, exc_info=error
            )
            status = internal_rich_status(request_id)
        await self._responses.put(generation_pb2.BatchGenerateResponse(tag=tag, error=status))
