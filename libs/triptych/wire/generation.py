"""output.proto: what a frontend streams and a client reads; where sampling fields are in a public request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from triptych.errors import ProtocolViolation
from triptych.types.events import (
    AdmittedEvent,
    DeltaEvent,
    Event,
    FinishedEvent,
    PromptLogprobsEvent,
    ResumableEvent,
)
from triptych.types.logprobs import LogprobRows, TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, ToolCallDelta, Usage
from triptych.types.step import PromptLogprobs
from triptych.v1 import common_pb2, generation_pb2, output_pb2, sampling_pb2

MAX_CANDIDATES = 32768
"""Log-probabilities in one message: with their bytes, they take less than 1 MiB."""

RESPONSE_FLAGS: Mapping[str, str] = {
    "detokenize": "text",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
}
"""Sampling field -> flag of `ResponseOptions`."""
LOGPROB_FIELDS = ("logprobs", "prompt_logprobs")
"""Sampling fields that are `LogprobOptions` of `ResponseOptions`."""
SAMPLING_PATHS: Mapping[str, str] = {
    **{field.name: f"sampling.{field.name}" for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields},
    **{
        field.name: f"length.{field.name}"
        for field in sampling_pb2.Length.DESCRIPTOR.fields
        if field.name != "rest_of_context"
    },
    **{name: f"response.{flag}" for name, flag in RESPONSE_FLAGS.items()},
    **{name: f"response.{name}.top" for name in LOGPROB_FIELDS},
    "logprob_token_ids": "response.logprobs.token_ids",
    "structured_outputs": "structured_outputs",
}
"""Field of `triptych.types.sampling.SamplingParams` -> its path in a `Generation`."""

_PROTO_REASON = {
    FinishReason.STOP: output_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: output_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: output_pb2.FINISH_REASON_ABORT,
    FinishReason.TOOL_CALLS: output_pb2.FINISH_REASON_TOOL_CALLS,
    FinishReason.REPETITION: output_pb2.FINISH_REASON_REPETITION,
}
_STOPPED = (FinishReason.STOP, FinishReason.TOOL_CALLS)
_REASON = {number: reason for reason, number in _PROTO_REASON.items()}


class EventEncoder:
    """Turns the events of one answer into messages, numbered 1, 2, 3, …"""

    def __init__(
        self,
        options: generation_pb2.ResponseOptions,
        stop_token_ids: Collection[int] = (),
        *,
        last_sequence: int = 0,
    ) -> None:
        """
        Args:
            options: What the client wants of them.
            stop_token_ids: Of the request. Another token that stops a choice ends the sequence.
            last_sequence: Number of the last message that the client has, if it goes on with a stream.
        """
        self._sequence = last_sequence
        self._stop_token_ids = frozenset(stop_token_ids)
        self._sends_token_ids = options.token_ids or not options.HasField("token_ids")
        self._sends_prompt_token_ids = options.prompt_token_ids
        self._sends_bytes = options.logprobs.with_bytes
        self._sends_prompt_bytes = options.prompt_logprobs.with_bytes
        self._sends_timings = options.timings
        self._length_limit: output_pb2.LengthLimit = output_pb2.LENGTH_LIMIT_MAX_TOKENS

    def encode(self, event: Event) -> Sequence[generation_pb2.StreamGenerateResponse]:
        """Return the event's message, or several if it has more log-probabilities than one may hold."""
        match event:
            case DeltaEvent():
                if event.logprobs:
                    return [self._number(output=self._output(part)) for part in _split(event)]
                self._sequence += 1  # what `_number` does, without its call: this is the plain token
                output = self._output(event)
                return (generation_pb2.StreamGenerateResponse(sequence=self._sequence, output=output),)
            case PromptLogprobsEvent():
                return (self._number(prompt_logprobs=self._prompt_logprobs(event)),)
            case AdmittedEvent():
                return (self._number(admitted=self._admitted(event)),)
            case ResumableEvent():
                resumable = output_pb2.Resumable(resume_token=event.resume_token)
                return (self._number(resumable=resumable),)
            case FinishedEvent():
                return (self._number(finished=self._finished(event)),)

    def _number(self, **event: object) -> generation_pb2.StreamGenerateResponse:
        self._sequence += 1
        return generation_pb2.StreamGenerateResponse(sequence=self._sequence, **event)  # type: ignore[arg-type]

    def _output(self, event: DeltaEvent) -> output_pb2.ChoiceOutput:
        if self._sends_token_ids:
            output = output_pb2.ChoiceOutput(index=event.index, text=event.text, token_ids=event.token_ids)
        else:
            output = output_pb2.ChoiceOutput(index=event.index, text=event.text)
        if event.logprobs:
            _fill_logprobs(output.logprobs, LogprobRows.of(event.logprobs), self._sends_bytes)
        if event.reasoning:
            output.reasoning = event.reasoning
        for call in event.tool_calls:
            output.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments_json=call.arguments)
        if event.finish_reason is not None:
            self._finish(output, event)
        return output

    def _finish(self, output: output_pb2.ChoiceOutput, event: DeltaEvent) -> None:
        assert event.finish_reason is not None
        output.finish_reason = _PROTO_REASON[event.finish_reason]
        if event.finish_reason is FinishReason.LENGTH:
            output.length_limit = self._length_limit
        elif isinstance(event.stop_reason, str):
            output.stop_string = event.stop_reason
        elif event.stop_reason in self._stop_token_ids:
            output.stop_token_id = event.stop_reason
        elif event.finish_reason in _STOPPED and event.token_ids:
            output.eos_token_id = event.token_ids[-1]

    def _admitted(self, event: AdmittedEvent) -> output_pb2.Admitted:
        if event.is_limited_by_context:
            self._length_limit = output_pb2.LENGTH_LIMIT_CONTEXT
        token_ids = np.asarray(event.prompt_token_ids)
        return output_pb2.Admitted(
            request_id=event.request_id,
            model=event.model,
            seed=event.seed,
            num_prompt_tokens=len(token_ids),
            prompt_token_ids=token_ids.tolist() if self._sends_prompt_token_ids else (),
            resume_token=event.resume_token,
            not_enforced=event.not_enforced,
        )

    def _prompt_logprobs(self, event: PromptLogprobsEvent) -> output_pb2.PromptLogprobs:
        part = event.logprobs
        return output_pb2.PromptLogprobs(
            first_position=part.first_position,
            logprobs=output_pb2.Logprobs(
                num_candidates=part.token_ids.shape[1],
                token_ids=part.token_ids.ravel().tolist(),
                logprobs=part.logprobs.ravel().tolist(),
                ranks=part.ranks.tolist(),
                token_bytes=event.token_bytes if self._sends_prompt_bytes else (),
            ),
            first_token_bytes=event.first_token_bytes if self._sends_prompt_bytes else b"",
        )

    def _finished(self, event: FinishedEvent) -> output_pb2.Finished:
        usage = common_pb2.Usage(
            num_prompt_tokens=event.usage.num_prompt_tokens,
            num_output_tokens=event.usage.num_output_tokens,
            num_cached_tokens=event.usage.num_cached_tokens,
            num_reasoning_tokens=event.usage.num_reasoning_tokens,
        )
        moves = None
        if event.num_moves:
            moves = output_pb2.Moves(num_moves=event.num_moves, is_exact=event.is_exact)
        if not self._sends_timings:
            return output_pb2.Finished(usage=usage, moves=moves)
        timings = output_pb2.StageTimings(
            tokenize_ns=event.tokenize_ns,
            queued_ns=event.timings.queued_ns,
            prefill_ns=event.timings.prefill_ns,
            decode_ns=event.timings.decode_ns,
            num_accepted_guesses=event.timings.num_accepted_guesses,
            num_rejected_guesses=event.timings.num_rejected_guesses,
        )
        return output_pb2.Finished(usage=usage, timings=timings, moves=moves)


class WholeAnswer:
    """Gathers the messages of a stream into one."""

    def __init__(self) -> None:
        self._answer = generation_pb2.GenerateResponse()
        self._index_to_choice: dict[int, output_pb2.ChoiceOutput] = {}

    def add(self, message: generation_pb2.StreamGenerateResponse) -> None:
        answer = self._answer
        match message.WhichOneof("event"):
            case "output":
                index = message.output.index
                if index not in self._index_to_choice:
                    self._index_to_choice[index] = answer.choices.add()
                self._index_to_choice[index].MergeFrom(message.output)
            case "prompt_logprobs":
                part = message.prompt_logprobs
                if answer.HasField("prompt_logprobs"):
                    part.ClearField("first_position")  # that of the first part stays
                answer.prompt_logprobs.MergeFrom(part)
            case "admitted":
                answer.admitted.CopyFrom(message.admitted)
            case "finished":
                answer.finished.CopyFrom(message.finished)

    def take(self) -> generation_pb2.GenerateResponse:
        """Return the answer, its choices by index; the last call."""
        self._answer.choices.sort(key=lambda choice: choice.index)
        return self._answer


def event_from_proto(message: generation_pb2.StreamGenerateResponse) -> Event | None:
    """Return the event, or None for one of a kind that a later version has added.

    Raises:
        ProtocolViolation: Its columns do not fit together.
    """
    match message.WhichOneof("event"):
        case "output":
            return _output_from_proto(message.output)
        case "prompt_logprobs":
            return _prompt_logprobs_from_proto(message.prompt_logprobs)
        case "admitted":
            admitted = message.admitted
            return AdmittedEvent(
                admitted.request_id,
                admitted.model,
                admitted.seed,
                list(admitted.prompt_token_ids),
                resume_token=admitted.resume_token,
                not_enforced=tuple(admitted.not_enforced),
            )
        case "resumable":
            return ResumableEvent(message.resumable.resume_token)
        case "finished":
            usage, timings, moves = message.finished.usage, message.finished.timings, message.finished.moves
            return FinishedEvent(
                Usage(
                    usage.num_prompt_tokens,
                    usage.num_output_tokens,
                    usage.num_cached_tokens,
                    usage.num_reasoning_tokens,
                ),
                StageTimings(
                    timings.queued_ns,
                    timings.prefill_ns,
                    timings.decode_ns,
                    timings.num_accepted_guesses,
                    timings.num_rejected_guesses,
                ),
                timings.tokenize_ns,
                moves.num_moves,
                moves.is_exact or not moves.num_moves,
            )
        case _:
            return None


def _output_from_proto(message: output_pb2.ChoiceOutput) -> DeltaEvent:
    reason, stop_reason = None, None
    if message.finish_reason:
        reason = _REASON.get(message.finish_reason, FinishReason.UNKNOWN)
        detail = message.WhichOneof("finish_detail")
        stop_reason = getattr(message, detail) if detail in ("stop_token_id", "stop_string") else None
    return DeltaEvent(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=tuple(_rows(message.logprobs)) if message.HasField("logprobs") else (),
        finish_reason=reason,
        stop_reason=stop_reason,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments_json) for call in message.tool_calls
        ),
    )


def _prompt_logprobs_from_proto(message: output_pb2.PromptLogprobs) -> PromptLogprobsEvent:
    columns = message.logprobs
    _check_columns(columns)
    shape = len(columns.ranks), columns.num_candidates
    return PromptLogprobsEvent(
        PromptLogprobs(
            message.first_position,
            np.array(columns.token_ids, np.uint32).reshape(shape),
            np.array(columns.logprobs, np.float32).reshape(shape),
            np.array(columns.ranks, np.uint32),
        ),
        _bytes_of(columns),
        message.first_token_bytes,
    )


def _split(event: DeltaEvent) -> Iterator[DeltaEvent]:
    """Yield parts with at most `MAX_CANDIDATES` log-probabilities; text in the first, the end in the last."""
    logprobs = LogprobRows.of(event.logprobs)
    num_rows = max(1, MAX_CANDIDATES // logprobs.num_candidates)
    if len(logprobs) <= num_rows:
        yield event
        return
    for start in range(0, len(logprobs), num_rows):
        rows = slice(start, start + num_rows)
        is_last = start + num_rows >= len(logprobs)
        yield replace(
            event,
            text="" if start else event.text,
            reasoning="" if start else event.reasoning,
            tool_calls=() if start else event.tool_calls,
            token_ids=event.token_ids[rows],
            logprobs=logprobs[rows],
            finish_reason=event.finish_reason if is_last else None,
        )


def _fill_logprobs(columns: output_pb2.Logprobs, rows: LogprobRows, sends_bytes: bool) -> None:
    columns.num_candidates = rows.num_candidates
    columns.named = rows.is_named and rows.num_candidates > 1
    columns.ranks.extend(rows.ranks)
    columns.token_ids.extend(rows.token_ids)
    columns.logprobs.extend(rows.logprobs.tolist())
    if sends_bytes:
        columns.token_bytes.extend(rows.token_bytes)


def _rows(columns: output_pb2.Logprobs) -> Iterator[TokenLogprobs]:
    _check_columns(columns)
    width = columns.num_candidates
    token_ids, logprobs, token_bytes = list(columns.token_ids), list(columns.logprobs), _bytes_of(columns)
    for number, rank in enumerate(columns.ranks):
        row = slice(number * width, (number + 1) * width)
        others = [0] * (width - 1) if columns.named else range(1, width)
        yield TokenLogprobs(token_ids[row], logprobs[row], token_bytes[row], [rank, *others])


def _bytes_of(columns: output_pb2.Logprobs) -> list[bytes]:
    """Return the bytes of each candidate; empty ones where they were not asked for."""
    return list(columns.token_bytes) or [b""] * len(columns.token_ids)


def _check_columns(columns: output_pb2.Logprobs) -> None:
    num_values = len(columns.ranks) * columns.num_candidates
    lengths = {len(columns.token_ids), len(columns.logprobs), len(columns.token_bytes) or num_values}
    if lengths != {num_values} or (columns.ranks and not columns.num_candidates):
        raise ProtocolViolation(
            f"logprobs: {len(columns.ranks)} ranks, {columns.num_candidates} candidates each, but "
            f"{len(columns.token_ids)} token_ids, {len(columns.logprobs)} logprobs and {len(columns.token_bytes)} "
            "token_bytes"
        )
