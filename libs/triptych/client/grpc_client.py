"""A typed asyncio client of the public GenerationService: typed events out, typed errors raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from triptych.client.batch_stream import BatchStream, with_prompt
from triptych.client.request import (
    DEFAULT_OPTIONS,
    Prompt,
    RequestOptions,
    Sampling,
    build_generation,
    build_tokenize_request,
)
from triptych.config import TlsConfig
from triptych.config.loader import section_from_env
from triptych.errors import EngineUnavailable, GenerationLost, InvalidRequest, TriptychError
from triptych.rpc.channel import credentials_of, open_channel, with_api_key
from triptych.rpc.health import GENERATION_SERVICE
from triptych.rpc.status import from_rpc_error
from triptych.rpc.tls import ClientCredentials, create_client_tls
from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent
from triptych.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from triptych.wire.generation import event_from_proto

"""The health name that a frontend turns SERVING once it can take requests."""

_REDIAL_S = 0.1  # between two attempts to watch a server that is not there yet
_UNARY_TIMEOUT_S = 60.0  # tokenizing the longest prompt takes well under a second

_T = TypeVar("_T")


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


class GenerationClient:
    """One channel to one frontend, for use on the event loop that it is created on.

    Every method raises the errors of `triptych.errors` as the server meant them; EngineUnavailable also
    if no server answers at the address, GenerationLost where the connection broke after output had come.
    """

    def __init__(self, address: str, *, api_key: str | None = None, tls: TlsConfig | None = None) -> None:
        """
        Args:
            address: host:port of the frontend's gRPC server.
            api_key: The key that each call sends. None: $TRIPTYCH_API_KEY, if it is set.
            tls: How to dial: in plain text where `ca` is empty. None: as $TRIPTYCH_TLS_CA and the like say.

        Raises:
            ConfigError: Files of `tls` cannot be used; names them.
        """
        self.address = address
        tls = TlsConfig(**section_from_env("tls")) if tls is None else tls
        self._tls = create_client_tls(tls)
        self._api_key = api_key
        self._channels: list[grpc.aio.Channel] = []
        """The last is in use. Earlier ones carry calls that began before certificates were renewed."""
        self._dial(credentials_of(self._tls))

    def _dial(self, credentials: ClientCredentials | None) -> None:
        self._credentials = credentials
        channel = open_channel(self.address, credentials=credentials)
        self._channels.append(channel)
        self._generation_stub = with_api_key(
            generation_pb2_grpc.GenerationServiceStub(channel), self._api_key
        )
        self._model_stub = with_api_key(model_pb2_grpc.ModelServiceStub(channel), self._api_key)

    def _take_renewed_certificates(self) -> None:
        if (credentials := credentials_of(self._tls)) is not self._credentials:
            self._dial(credentials)

    @property
    def _stub(self) -> generation_pb2_grpc.GenerationServiceStub:
        self._take_renewed_certificates()
        return self._generation_stub

    @property
    def _models(self) -> model_pb2_grpc.ModelServiceStub:
        self._take_renewed_certificates()
        return self._model_stub

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @classmethod
    async def connect(
        cls, address: str, timeout_s: float, *, api_key: str | None = None, tls: TlsConfig | None = None
    ) -> GenerationClient:
        """A client whose frontend is ready; EngineUnavailable where it is not after `timeout_s`."""
        client = cls(address, api_key=api_key, tls=tls)
        try:
            await client.wait_ready(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """End what still runs and hang up."""
        for channel in self._channels:
            await channel.close(grace=None)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as the frontend can take requests.

        Raises:
            EngineUnavailable: it cannot after `timeout_s`; the message carries its last reason.
        """
        stub = health_pb2_grpc.HealthStub(self._channels[-1])
        state = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    call: Any = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
                    try:
                        async for response in call:
                            if response.status == health_pb2.HealthCheckResponse.SERVING:
                                return
                            state = "it answers, but no engine is ready"
                    except grpc.RpcError as error:
                        state = _reason(error)
                    finally:
                        call.cancel()
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
        call: Any = self._stub.StreamGenerate(request, timeout=timeout_s)
        has_output = False
        try:
            async for message in call:
                event = event_from_proto(message)
                if event is None:  # of a later version; the stream ends with `finished` all the same
                    continue
                if isinstance(event, DeltaEvent):
                    has_output = True
                elif isinstance(event, AdmittedEvent):
                    event = with_prompt(event, prompt, options)
                yield event
                if isinstance(event, FinishedEvent):
                    return
            raise GenerationLost(f"{self.address} ended the stream before the answer was finished")
        except grpc.RpcError as error:
            raise self.to_typed_error(error, has_output) from None
        finally:
            call.cancel()  # nothing happens to a call that has ended

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> TokenizedPrompt:
        """Text or a conversation as token ids."""
        request = build_tokenize_request(prompt, model)
        response = await self._unary(self._stub.Tokenize(request, timeout=_UNARY_TIMEOUT_S))
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
        return (await self._unary(self._stub.Detokenize(request, timeout=_UNARY_TIMEOUT_S))).text

    async def list_models(self) -> list[ServedModel]:
        """The models that requests may name."""
        models: list[ServedModel] = []
        request = model_pb2.ListModelsRequest()
        while True:
            response = await self._unary(self._models.ListModels(request, timeout=_UNARY_TIMEOUT_S))
            models += [
                ServedModel(model.name, model.max_model_len, model.vocab_size, model.create_time.seconds)
                for model in response.models
            ]
            if not response.next_page_token:
                return models
            request.page_token = response.next_page_token

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End requests of any client of the frontend with what they have; returns those that were alive."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        response = await self._unary(self._stub.Abort(request, timeout=_UNARY_TIMEOUT_S))
        return list(response.aborted_request_ids)

    def open_batch(self) -> BatchStream:
        """Return a stream for many requests."""
        return BatchStream(self._stub, self.to_typed_error)

    async def _unary(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.RpcError as error:
            raise self.to_typed_error(error, has_output=False) from None

    def to_typed_error(self, error: grpc.RpcError, has_output: bool) -> TriptychError:
        """Return the error that the server meant, or what became of the connection."""
        is_from_server = rpc_status.from_call(cast(Any, error)) is not None
        if error.code() is grpc.StatusCode.UNAVAILABLE and not is_from_server:
            if has_output:
                return GenerationLost(
                    f"the connection to {self.address} broke in mid-answer: {_reason(error)}"
                )
            return EngineUnavailable(f"no server answers at {self.address}: {_reason(error)}")
        return from_rpc_error(error)


def _reason(error: grpc.RpcError) -> str:
    """Return the last part of gRPC's message about a failed connection, which names the cause: `Connection refused`."""
    return (error.details() or error.code().name).rpartition(": ")[2]
