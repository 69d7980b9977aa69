"""Many requests over one BatchGenerate stream: each is an item with a tag, and fails by itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, cast

import grpc

from triptych.client.collect import OutputCollector
from triptych.client.prompts import Prompt, is_token_ids
from triptych.client.request import RequestOptions, Sampling, build_generation
from triptych.errors import GenerationLost, TriptychError
from triptych.rpc.status import from_rich_status
from triptych.types.events import AdmittedEvent, DeltaEvent, FinishedEvent
from triptych.types.outputs import RequestOutput
from triptych.v1 import generation_pb2, generation_pb2_grpc
from triptych.wire.generation import event_from_proto

_FIRST_ANSWER_S = 0.1
"""For the server to answer the first item or to refuse the stream. A message that is written while a refusal is under
way would turn it into an INTERNAL of grpc.aio's own, which does not say why the stream was refused."""


@dataclass(slots=True, eq=False)
class _Item:
    prompt: Prompt
    options: RequestOptions
    collector: OutputCollector
    answer: asyncio.Future[RequestOutput]
    has_output: bool = False


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
    """Opened by the first item. A stream that breaks fails the items on it; the next item opens another.

    Owned by the coroutine that opened it, which closes it at the end: `async with`.
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceStub,
        to_typed_error: Callable[[grpc.RpcError, bool], TriptychError],
    ) -> None:
        """
        Args:
            to_typed_error: Explains the end of a stream, given whether output had come.
        """
        self._stub = stub
        self._to_typed_error = to_typed_error
        self._tags = itertools.count(1)
        self._call: _Call | None = None

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
        collector = OutputCollector(prompt if isinstance(prompt, str) else None)
        item = _Item(prompt, options, collector, asyncio.get_running_loop().create_future())
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
        if call is not None and call.reader is not None:
            call.reader.cancel()
            await asyncio.gather(call.reader, return_exceptions=True)

    def _open(self) -> _Call:
        if self._call is None:
            self._call = _Call()
            self._call.reader = asyncio.create_task(self._read(self._call), name="read-batch")
        return self._call

    async def _read(self, call: _Call) -> None:
        stream: Any = self._stub.BatchGenerate(_requests(call))
        end: Exception = GenerationLost("the server ended the stream before all answers were finished")
        try:
            async for response in stream:
                call.has_answered.set()
                _take(call, response)
        except Exception as error:
            end = error
        finally:
            stream.cancel()
            if self._call is call:
                self._call = None
            for item in call.items.values():
                if not item.answer.done():
                    item.answer.set_exception(self._explain(end, item))

    def _explain(self, end: Exception, item: _Item) -> Exception:
        return self._to_typed_error(end, item.has_output) if isinstance(end, grpc.RpcError) else end


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


def _take(call: _Call, response: generation_pb2.BatchGenerateResponse) -> None:
    item = call.items.get(response.tag)
    if item is None:
        return
    try:
        if response.WhichOneof("result") == "error":
            raise from_rich_status(response.error)
        event = event_from_proto(response.event)
    except TriptychError as error:
        del call.items[response.tag]
        if not item.answer.done():
            item.answer.set_exception(error)
        return
    if event is None:
        return
    if isinstance(event, AdmittedEvent):
        event = with_prompt(event, item.prompt, item.options)
    item.has_output = item.has_output or isinstance(event, DeltaEvent)
    item.collector.add(event)
    if isinstance(event, FinishedEvent):
        del call.items[response.tag]
        if not item.answer.done():
            item.answer.set_result(item.collector.output)
