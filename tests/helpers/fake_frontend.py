"""A GenerationService without a model: echoes words, refuses above its capacity, counts what it sees."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.byte_tokenizer import write_model_directory
from triptych.client.loop_thread import LoopThread
from triptych.compat import common_pb2, vllm_engine_pb2_grpc
from triptych.errors import DeadlineExceeded, InvalidRequest, QueueFull, TriptychError
from triptych.rpc.channel import PUBLIC_MESSAGE_BYTES
from triptych.rpc.server import RpcServer
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.types.logprobs import Logprob, TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, Usage
from triptych.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from triptych.wire.generation import EventEncoder
from triptych_services.frontend.grpc.batch import BatchRun, items_in_flight
from triptych_services.frontend.grpc.vllm.servicer import pack

SERVICE = "triptych.v1.GenerationService"
MAX_MODEL_LEN = 100


class FakeFrontend(generation_pb2_grpc.GenerationServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """Answers "a b c" with the tokens " a", " b", " c" (ids 1, 2, 3). "hang" is never answered.

    Runs on a thread of its own from `with` to its end. Attributes are written there and read by tests.
    """

    def __init__(
        self,
        *,
        capacity: int = 1_000_000,
        token_delay_s: float = 0.0,
        retry_after_s: float = 0.01,
        port: int = 0,
    ) -> None:
        self.capacity = capacity
        self.token_delay_s = token_delay_s
        self.retry_after_s = retry_after_s
        self.errors: list[TriptychError] = []
        """Raised, one for each of the next requests."""
        self.on_request: Callable[[generation_pb2.StreamGenerateRequest], None] = lambda request: None
        """Called with each request before anything else is done."""
        self.waits_for_running = 0
        """Nothing is answered until so many requests have run at once."""
        self.waits_for_refusals = 0
        """Nothing is answered until so many requests were refused."""
        self.is_ready = True
        self.why_waiting = ""
        self.breaks_mid_answer = False
        self.adds_unknown = False
        """An event of a kind that no client knows follows every event."""
        self.on_call: Callable[[Any], None] = lambda context: None
        """Called with the context of each call that generates."""
        self.max_running_choices = 0
        """That its engines tell."""
        self.requests: list[generation_pb2.StreamGenerateRequest] = []
        self.tokenizer = FakeTokenizer()
        self.num_batches = 0
        self.num_running = self.max_running = self.num_refused = self.num_cancelled = 0
        self.port = port
        self._loop = LoopThread("fake-frontend")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeFrontend:
        self._loop.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.close()

    def stop(self) -> None:
        """Hang up on everyone and leave the port; `with` does it, too."""
        self._loop.run(self._server.stop(0))

    def set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        self._loop.run(self._server.set_ready(is_ready))

    async def _start(self) -> None:
        self._server = RpcServer(services=[SERVICE], limit_bytes=PUBLIC_MESSAGE_BYTES)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server.grpc)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server.grpc)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self.tokenizer, self._server.grpc)
        self.port = self._server.bind("127.0.0.1", self.port, option="port")
        await self._server.start()
        await self._server.set_ready(True)

    async def BatchGenerate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.num_batches += 1
        self.on_call(context)
        run = BatchRun(
            lambda item: self._within(item, context),
            lambda: items_in_flight(self.max_running_choices),
            to_error=lambda item, status: generation_pb2.BatchGenerateResponse(tag=item.tag, error=status),
            id_of=lambda item: item.request.request_id,
        )
        async with aclosing(run.run(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def _within(self, item: Any, context: Any) -> AsyncGenerator[Any]:
        """Answer an item of a batch within its time."""
        try:
            async with (
                asyncio.timeout(item.timeout_ms / 1000 if item.HasField("timeout_ms") else None),
                aclosing(self.StreamGenerate(item.request, context)) as messages,
            ):
                async for message in messages:
                    yield generation_pb2.BatchGenerateResponse(tag=item.tag, event=message)
        except TimeoutError:
            raise DeadlineExceeded("its time ran out") from None

    async def StreamGenerate(
        self, request: generation_pb2.StreamGenerateRequest, context: Any
    ) -> AsyncGenerator[Any]:
        self.on_request(request)
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        if self.num_running >= self.capacity:
            self.num_refused += 1
            raise QueueFull(f"{self.num_running} requests run, {self.capacity} may", self.retry_after_s)
        words = _words(request.generation)
        encoder = EventEncoder(request.generation.response)
        if not words:
            raise InvalidRequest("prompt", "is empty")
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        is_running = True
        try:
            if words == ["hang"]:
                yield encoder.encode(AdmittedEvent("hang", "fake", 7, [1]))[0]
                await asyncio.Event().wait()
            async for event in self._answer(request, words):
                if isinstance(event, FinishedEvent):  # its place is free before its client knows
                    self.num_running, is_running = self.num_running - 1, False
                for message in encoder.encode(event):
                    yield message
                    if self.adds_unknown:
                        yield unknown_event()
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= is_running

    async def _answer(
        self, request: generation_pb2.StreamGenerateRequest, words: list[str]
    ) -> AsyncIterator[Event]:
        yield AdmittedEvent(request.request_id or "drawn", "fake", 7, list(range(len(words))))
        while self.max_running < self.waits_for_running or self.num_refused < self.waits_for_refusals:
            await asyncio.sleep(0.01)
        num_choices = request.generation.sampling.n or 1
        for index in range(num_choices):
            if request.generation.response.whole_choices:
                await asyncio.sleep(self.token_delay_s * len(words))
                yield _delta(index, "".join(f" {w}" for w in words), range(1, len(words) + 1), is_last=True)
                continue
            for i, word in enumerate(words):
                await asyncio.sleep(self.token_delay_s)
                yield _delta(index, f" {word}", [i + 1], is_last=i == len(words) - 1)
                if self.breaks_mid_answer:
                    asyncio.get_running_loop().create_task(self._server.stop(0))
                    await asyncio.Event().wait()
        yield FinishedEvent(Usage(len(words), len(words) * num_choices), StageTimings(1, 2, 3))

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: Any) -> Any:
        ids = range(1, len(_words(request)) + 1)
        return generation_pb2.TokenizeResponse(token_ids=ids, max_model_len=MAX_MODEL_LEN)

    async def Detokenize(self, request: generation_pb2.DetokenizeRequest, context: Any) -> Any:
        return generation_pb2.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    async def Abort(self, request: generation_pb2.AbortRequest, context: Any) -> Any:
        return generation_pb2.AbortResponse(aborted_request_ids=request.request_ids[:1])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> Any:
        model = _model("fake")
        model.max_running_choices = self.max_running_choices
        return model_pb2.GetModelResponse(model=model)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return model_pb2.GetServerInfoResponse(
            ready=self.is_ready, why_not_ready="it rests", why_waiting=self.why_waiting
        )

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> Any:
        """Two models, on a page of their own each."""
        names = ["fake", "fake-2"]
        page = names.index(request.page_token) + 1 if request.page_token else 0
        model = _model(names[page])
        next_page_token = names[page] if page + 1 < len(names) else ""
        return model_pb2.ListModelsResponse(models=[model], next_page_token=next_page_token)


class FakeTokenizer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Sends the files of `byte_tokenizer`, in chunks of a few bytes."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self.archive = pack(write_model_directory(Path(directory)))
        self.digest = hashlib.sha256(self.archive).hexdigest()
        self.num_calls = 0

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncGenerator[Any]:
        self.num_calls += 1
        for start in range(0, len(self.archive), 1000):
            is_last = start + 1000 >= len(self.archive)
            yield common_pb2.GetTokenizerChunk(
                data=self.archive[start : start + 1000], sha256=self.digest if is_last else ""
            )


def _model(name: str) -> model_pb2.Model:
    model = model_pb2.Model(name=name, max_model_len=MAX_MODEL_LEN, vocab_size=50, eos_token_ids=[2])
    model.create_time.FromSeconds(1_700_000_000)
    return model


def unknown_event() -> generation_pb2.StreamGenerateResponse:
    """An event of a kind that a later version may add: field 15, of which this one knows nothing."""
    return generation_pb2.StreamGenerateResponse.FromString(b"\x7a\x02\x08\x01")


def _words(prompt: generation_pb2.Generation | generation_pb2.TokenizeRequest) -> list[str]:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text.text.split()
        case "token_ids":
            return [str(token_id) for token_id in prompt.token_ids.ids]
        case _:
            return prompt.chat.messages[-1].parts[0].text.split()


def _delta(index: int, text: str, token_ids: Any, *, is_last: bool) -> DeltaEvent:
    logprobs = tuple(TokenLogprobs.of(Logprob(token_id, -0.5)) for token_id in token_ids)
    return DeltaEvent(
        index, text, list(token_ids), logprobs,
        FinishReason.STOP if is_last else None, "." if is_last else None,
    )  # fmt: skip
