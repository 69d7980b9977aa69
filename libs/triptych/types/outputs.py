"""Outputs: from the engine to a frontend, and from a frontend to a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from triptych.types.logprobs import TokenLogprobs
from triptych.types.step import F32, U32, LogprobColumns, PromptLogprobs, RequestGuesses, empty_u32
from triptych.types.submit import SubmitRequest

_BATCH_BYTES = 1024  # of an output batch without content, with its objects


class FinishReason(IntEnum):
    """The reason for which a request ended well. An error is a status, never a finish reason."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    TOOL_CALLS = 4
    """The model calls tools, which a frontend has read in its answer. Engines say STOP."""
    REPETITION = 5
    """The output repeated itself, as `repetition_detection` has it."""
    UNKNOWN = 255
    """A reason that a later version has added. Only a client sees it."""

    @property
    def word(self) -> str:
        """The name that clients see: stop, length, abort, tool_calls, repetition, unknown."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class StageTimings:
    """A request's time by stage, in ns; 0 for a stage that it did not reach."""

    queued_ns: int = 0
    """Accepted by the engine until first planned."""
    prefill_ns: int = 0
    """First planned until the first token."""
    decode_ns: int = 0
    """First token until the last."""
    num_accepted_guesses: int = 0
    """Output tokens that were guessed ahead, and so took no step of their own."""
    num_rejected_guesses: int = 0
    """Tokens that were guessed ahead, and did not come."""

    @classmethod
    def of_all(cls, parts: Sequence[StageTimings]) -> StageTimings:
        """Return the times of the slowest of several choices or prompts, and the guesses of all."""
        if len(parts) == 1:
            return parts[0]
        slowest = max(parts, key=lambda t: t.queued_ns + t.prefill_ns + t.decode_ns, default=cls())
        return replace(
            slowest,
            num_accepted_guesses=sum(part.num_accepted_guesses for part in parts),
            num_rejected_guesses=sum(part.num_rejected_guesses for part in parts),
        )


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The end of one request by an error; `code` is a `triptych.errors` code."""

    number: int
    code: str
    message: str
    field: str = ""
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The good end of one request."""

    number: int
    reason: FinishReason
    stop_token_id: int | None
    num_cached_tokens: int
    timings: StageTimings


@dataclass(frozen=True, slots=True, eq=False)
class RequestPromptLogprobs:
    """Log-probabilities of a part of one request's prompt."""

    number: int
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class CacheNews:
    """Changes of an engine's prefix cache. A hash is in `stored` or in `evicted`, or in neither."""

    is_cleared: bool = False
    """Everything that was cached before is gone."""
    stored: bytes = b""
    """Hashes that are cached now, one after the other."""
    evicted: bytes = b""
    """Hashes that are not cached any more, one after the other."""

    @property
    def num_bytes(self) -> int:
        return len(self.stored) + len(self.evicted)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The work that a new request would wait for at an engine. Measured times are 0 until something was measured."""

    num_prefill_tokens: int
    """Prompt tokens of all its requests that are still to be computed; an estimate."""
    num_running: int
    """Choices that have a row."""
    num_waiting: int
    """Choices that wait for one."""
    num_free_blocks: int
    num_free_rows: int
    """Choices that could be admitted now; negative where so many wait for a row."""
    prefill_token_s: float
    """Seconds for each prompt token in a full step."""
    decode_step_s: float
    """Seconds of a step that computes one token for each running choice."""
    row_interval_s: float
    """Seconds from one end of a running choice to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputBatch:
    """Everything that one engine step means for one frontend. Numbers name requests on its stream."""

    batch_id: int
    admitted: U32 = field(default_factory=empty_u32)
    """Numbers of the requests accepted since the last batch."""
    numbers: U32 = field(default_factory=empty_u32)
    """[r] requests with new tokens."""
    token_counts: U32 = field(default_factory=empty_u32)
    """[r] new tokens of each; empty means one each."""
    token_ids: U32 = field(default_factory=empty_u32)
    """[sum(token_counts)]"""
    logprobs: LogprobColumns | None = None
    """Rows are indices into `token_ids`."""
    prompt_logprobs: tuple[RequestPromptLogprobs, ...] = ()
    """Entries of the requests that asked for them, in order, before the first token of each or with it."""
    finished: tuple[FinishedRequest, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    attached: tuple[SubmitRequest, ...] = ()
    """Requests that go on in this session from here on, with what their clients have as `emitted`."""
    num_free_places: int | None = None
    """Choices that the engine's queue had room for when this was made; None: not known."""
    released: U32 = field(default_factory=empty_u32)
    """Numbers of requests that the engine cannot end in time. It goes on with them until they are aborted."""
    first_numbers: U32 = field(default_factory=empty_u32)
    """[f] requests with their first tokens of this engine."""
    first_cached_tokens: U32 = field(default_factory=empty_u32)
    """[f] prompt tokens of each that the first engine with output of it found in its cache."""
    vectors: Mapping[int, F32] = field(default_factory=dict)
    """Number -> [num_vectors, num_columns] of each pooled request that ends in this batch."""
    guesses: RequestGuesses | None = None
    """Counts of the requests that had guesses since the last batch; None: none had."""
    cache: CacheNews | None = None
    load: LoadReport | None = None
    """As it is with everything that came before this; None: no news."""

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory and in a message."""
        num_bytes = _BATCH_BYTES + 8 * len(self.token_ids) + 64 * len(self.finished)
        num_bytes += 4 * (len(self.admitted) + len(self.released) + 2 * len(self.first_numbers))
        if self.logprobs is not None:
            num_bytes += self.logprobs.nbytes
        for part in self.prompt_logprobs:
            num_bytes += part.logprobs.nbytes
        for vectors in self.vectors.values():
            num_bytes += vectors.nbytes
        num_bytes += sum(request.num_bytes for request in self.attached)
        if self.guesses is not None:
            num_bytes += 12 * len(self.guesses.numbers)
        if self.cache is not None:
            num_bytes += self.cache.num_bytes
        return num_bytes + sum(128 + len(failure.message) for failure in self.failures)

    @property
    def owners(self) -> U32:
        """[sum(token_counts)] the number of the request of each token."""
        return np.repeat(self.numbers, self.token_counts) if len(self.token_counts) else self.numbers


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A new part of a call that the model makes."""

    index: int
    """Which call of the choice, 0, 1, …"""
    id: str = ""
    """In the call's first part: its name for the answer to refer to. Empty in others."""
    name: str = ""
    """In the call's first part: the tool. Empty in others."""
    arguments: str = ""
    """More of the arguments' JSON text."""
    offset: int = 0
    """In the call's first part: characters of the choice's text that come before the call."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_reasoning_tokens: int = 0
    """Output tokens that the model thought before it answered."""


@dataclass(slots=True)
class ToolCall:
    """A call that the model makes; grows while it streams."""

    id: str
    name: str
    arguments: str = ""
    """JSON text, as the model wrote it."""


def append_calls(calls: list[ToolCall], deltas: Sequence[ToolCallDelta]) -> None:
    """Add new parts to the calls of a choice."""
    for delta in deltas:
        if delta.id:
            calls.append(ToolCall(delta.id, delta.name))
        calls[-1].arguments += delta.arguments


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request; grows while it streams."""

    index: int = 0
    text: str = ""
    """The text. In a conversation it has neither reasoning nor calls."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' natural log-probabilities; only if `logprobs` are asked for."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token; only if asked for."""
    finish_reason: str | None = None
    """stop, length, abort, tool_calls, or unknown for one of a later version; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it."""
    reasoning: str = ""
    """The text that the model thought before it answered."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of tools, in their order."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """A request's times in the engine, in seconds; 0 for what it did not reach."""

    queued_time: float
    """Accepted until first planned."""
    prefill_time: float
    """First planned until the first token."""
    decode_time: float
    """First token until the last."""
    num_generation_tokens: int
    """Output tokens of all choices."""
    num_accepted_guesses: int = 0
    """Output tokens of all choices that were guessed ahead, and so took no step of their own."""
    num_rejected_guesses: int = 0
    """Tokens that were guessed ahead for all choices, and did not come."""

    @property
    def first_token_latency(self) -> float:
        """Accepted by the engine until the first token."""
        return self.queued_time + self.prefill_time


@dataclass(slots=True)
class RequestOutput:
    """Result of `LLM.generate` for one prompt."""

    request_id: str
    prompt: str | None
    """The text of the prompt where it was given as text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The choices, by index. Empty where `error` is set."""
    finished: bool = False
    usage: Usage = Usage()
    timings: StageTimings = StageTimings()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per token of the prompt, None for the first; only if asked for."""
    error: Exception | None = None
    """The reason for which there is no output, a typed error of `triptych.errors`. Only with `on_error="return"` and in
    `PartialFailure.outputs`."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.usage.num_cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """Times in seconds, known once the request has finished."""
        timings = self.timings
        return RequestMetrics(
            queued_time=timings.queued_ns / 1e9,
            prefill_time=timings.prefill_ns / 1e9,
            decode_time=timings.decode_ns / 1e9,
            num_generation_tokens=self.usage.num_output_tokens,
            num_accepted_guesses=timings.num_accepted_guesses,
            num_rejected_guesses=timings.num_rejected_guesses,
        )
