"""Events of a generation, in order: admitted once, the prompt if requested, deltas, finished once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.types.logprobs import TokenLogprobs
from triptych.types.outputs import FinishReason, StageTimings, ToolCallDelta, Usage
from triptych.types.step import F32, U32, PromptLogprobs


@dataclass(frozen=True, slots=True)
class AdmittedEvent:
    """The engine has the request."""

    request_id: str
    model: str
    seed: int
    prompt_token_ids: Sequence[int] | U32
    is_limited_by_context: bool = False
    """The output may be as long as the model's context leaves, and no longer."""
    index: int = 0
    """The first choice of the prompt."""
    fingerprint: str = ""
    """Digest of the model's checkpoint, in hexadecimal; empty if it is not known."""
    resume_token: str = ""
    """By which the stream goes on at any frontend, if this one is lost. Empty: it cannot."""
    not_enforced: tuple[str, ...] = ()
    """Paths of what the request's JSON schemas ask for and the grammar does not hold the answer to."""


@dataclass(frozen=True, slots=True)
class ResumableEvent:
    """The stream has moved to another engine, and goes on by another token."""

    resume_token: str
    """As in `AdmittedEvent`."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobsEvent:
    """A part of the prompt's log-probabilities. Parts come in order, at least one, all before the first delta."""

    logprobs: PromptLogprobs
    token_bytes: Sequence[bytes]
    """[num_positions * (1 + num_top)] UTF-8 of each of `logprobs.token_ids`; may be a part of a character."""
    first_token_bytes: bytes = b""
    """In the first part: of the prompt's first token, which has no log-probability."""
    index: int = 0
    """The first choice of the prompt."""


@dataclass(frozen=True, slots=True)
class DeltaEvent:
    """New output of one choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    """Those of `token_ids`, where they were asked for. A frontend's are `LogprobRows`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    """New text of what the model thinks before it answers."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    vectors: F32 | None = field(default=None, compare=False)
    """[num_vectors, num_columns] of a pooled request; None: it generates, or was aborted."""
    num_before_answer: int = 0
    """Tokens of the choice so far, this delta's among them, that come before its answer: its reasoning with its
    marks. Known where an answer is split."""


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The end of the stream."""

    usage: Usage
    timings: StageTimings
    tokenize_ns: int = 0
    num_moves: int = 0
    """Times that the request moved to another engine; of several choices, the most."""
    is_exact: bool = True
    """It went on as if it had not moved: all its engines compute the same bits."""


Event = AdmittedEvent | PromptLogprobsEvent | DeltaEvent | ResumableEvent | FinishedEvent
