"""The steps that the worker has been sent, and how their results are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.enginecore.request import Request, RequestState
from services.enginecore.scheduler.request_states import RequestStates
from services.enginecore.scheduler.running_rows import Ints, Slots
from triptych.errors import EngineFailure, InvalidRequest, ProtocolViolation, TriptychError
from triptych.types.outputs import FinishReason
from triptych.types.step import U32, PromptLogprobs, RowError, RowErrorCode, StepResult

_MAX_PREFIXES = 64  # remembered, of requests that failed after they had found them in the cache


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, for status and metrics.

    Only the scheduler writes them. They never fall, even when the worker is lost.
    """

    num_steps: int = 0
    """Steps planned."""
    num_scheduled_tokens: int = 0
    """Tokens planned, recomputed ones included."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, once per request."""
    prefix_hits: int = 0
    """Tokens among them that the cache held, and that were not computed."""
    num_preemptions: int = 0
    """Times that a running request lost its row for lack of blocks."""
    num_finished: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    """Reason to the number of requests that ended for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request's good end, its one terminal outcome."""

    request: Request
    reason: FinishReason
    stop_token_id: int | None = None
    """The stop id that ended it. None for the tokenizer's own EOS, and where no token ended it."""


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """A request's end by an error, its one terminal outcome."""

    request: Request
    error: TriptychError


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The new tokens of a step as columns, one entry per token: at most one token per request and step."""

    sessions: Ints
    """[t] the frontend session that each token goes to."""
    numbers: U32
    """[t] the request's number in that session."""
    token_ids: U32
    """[t] the tokens, including those that ended their requests."""
    rows: Slots
    """[t] index of each token in the worker's result, by which its logprobs are found."""
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()
    prompt_logprobs: tuple[tuple[Request, PromptLogprobs], ...] = ()
    """Parts of prompts; the parts of one request are in order."""

    def with_tokens(
        self, late: Sequence[tuple[Request, int, int]], finished: tuple[Finished, ...]
    ) -> StepOutput:
        """Return a copy with further tokens.

        Args:
            late: Request, token id and index in the result of each further token.
            finished: All requests that finished, the ones already here included.
        """
        if not late:
            return self
        return StepOutput(
            sessions=np.append(self.sessions, [request.session for request, _, _ in late]),
            numbers=_extended(self.numbers, [request.number for request, _, _ in late]),
            token_ids=_extended(self.token_ids, [token_id for _, token_id, _ in late]),
            rows=np.append(self.rows, [row for _, _, row in late]),
            finished=finished,
            failed=self.failed,
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """What the engine must remember of a plan to read its result."""

    step_id: int
    num_tokens: int
    planned_at: float
    """Seconds on the scheduler's clock."""
    sampling_slots: Slots
    """[s] the slots that the result's tokens belong to, ascending."""
    slot_versions: U32
    """[s] versions of the rows in them. A token for another version is dropped."""
    newly_cached_blocks: list[int]
    """Blocks that others may hit since this plan was made, because it computes their content."""


class StepsInFlight:
    """The steps sent whose results have not come, oldest first. Results come in the order of plans."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self._last_step_id = 0
        self._last_result_seen = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def next_step_id(self) -> int:
        return self._last_step_id + 1

    @property
    def last_result_seen(self) -> int:
        return self._last_result_seen

    def push(self, step: InFlightStep) -> None:
        assert step.step_id == self.next_step_id, "step ids are dense"
        self._steps.append(step)
        self._last_step_id = step.step_id

    def pop(self, result: StepResult) -> InFlightStep:
        """Remove and return the step that `result` answers.

        Raises:
            ProtocolViolation: The result is not of the oldest step, or has another number of tokens than planned.
        """
        if not self._steps:
            raise ProtocolViolation(f"result of step {result.step_id}, but no step is in flight")
        step = self._steps[0]
        if result.step_id != step.step_id:
            raise ProtocolViolation(f"result of step {result.step_id}, but step {step.step_id} is due")
        planned, got = len(step.sampling_slots), len(result.token_ids)
        if got != planned:
            raise ProtocolViolation(f"result of step {step.step_id} has {got} tokens, {planned} were planned")
        self._last_result_seen = step.step_id
        return self._steps.popleft()

    def forget(self) -> None:
        """Drop all steps, because no result will come. The next step has id 1."""
        self._steps.clear()
        self._last_step_id = self._last_result_seen = 0


def find_stop(
    request: Request, token_id: int, num_known: int, eos_token_ids: Sequence[int]
) -> tuple[FinishReason, int | None] | None:
    """Return why a token ends its request, and the stop id that did; None if the request goes on.

    Only the engine decides this. The order is: min_tokens, EOS, stop_token_ids, length. min_tokens defers token ids
    only; the length limit always holds.

    Args:
        token_id: The token at position `num_known - 1`.
        eos_token_ids: The tokenizer's own EOS first. Another EOS that the model names is reported like a stop id.
    """
    sampling = request.sampling
    if num_known - request.num_prompt_tokens >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, token_id if token_id != eos_token_ids[0] else None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_known >= request.limit:
        return FinishReason.LENGTH, None
    return None


def match_prompt_logprobs(
    result: StepResult, states: RequestStates
) -> tuple[tuple[Request, PromptLogprobs], ...]:
    """Return the requests that a result's prompt log-probabilities belong to, without those of rows that are gone.

    A row reports from the position at which its request was admitted. So a request that starts over gets nothing
    twice: a late report of its former row matches no row, and the next row computes it again.

    Raises:
        ProtocolViolation: A part does not begin at the position that is due.
    """
    reported = []
    for row, part in result.prompt_logprobs.items():
        request = states.by_row(row)
        if request is None:
            continue
        due = max(request.prompt_logprobs_start, 1)
        if part.first_position != due or not due < part.end <= request.num_prompt_tokens:
            raise ProtocolViolation(
                f"result of step {result.step_id}: slot {row.slot} reports positions {part.first_position} to "
                f"{part.end - 1} of a prompt of {request.num_prompt_tokens} tokens; position {due} is due"
            )
        reported.append((request, part))
    return tuple(reported)


def to_client_error(step_id: int, error: RowError) -> TriptychError:
    """Return the error that a client gets for the failure of its row."""
    if error.code is RowErrorCode.INVALID_REQUEST:
        field_name, _, description = error.message.partition(": ")
        return InvalidRequest(field_name, description)
    return EngineFailure(f"the worker failed this request in step {step_id}: {error.message}")


class SuspectBlocks:
    """Removes from the prefix cache what a failed row may have spoiled. The scheduler owns it.

    A chunk of a prompt samples nothing, so garbage in its KV is noticed steps later at the earliest. Therefore nothing
    that a failed request has written stays cached, whichever step wrote it.
    """

    def __init__(self, states: RequestStates, in_flight: StepsInFlight) -> None:
        self._states = states
        self._in_flight = in_flight
        self._prefixes: deque[bytes] = deque(maxlen=_MAX_PREFIXES)
        """First block hashes of requests that failed after hits. At a second failure the hits are suspect as well."""

    def find(self, request: Request) -> set[int]:
        """Return the blocks that a started request may have filled with garbage."""
        table = request.blocks
        if request.state is RequestState.DRAINING:  # its blocks are given back, under their hashes
            return set(self._states.blocks.named_blocks(table))
        first = table.num_hits
        if first:
            prefix = table.hashes[0]
            if prefix in self._prefixes:
                first = 0
            else:
                self._prefixes.append(prefix)
        return set(table.block_ids[first:])

    def uncache(self, step: InFlightStep, blocks: set[int]) -> None:
        """Uncache `blocks` and all blocks that this step or a later one was to fill.

        Failures are rare enough for this to be coarse: the blocks of all requests in those steps are uncached. Running
        requests that hit one start over. So do draining requests, because their hits are no longer known.
        """
        manager = self._states.blocks
        suspect_blocks = {*blocks, *step.newly_cached_blocks, *manager.take_newly_cached()}
        suspect_blocks.update(*(later.newly_cached_blocks for later in self._in_flight))
        manager.uncache(suspect_blocks)
        for request in list(self._states.draining.values()):
            self._states.finish_draining(request)
        for request in self._states.running:
            if not suspect_blocks.isdisjoint(request.blocks.block_ids[: request.blocks.num_hits]):
                self._states.requeue(request)


def _extended(column: U32, values: Sequence[int]) -> U32:
    return np.concatenate([column, np.array(values, np.uint32)])
