"""The steps that the worker has been sent, and what their results mean for requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from triptych.errors import ProtocolViolation, TriptychError
from triptych.types.outputs import FinishReason
from triptych.types.pooling import Task
from triptych.types.step import F32, U32, PromptLogprobs, RowKey, StepResult, empty_u32
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.running_rows import Ints, Slots


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
    """The new tokens of a step as columns."""

    sessions: Ints
    """[r] the frontend session of each request with new tokens."""
    numbers: U32
    """[r] its number in that session."""
    token_ids: U32
    """[t] the tokens, one request after the other, including those that ended their requests."""
    rows: Slots
    """[t] index of each token in the worker's result, by which its logprobs are found."""
    token_counts: U32 = field(default_factory=empty_u32)
    """[r] tokens of each request; empty means one each."""
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()
    prompt_logprobs: tuple[tuple[Request, PromptLogprobs], ...] = ()
    """Parts of prompts; the parts of one request are in order."""
    first: tuple[Request, ...] = ()
    """The requests that got their first tokens by this step."""
    guessed: tuple[Request, ...] = ()
    """The requests that had guesses in this step."""
    vectors: tuple[tuple[Request, F32], ...] = ()
    """[num_vectors, num_columns] of each pooled request; all of them are among `finished`."""

    def with_late_tokens(
        self, late: Sequence[tuple[Request, Slots, U32]], finished: tuple[Finished, ...]
    ) -> StepOutput:
        """Return a copy with further tokens.

        Args:
            late: For each request with further tokens, their indices in the result, and the tokens.
            finished: All requests that finished, the ones already here included.
        """
        if not late:
            return self
        counts = [len(token_ids) for _, _, token_ids in late]
        token_counts = self.token_counts
        if len(token_counts) or max(counts) > 1:
            own = token_counts if len(token_counts) else np.ones(len(self.numbers), np.uint32)
            token_counts = _extended(own, counts)
        return replace(
            self,
            sessions=np.append(self.sessions, [request.session for request, _, _ in late]),
            numbers=_extended(self.numbers, [request.number for request, _, _ in late]),
            token_ids=np.concatenate([self.token_ids, *(token_ids for _, _, token_ids in late)]),
            rows=np.concatenate([self.rows, *(rows for _, rows, _ in late)]),
            token_counts=token_counts,
            finished=finished,
        )


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """The parts of a sent step that are needed to read its result."""

    step_id: int
    num_tokens: int
    planned_at: float
    """Seconds on the scheduler's clock."""
    sampling_slots: Slots
    """[s] the slots that the result's tokens belong to, ascending."""
    slot_versions: U32
    """[s] versions of the rows in them. A token for another version is dropped."""
    sample_limits: Ints | None
    """[s] the most tokens that each row can get; None: one each."""
    newly_cached_blocks: list[int]
    """Blocks that others may hit since this plan was made, because it computes their content."""
    pooled_rows: tuple[RowKey, ...] = ()
    """The pooled rows of which it computes the end, so that it brings their vectors."""


class StepsInFlight:
    """The steps in flight: sent, without a result yet. Oldest first; results come in the order of plans."""

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

    @property
    def oldest(self) -> InFlightStep | None:
        return self._steps[0] if self._steps else None

    def count_tokens(self) -> Counter[tuple[int, int]]:
        """Count the tokens that the steps bring at most: slot and slot version to tokens. Vectors count as one."""
        num_tokens: Counter[tuple[int, int]] = Counter()
        for step in self._steps:
            num_tokens.update(step.pooled_rows)
            limits = np.ones_like(step.sampling_slots) if step.sample_limits is None else step.sample_limits
            columns = step.sampling_slots.tolist(), step.slot_versions.tolist(), limits.tolist()
            for slot, slot_version, limit in zip(*columns, strict=True):
                num_tokens[slot, slot_version] += limit
        return num_tokens

    def push(self, step: InFlightStep) -> None:
        assert step.step_id == self.next_step_id, "step ids are dense"
        self._steps.append(step)
        self._last_step_id = step.step_id

    def pop(self, result: StepResult) -> InFlightStep:
        """Remove and return the step that `result` answers.

        Raises:
            ProtocolViolation: The result is not of the oldest step, or has other numbers of tokens than planned.
        """
        if not self._steps:
            raise ProtocolViolation(f"result of step {result.step_id}, but no step is in flight")
        step = self._steps[0]
        if result.step_id != step.step_id:
            raise ProtocolViolation(f"result of step {result.step_id}, but step {step.step_id} is due")
        if len(result.token_counts):
            _check_counts(step, result)
        elif len(result.token_ids) != len(step.sampling_slots):
            raise ProtocolViolation(
                f"result of step {step.step_id} has {len(result.token_ids)} tokens, "
                f"{len(step.sampling_slots)} were planned"
            )
        if len(result.guess_counts) not in (0, len(step.sampling_slots)):
            raise ProtocolViolation(
                f"result of step {step.step_id} has {len(result.guess_counts)} guess_counts, "
                f"{len(step.sampling_slots)} rows were planned"
            )
        for guesses in result.guesses:
            if len(guesses.rows) and int(guesses.rows.max()) >= len(step.sampling_slots):
                raise ProtocolViolation(
                    f"result of step {step.step_id} has guesses for row {guesses.rows.max()}, "
                    f"{len(step.sampling_slots)} rows were planned"
                )
        self._last_result_seen = step.step_id
        return self._steps.popleft()

    def forget(self) -> None:
        """Drop all steps, because no result will come. The next step has id 1."""
        self._steps.clear()
        self._last_step_id = self._last_result_seen = 0


def _check_counts(step: InFlightStep, result: StepResult) -> None:
    """Raise ProtocolViolation unless each row has as many tokens as it can have, and none only if it failed."""
    counts = result.token_counts
    if len(counts) != len(step.sampling_slots) or int(counts.sum()) != len(result.token_ids):
        raise ProtocolViolation(
            f"result of step {step.step_id} has {len(result.token_ids)} tokens and {len(counts)} counts; "
            f"{len(step.sampling_slots)} rows were planned"
        )
    limits = 1 if step.sample_limits is None else step.sample_limits
    for index in np.flatnonzero((counts > limits) | (counts == 0)).tolist():
        row = RowKey(int(step.sampling_slots[index]), int(step.slot_versions[index]))
        if counts[index] or row not in result.row_errors:
            raise ProtocolViolation(
                f"result of step {step.step_id}: slot {row.slot} has {counts[index]} tokens; a row has one at least "
                "unless it failed, and no more than were planned"
            )


def _extended(column: U32, values: Sequence[int]) -> U32:
    return np.concatenate([column, np.array(values, np.uint32)])


def check_vectors(step: InFlightStep, result: StepResult, states: RequestStates) -> None:
    """Check that a result has vectors of pooled rows that end with it, of each that lives and did not fail.

    Args:
        step: The oldest step. A result of another one is not looked at.

    Raises:
        ProtocolViolation: Vectors are missing, of another row, or not as many as the task has.
    """
    if result.step_id != step.step_id:
        return
    if unknown := result.vectors.keys() - set(step.pooled_rows):
        raise ProtocolViolation(
            f"result of step {step.step_id}: slot {min(unknown).slot} has vectors, and none are due"
        )
    for row in step.pooled_rows:
        request, vectors = states.by_row(row), result.vectors.get(row)
        if request is None or row in result.row_errors:
            continue
        pooling = request.content.pooling
        assert pooling is not None, "a row that samples is planned as a pooled one"
        due = request.num_prompt_tokens if pooling.task is Task.TOKEN_EMBED else 1
        if vectors is None or len(vectors) != due:
            raise ProtocolViolation(
                f"result of step {step.step_id}: slot {row.slot} has {0 if vectors is None else len(vectors)} "
                f"vectors, {due} are due"
            )


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
