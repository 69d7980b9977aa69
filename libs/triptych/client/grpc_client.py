"""A typed asyncio client of the public GenerationService: typed events out, typed errors raised."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.client.batch_stream import BatchStream, with_prompt
from triptych.client.conversation import DEFAULT_CHAT, ChatOptions
from triptych.client.dialer import Dialer, reason_of
from triptych.client.pooled import PooledCalls
from triptych.client.prompts import Prompt
from triptych.client.request import (
    DEFAULT_OPTIONS,
    RequestOptions,
    Sampling,
    build_generation,
    build_tokenize_request,
)
from triptych.client.resumption import ResumableStream
from triptych.compat import common_pb2, vllm_engine_pb2_grpc
from triptych.config import TlsConfig
from triptych.errors import EngineUnavailable, InvalidRequest, ModelError
from triptych.rpc.health import GENERATION_SERVICE
from triptych.types.events import AdmittedEvent, Event
from triptych.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

_T = TypeVar("_T")
_REDIAL_S = 0.1  # between two attempts to watch a server that is not there yet
_UNARY_TIMEOUT_S = 60.0  # tokenizing the longest prompt takes well under a second
_TOKENIZER_TIMEOUT_S = 300.0
_MAX_TOKENIZER_BYTES = 1 << 28  # zipped; the largest that are known have 12 MB


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model will see it."""

    token_ids: list[int]
    max_model_len: int
    """Prompt and output together may have this many tokens."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model that requests may name."""

    name: str
    max_model_len: int
    vocab_size: int
    created_unix_s: int
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Fields of `SamplingParams` that the model's generation_config.json sets for requests that leave them out."""
    max_running: int = 0
    """Choices that its engines run at a time at most, all together. 0: not known."""


class GenerationClient:
    """A client of a frontend, or of several that serve the same, for use on the event loop that it is created on.

    Every method raises the errors of `triptych.errors` as the server meant them; EngineUnavailable also
    if no server answers at the address, GenerationLost where the connection broke after output had come.

    A stream is resumed by itself when its connection breaks, at the same frontend or at another of `address`.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """See `Dialer`."""
        self._dialer = Dialer(address, api_key, tls, metadata)
        self.address = address
        """As given."""

    @property
    def _stub(self) -> generation_pb2_grpc.GenerationServiceStub:
        return self._dialer.stub(generation_pb2_grpc.GenerationServiceStub)

    @property
    def _models(self) -> model_pb2_grpc.ModelServiceStub:
        return self._dialer.stub(model_pb2_grpc.ModelServiceStub)

    @property
    def pooled(self) -> PooledCalls:
        """The calls that return vectors, scores and classes."""
        return PooledCalls(self._dialer, self._ask)

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @classmethod
    async def connect(
        cls,
        address: str,
        timeout_s: float,
        *,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> GenerationClient:
        """Return a client of a frontend that is ready; EngineUnavailable where it is not after `timeout_s`."""
        client = cls(address, api_key=api_key, tls=tls, metadata=metadata)
        try:
            await client.wait_ready(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """End what still runs and hang up."""
        await self._dialer.close()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as the frontend can take requests.

        Raises:
            EngineUnavailable: it cannot after `timeout_s`; the message carries its last reason.
        """
        state = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    address = self._dialer.address
                    stub = health_pb2_grpc.HealthStub(self._dialer.channel)
                    call: Any = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
                    try:
                        async for response in call:
                            if response.status == health_pb2.HealthCheckResponse.SERVING:
                                return
                            state = "it answers, but no engine is ready"
                            if len(self._dialer.addresses) > 1:
                                break  # another one may be
                    except grpc.RpcError as error:
                        state = reason_of(error)
                    finally:
                        call.cancel()
                    self._dialer.turn_from(address)
                    await asyncio.sleep(_REDIAL_S)
        except TimeoutError:
            raise EngineUnavailable(f"{self.address} is not ready after {timeout_s:g} s: {state}") from None

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Stream one answer: AdmittedEvent, PromptLogprobsEvents if asked for, DeltaEvents, FinishedEvent. Closing the
        iterator aborts it.

        Args:
            sampling: see `request.Sampling`. With SamplingParams(max_tokens=None) the answer may take the
                rest of the context.
            timeout_s: the request's deadline; the engine drops it then.
        """
        request = generation_pb2.StreamGenerateRequest(
            request_id=options.request_id, generation=build_generation(prompt, sampling, options)
        )
        if not request.request_id and len(self._dialer.addresses) > 1:
            request.request_id = uuid.uuid4().hex  # by which it is known if it has to be sent again
        async with aclosing(ResumableStream(self._dialer, request, timeout_s).events()) as events:
            async for event in events:
                yield with_prompt(event, prompt, options) if isinstance(event, AdmittedEvent) else event

    async def tokenize(
        self, prompt: Prompt, *, model: str = "", chat: ChatOptions = DEFAULT_CHAT
    ) -> TokenizedPrompt:
        """Text or a conversation as token ids."""
        request = build_tokenize_request(prompt, model, chat)
        response = await self._ask(lambda: self._stub.Tokenize(request, timeout=_UNARY_TIMEOUT_S))
        return TokenizedPrompt(list(response.token_ids), response.max_model_len)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True
    ) -> str:
        """Token ids as text; bytes that are no character become U+FFFD."""
        try:
            request = generation_pb2.DetokenizeRequest(
                model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest("token_ids", f"a value cannot be sent: {error}") from None
        return (await self._ask(lambda: self._stub.Detokenize(request, timeout=_UNARY_TIMEOUT_S))).text

    async def get_model(self, name: str = "") -> ServedModel:
        """Return the model of this name; empty: the one served, if there is only one."""
        request = model_pb2.GetModelRequest(name=name)
        return _served(
            (await self._ask(lambda: self._models.GetModel(request, timeout=_UNARY_TIMEOUT_S))).model
        )

    async def check_health(self) -> None:
        """Check that the frontend takes requests now.

        Raises:
            EngineUnavailable: It does not; says why.
        """
        request = model_pb2.GetServerInfoRequest()
        info = await self._ask(lambda: self._models.GetServerInfo(request, timeout=_UNARY_TIMEOUT_S))
        if not info.ready:
            raise EngineUnavailable(f"{self.address} is not ready: {info.why_not_ready}")

    async def why_waiting(self) -> str:
        """Return why requests wait at the frontend, for example because engines sleep. Empty: it knows no reason."""
        request = model_pb2.GetServerInfoRequest()
        info = await self._ask(lambda: self._models.GetServerInfo(request, timeout=_UNARY_TIMEOUT_S))
        return str(info.why_waiting)

    async def list_models(self) -> list[ServedModel]:
        """The models that requests may name."""
        models: list[ServedModel] = []
        request = model_pb2.ListModelsRequest()
        while True:
            response = await self._ask(lambda: self._models.ListModels(request, timeout=_UNARY_TIMEOUT_S))
            models += map(_served, response.models)
            if not response.next_page_token:
                return models
            request.page_token = response.next_page_token

    async def fetch_tokenizer(self) -> bytes:
        """Return a zip archive of the files of the served model's tokenizer.

        Raises:
            ModelError: It is not what the server packed, or larger than any tokenizer.
        """
        return await self._ask(self._read_tokenizer)

    async def _read_tokenizer(self) -> bytes:
        stub = self._dialer.stub(vllm_engine_pb2_grpc.VllmEngineStub)
        call: Any = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=_TOKENIZER_TIMEOUT_S)
        archive, digest = bytearray(), ""
        try:
            async for chunk in call:
                archive += chunk.data
                digest = chunk.sha256
                if len(archive) > _MAX_TOKENIZER_BYTES:
                    raise ModelError(
                        f"the tokenizer of {self.address} has more than {_MAX_TOKENIZER_BYTES >> 20} MiB"
                    )
        finally:
            call.cancel()
        if hashlib.sha256(archive).hexdigest() != digest:
            raise ModelError(f"the tokenizer of {self.address} came damaged: its digest differs")
        return bytes(archive)

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End requests of any client of the frontend with what they have; returns those that were alive."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        response = await self._ask(lambda: self._stub.Abort(request, timeout=_UNARY_TIMEOUT_S))
        return list(response.aborted_request_ids)

    def open_batch(self) -> BatchStream:
        """Return a stream for many requests."""
        return BatchStream(self._dialer)

    async def _ask(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the answer to a call that may be made again; a frontend that does not answer is passed over."""
        for _ in self._dialer.addresses[1:]:
            address = self._dialer.address
            try:
                return await self._dialer.answer(call())
            except EngineUnavailable:
                self._dialer.turn_from(address)
        return await self._dialer.answer(call())


def _served(model: model_pb2.Model) -> ServedModel:
    return ServedModel(
        model.name,
        model.max_model_len,
        model.vocab_size,
        model.create_time.seconds,
        tuple(model.eos_token_ids),
        {descriptor.name: value for descriptor, value in model.default_sampling.ListFields()},
        model.max_running_choices,
    )
