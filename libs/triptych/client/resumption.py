"""Resumes streams when their connection breaks, at the same frontend or another; no token is lost or repeated."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from triptych.client.dialer import Dialer
from triptych.errors import (
    AttachedElsewhere,
    DeadlineExceeded,
    EngineUnavailable,
    FeatureDisabled,
    GenerationLost,
    NotKept,
    TriptychError,
)
from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.outputs import StageTimings, Usage
from triptych.v1 import generation_pb2, generation_pb2_grpc
from triptych.wire.generation import event_from_proto

log = logging.getLogger(__name__)

RESUME_S = 15.0
"""Time without a new message after which a stream is not resumed any more; a little longer than frontends keep one."""
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 1.0


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False


class ResumableStream:
    """The events of one request over as many calls as it takes. `events` is called once."""

    def __init__(
        self, dialer: Dialer, request: generation_pb2.StreamGenerateRequest, timeout_s: float | None
    ) -> None:
        """`timeout_s`: Seconds for all of it. None: no limit."""
        self._dialer = dialer
        self._request = request
        # A frontend that stops keeps the stream for its drain if this client knows no other address.
        self._request.resumes = len(dialer.addresses) > 1
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._token = ""
        self._was_kept = False
        """The server kept the stream, so that another one, or the next at its address, was to go on with it."""
        self._last_sequence = 0
        self._admitted: AdmittedEvent | None = None
        self._has_prompt_logprobs = False
        self._choices: dict[int, _Choice] = {}
        self._num_others = 0
        """Output tokens of the choices that were complete when the request was sent again."""
        self._progress_at = 0.0
        """Time of the last new message."""
        self._pause_s = _FIRST_PAUSE_S

    @property
    def has_output(self) -> bool:
        """Whether output has come."""
        return bool(self._choices)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield each event once, those after what `take` has noted. Closing the iterator aborts the request.

        Raises:
            TriptychError: What ends the request, or why it could not be gone on with.
        """
        first_error: TriptychError | None = None
        self._progress_at = time.monotonic()
        while True:
            if self._admitted is not None and self._is_complete and not self._token:
                yield self._end_without_counts(self._admitted)
                return
            address = self._dialer.address
            call: Any = None
            try:
                call = self._call()
                async for event in self._read(call):
                    first_error, self._pause_s = None, _FIRST_PAUSE_S
                    self._progress_at = time.monotonic()
                    yield event
                    if isinstance(event, FinishedEvent):
                        return
                error: TriptychError = GenerationLost(
                    f"{address} ended the stream before the answer was finished"
                )
            except grpc.RpcError as broken:
                error = self._dialer.to_typed_error(broken, self.has_output, address)
                if not self.may_go_on(error, is_broken=self._dialer.is_broken(broken)):
                    if first_error is None:
                        raise error from None
                    raise first_error from error
            finally:
                if call is not None:
                    call.cancel()  # nothing happens to a call that has ended
            first_error = first_error or error
            if time.monotonic() - self._progress_at > RESUME_S:
                raise first_error from None
            log.info("the stream of request %s broke, and goes on: %s", self._request.request_id, error)
            self._dialer.turn_from(address)
            await self._pause(first_error)
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    async def _pause(self, error: TriptychError) -> None:
        """Wait before the next call.

        Raises:
            DeadlineExceeded: There is no time for another one.
        """
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if self._deadline is not None and time.monotonic() + pause_s >= self._deadline:
            await asyncio.sleep(max(0.0, self._deadline - time.monotonic()))
            raise DeadlineExceeded(f"its time was over before the stream could go on: {error.message}")
        await asyncio.sleep(pause_s)

    def may_go_on(self, error: TriptychError, *, is_broken: bool) -> bool:
        """Return whether another call may bring the rest.

        Args:
            is_broken: Whether the call ended without a word of the server.
        """
        if isinstance(error, AttachedElsewhere):
            return False
        response = self._request.generation.response
        knows_output = not self._choices or response.token_ids or not response.HasField("token_ids")
        if isinstance(error, NotKept | FeatureDisabled) and self._token:
            # From here on the request is sent again, with what has come. Frontends of an older build serve no `Attach`.
            self._token, self._was_kept = "", True
            return knows_output
        if not (is_broken or isinstance(error, EngineUnavailable)):
            return False
        return bool(self._token) or (knows_output and (self._was_kept or len(self._dialer.addresses) > 1))

    def _call(self) -> Any:
        timeout_s = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)
        stub = self._dialer.stub(generation_pb2_grpc.GenerationServiceStub)
        if self._token:
            return stub.Attach(self._attach_request(), timeout=timeout_s)
        if self._admitted is not None:
            self._prepare_again(self._admitted)
        return stub.StreamGenerate(self._request, timeout=timeout_s)

    def _attach_request(self) -> generation_pb2.AttachRequest:
        request = generation_pb2.AttachRequest(
            request_id=self._request.request_id,
            last_sequence=self._last_sequence,
            resume_token=self._token,
        )
        for index, choice in self._choices.items():
            request.seen.add(index=index, num_tokens=len(choice.token_ids), finished=choice.is_finished)
        return request

    def _prepare_again(self, admitted: AdmittedEvent) -> None:
        """Reduce the request to the rest of its answer."""
        generation = self._request.generation
        generation.sampling.seed = admitted.seed
        if self._has_prompt_logprobs:
            generation.response.ClearField("prompt_logprobs")
        if not self._choices:
            return
        del generation.emitted[:]
        self._num_others = 0
        for index in range(max(generation.sampling.n, 1)):
            choice = self._choices.get(index, _Choice())
            if choice.is_finished:
                self._num_others += len(choice.token_ids)
            else:
                generation.emitted.add(index=index, token_ids=choice.token_ids)

    def take(self, message: generation_pb2.StreamGenerateResponse) -> Event | None:
        """Note a message, and return its event; None if it has come before."""
        self._last_sequence = message.sequence
        event = event_from_proto(message)
        match event:
            case AdmittedEvent():
                self._token, is_again = event.resume_token, self._admitted is not None
                self._admitted = self._admitted or event
                return None if is_again else event
            case ResumableEvent():
                self._token = event.resume_token
                return None
            case DeltaEvent():
                choice = self._choices.setdefault(event.index, _Choice())
                choice.token_ids += event.token_ids
                choice.is_finished = event.finish_reason is not None
            case PromptLogprobsEvent():
                self._has_prompt_logprobs = True
            case FinishedEvent() if self._num_others:
                return self._with_others(event)
        return event  # None for one of a later version; the stream ends with `finished` all the same

    async def _read(self, call: Any) -> AsyncIterator[Event]:
        """Yield what is new in a call."""
        async for message in call:
            is_wrapped = isinstance(message, generation_pb2.AttachResponse)
            event = self.take(message.event if is_wrapped else message)
            if event is not None:
                yield event

    @property
    def _is_complete(self) -> bool:
        num_choices = max(self._request.generation.sampling.n, 1)
        return sum(choice.is_finished for choice in self._choices.values()) == num_choices

    def _end_without_counts(self, admitted: AdmittedEvent) -> FinishedEvent:
        """Return the end of an answer that has come whole, without the counts that only its server knew."""
        num_output = sum(len(choice.token_ids) for choice in self._choices.values())
        return FinishedEvent(Usage(len(admitted.prompt_token_ids), num_output), StageTimings())

    def _with_others(self, event: FinishedEvent) -> FinishedEvent:
        """Return the end with the output of the choices that were complete before the request was sent again."""
        num_output = event.usage.num_output_tokens + self._num_others
        return replace(event, usage=replace(event.usage, num_output_tokens=num_output))
