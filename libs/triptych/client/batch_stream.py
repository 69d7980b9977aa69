"""Many requests over one BatchGenerate stream: each is an item with a tag, and fails by itself.

When the stream breaks, its items go on one by one, at the same frontend or another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, cast

import grpc

from triptych.client.collect import OutputCollector
from triptych.client.dialer import Dialer
from triptych.client.prompts import Prompt, is_token_ids
from triptych.client.request import RequestOptions, Sampling, build_generation
from triptych.client.resumption import ResumableStream
from triptych.errors import GenerationLost, TriptychError
from triptych.rpc.status import from_rich_status, is_broken_write
from triptych.types.events import AdmittedEvent, Event, FinishedEvent
from triptych.types.outputs import RequestOutput
from triptych.v1 import generation_pb2, generation_pb2_grpc

_MAX_GOING_ON = 64
"""Calls at once that go on with the items of a stream that broke."""
_FIRST_ANSWER_S = 0.1
"""For the server to answer the first item or to refuse the stream. A message that is written while a refusal is under
way would turn it into an INTERNAL of grpc.aio's own, which does not say why the stream was refused."""


@dataclass(slots=True, eq=False)
class _Item:
    prompt: Prompt
    options: RequestOptions
    collector: OutputCollector
    stream: ResumableStream
    """Knows what has come, and how the stream is resumed."""
    answer: asyncio.Future[RequestOutput]

    def add(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, AdmittedEvent):
            event = with_prompt(event, self.prompt, self.options)
        self.collector.add(event)
        if isinstance(event, FinishedEvent) and not self.answer.done():
            self.answer.set_result(self.collector.output)

    def fail(self, error: Exception) -> None:
        """End it by an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Call:
    """One stream, from its opening until it breaks or is closed."""

    requests: asyncio.Queue[generation_pb2.BatchGenerateRequest] = field(default_factory=asyncio.Queue)
    items: dict[int, _Item] = field(default_factory=dict)
    """Tag -> item that has not ended."""
    has_answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once anything has come."""
    reader: asyncio.Task[None] | None = None


class BatchStream:
    """Opened by the first item. After a stream that breaks, the next item opens another.

    Owned by the coroutine that opened it, which closes it at the end: `async with`.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._tags = itertools.count(1)
        self._call: _Call | None = None
        self._going_on: set[asyncio.Task[None]] = set()
        """Items of streams that broke."""
        self._turn = asyncio.Semaphore(_MAX_GOING_ON)

    async def __aenter__(self) -> BatchStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def answer(
        self, prompt: Prompt, sampling: Sampling, options: RequestOptions, timeout_s: float | None = None
    ) -> RequestOutput:
        """Return the whole answer to one prompt. Cancelling it leaves the request running until `close`.

        Args:
            timeout_s: Seconds that the server may take, from its reading of the item. None: no limit.

        Raises:
            TriptychError: As `GenerationClient.generate`.
        """
        request = generation_pb2.StreamGenerateRequest(
            request_id=options.request_id, generation=build_generation(prompt, sampling, options)
        )
        if not request.request_id and len(self._dialer.addresses) > 1:
            request.request_id = uuid.uuid4().hex  # by which it is known if it has to be sent again
        item = _Item(
            prompt,
            options,
            OutputCollector(prompt if isinstance(prompt, str) else None),
            ResumableStream(self._dialer, request, timeout_s),
            asyncio.get_running_loop().create_future(),
        )
        call, tag = self._open(), next(self._tags)
        message = generation_pb2.BatchGenerateRequest(tag=tag, request=request)
        if timeout_s is not None:
            message.timeout_ms = max(1, round(timeout_s * 1000))
        call.items[tag] = item
        call.requests.put_nowait(message)
        return await item.answer

    async def close(self) -> None:
        """Abort what still runs."""
        call, self._call = self._call, None
        tasks = [*self._going_on, *([] if call is None or call.reader is None else [call.reader])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self) -> _Call:
        if self._call is None:
            self._call = _Call()
            self._call.reader = asyncio.create_task(self._read(self._call), name="read-batch")
        return self._call

    async def _read(self, call: _Call) -> None:
        address = self._dialer.address
        stub = self._dialer.stub(generation_pb2_grpc.GenerationServiceStub)
        stream: Any = stub.BatchGenerate(_requests(call))
        end: Exception = GenerationLost("the server ended the stream before all answers were finished")
        try:
            async for response in stream:
                call.has_answered.set()
                self._take(call, response, address)
        except Exception as error:
            end = error
        finally:
            stream.cancel()
            if self._call is call:
                self._call = None
            self._leave(call, end, address)

    def _leave(self, call: _Call, end: Exception, address: str) -> None:
        """Let the items of a stream that has ended go on, or fail."""
        if not isinstance(end, grpc.RpcError):
            for item in call.items.values():
                item.fail(end)
            return
        is_broken = self._dialer.is_broken(end)
        # The reason of a refusal was lost, so each item asks again by itself, and writes nothing after its request.
        is_refused = is_broken_write(end) and not call.has_answered.is_set()
        if is_broken and not is_refused:
            self._dialer.turn_from(address)
        for item in call.items.values():
            error = self._dialer.to_typed_error(end, item.stream.has_output, address)
            if is_refused or (is_broken and item.stream.may_go_on(error, is_broken=True)):
                self._start_going_on(item)
            else:
                item.fail(error)

    def _take(self, call: _Call, response: generation_pb2.BatchGenerateResponse, address: str) -> None:
        """Take in a message about an item. An item that its server hands over is resumed elsewhere."""
        item = call.items.get(response.tag)
        if item is None:
            return
        try:
            if response.WhichOneof("result") == "error":
                raise from_rich_status(response.error)
            event = item.stream.take(response.event)
        except TriptychError as error:
            del call.items[response.tag]
            if item.stream.may_go_on(error, is_broken=False):
                self._dialer.turn_from(address)
                self._start_going_on(item)
            else:
                item.fail(error)
            return
        if event is not None:
            item.add(event)
        if isinstance(event, FinishedEvent):
            del call.items[response.tag]

    def _start_going_on(self, item: _Item) -> None:
        task = asyncio.create_task(self._go_on(item), name="go-on")
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)

    async def _go_on(self, item: _Item) -> None:
        try:
            async with self._turn, aclosing(item.stream.events()) as events:
                async for event in events:
                    item.add(event)
        except Exception as error:
            item.fail(error)
        finally:
            item.fail(GenerationLost("the batch was closed before the answer was finished"))


def with_prompt(event: AdmittedEvent, prompt: Prompt, options: RequestOptions) -> AdmittedEvent:
    """Return the event with the token ids of its prompt, which the server does not send back if they are ours."""
    if not is_token_ids(prompt):
        return event
    token_ids = cast("Sequence[int]", prompt)
    max_kept = options.truncate_prompt_tokens
    return replace(event, prompt_token_ids=token_ids if max_kept is None else token_ids[-max_kept:])


async def _requests(call: _Call) -> AsyncIterator[generation_pb2.BatchGenerateRequest]:
    yield await call.requests.get()
    with contextlib.suppress(TimeoutError):  # it waits, as in a long queue, so it has not refused
        await asyncio.wait_for(call.has_answered.wait(), _FIRST_ANSWER_S)
    while True:
        yield await call.requests.get()
