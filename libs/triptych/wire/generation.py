"""generation.proto: what a frontend streams and a client reads."""

from __future__ import annotations

import numpy as np

from triptych.types.events import AdmittedEvent, DeltaEvent, Event, FinishedEvent, PromptLogprobsEvent
from triptych.types.outputs import FinishReason
from triptych.types.step import PromptLogprobs
from triptych.v1 import common_pb2, generation_pb2
from triptych.wire.common import (
    timings_from_proto,
    timings_to_proto,
    token_logprobs_from_proto,
    token_logprobs_to_proto,
    usage_from_proto,
    usage_to_proto,
)

_PROTO_REASON = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_REASON = {number: reason for reason, number in _PROTO_REASON.items()}


def event_to_proto(event: Event) -> generation_pb2.GenerateResponse:
    match event:
        case DeltaEvent():
            return generation_pb2.GenerateResponse(delta=_delta_to_proto(event))
        case PromptLogprobsEvent():
            return generation_pb2.GenerateResponse(prompt_logprobs=_prompt_logprobs_to_proto(event))
        case AdmittedEvent():
            return generation_pb2.GenerateResponse(
                admitted=generation_pb2.Admitted(
                    request_id=event.request_id,
                    model=event.model,
                    seed=event.seed,
                    num_prompt_tokens=len(event.prompt_token_ids),
                    prompt_token_ids=event.prompt_token_ids,
                )
            )
        case FinishedEvent():
            return generation_pb2.GenerateResponse(
                finished=generation_pb2.Finished(
                    usage=usage_to_proto(event.usage),
                    timings=timings_to_proto(event.timings, event.tokenize_ns),
                )
            )


def event_from_proto(message: generation_pb2.GenerateResponse) -> Event:
    """Raises ValueError for an event that this client does not know, or whose columns do not fit together."""
    match message.WhichOneof("event"):
        case "delta":
            return _delta_from_proto(message.delta)
        case "prompt_logprobs":
            return _prompt_logprobs_from_proto(message.prompt_logprobs)
        case "admitted":
            admitted = message.admitted
            return AdmittedEvent(
                admitted.request_id, admitted.model, admitted.seed, list(admitted.prompt_token_ids)
            )
        case "finished":
            finished = message.finished
            return FinishedEvent(
                usage_from_proto(finished.usage),
                timings_from_proto(finished.timings),
                finished.timings.tokenize_ns,
            )
        case other:
            raise ValueError(f"an event of a kind this client does not know: {other}")


def _prompt_logprobs_to_proto(event: PromptLogprobsEvent) -> generation_pb2.PromptLogprobs:
    part = event.logprobs
    return generation_pb2.PromptLogprobs(
        first_position=part.first_position,
        num_candidates=part.token_ids.shape[1],
        token_ids=part.token_ids.ravel().tolist(),
        logprobs=part.logprobs.ravel().tolist(),
        ranks=part.ranks.tolist(),
        token_bytes=event.token_bytes,
        first_token_bytes=event.first_token_bytes,
    )


def _prompt_logprobs_from_proto(message: generation_pb2.PromptLogprobs) -> PromptLogprobsEvent:
    shape = len(message.ranks), message.num_candidates
    return PromptLogprobsEvent(
        PromptLogprobs(
            message.first_position,
            np.array(message.token_ids, np.uint32).reshape(shape),
            np.array(message.logprobs, np.float32).reshape(shape),
            np.array(message.ranks, np.uint32),
        ),
        list(message.token_bytes),
        message.first_token_bytes,
    )


def _delta_to_proto(event: DeltaEvent) -> generation_pb2.Delta:
    delta = generation_pb2.Delta(
        index=event.index,
        text=event.text,
        token_ids=event.token_ids,
        logprobs=[token_logprobs_to_proto(entry) for entry in event.logprobs],
    )
    if event.finish_reason is not None:
        delta.finish_reason = _PROTO_REASON[event.finish_reason]
    if isinstance(event.stop_reason, str):
        delta.stop_string = event.stop_reason
    elif event.stop_reason is not None:
        delta.stop_token_id = event.stop_reason
    return delta


def _delta_from_proto(message: generation_pb2.Delta) -> DeltaEvent:
    stop = message.WhichOneof("stop_reason")
    return DeltaEvent(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=tuple(token_logprobs_from_proto(entry) for entry in message.logprobs),
        finish_reason=_REASON.get(message.finish_reason),
        stop_reason=getattr(message, stop) if stop else None,
    )
