"""A typed asyncio client of the public GenerationService: typed events out, typed errors raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from triptych.client.request import (
    DEFAULT_OPTIONS,
    Prompt,
    RequestOptions,
    Sampling,
    build_request,
    set_prompt,
    wants_rest_of_context,
)
from triptych.errors import EngineUnavailable, GenerationLost, InvalidRequest, ModelNotFound, TriptychError
from triptych.rpc.channel import open_channel
from triptych.rpc.health import GENERATION_SERVICE
from triptych.rpc.status import from_rpc_error
from triptych.types.events import DeltaEvent, Event, FinishedEvent
from triptych.types.sampling import SamplingParams
from triptych.v1 import generation_pb2, generation_pb2_grpc
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

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @classmethod
    async def connect(cls, address: str, timeout_s: float) -> GenerationClient:
        """A client whose frontend is ready; EngineUnavailable where it is not after `timeout_s`."""
        client = cls(address)
        try:
            await client.wait_ready(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """End what still runs and hang up."""
        await self._channel.close(grace=None)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as the frontend can take requests.

        Raises:
            EngineUnavailable: it cannot after `timeout_s`; the message carries its last reason.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
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
                rest of the context, which costs one more call for a text or token prompt.
            timeout_s: the request's deadline; the engine drops it then.
        """
        if wants_rest_of_context(prompt, sampling):
            prompt, sampling = await self._fill_context(prompt, cast(SamplingParams, sampling), options)
        call: Any = self._stub.Generate(build_request(prompt, sampling, options), timeout=timeout_s)
        has_output = False
        try:
            async for message in call:
                event = event_from_proto(message)
                has_output = has_output or isinstance(event, DeltaEvent)
                yield event
                if isinstance(event, FinishedEvent):
                    return
            raise GenerationLost(f"{self.address} ended the stream before the answer was finished")
        except grpc.RpcError as error:
            raise self._typed(error, has_output) from None
        finally:
            call.cancel()  # nothing happens to a call that has ended

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> TokenizedPrompt:
        """Text or a conversation as token ids."""
        request = generation_pb2.TokenizeRequest(model=model)
        set_prompt(request, prompt)
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
        request = generation_pb2.ListModelsRequest()
        response = await self._unary(self._stub.ListModels(request, timeout=_UNARY_TIMEOUT_S))
        return [
            ServedModel(model.name, model.max_model_len, model.vocab_size, model.created_unix_s)
            for model in response.models
        ]

    async def _fill_context(
        self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions
    ) -> tuple[Prompt, SamplingParams]:
        """The prompt as token ids, and max_tokens as a number: what the context has left."""
        if isinstance(prompt, str):
            tokenized = await self.tokenize(prompt, model=options.model)
            token_ids, max_model_len = tokenized.token_ids, tokenized.max_model_len
        else:
            token_ids = list(cast("Sequence[int]", prompt))
            max_model_len = await self._max_model_len(options.model)
        num_prompt_tokens = len(token_ids)
        if options.truncate_prompt_tokens is not None:
            num_prompt_tokens = min(num_prompt_tokens, options.truncate_prompt_tokens)
        # A prompt that leaves no space for output is sent as well: the server's refusal names both numbers.
        return token_ids, replace(sampling, max_tokens=max(1, max_model_len - num_prompt_tokens))

    async def _max_model_len(self, model: str) -> int:
        for served in await self.list_models():
            if model in ("", served.name):
                return served.max_model_len
        raise ModelNotFound(f"model: {model!r} is not served at {self.address}")

    async def _unary(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.RpcError as error:
            raise self._typed(error, has_output=False) from None

    def _typed(self, error: grpc.RpcError, has_output: bool) -> TriptychError:
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
