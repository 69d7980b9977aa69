"""What a generation tells its client, in order: admitted once, deltas, finished once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.types.outputs import FinishReason, StageTimings, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class AdmittedEvent:
    """The engine has the request."""

    request_id: str
    model: str
    seed: int
    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DeltaEvent:
    """New output of one choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The end of the stream."""

    usage: Usage
    timings: StageTimings
    tokenize_ns: int = 0


Event = AdmittedEvent | DeltaEvent | FinishedEvent
