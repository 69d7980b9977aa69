"""Checks of what rows report beside their tokens, before anything of a result is taken in."""

from __future__ import annotations

from triptych.errors import ProtocolViolation
from triptych.types.pooling import Task
from triptych.types.step import PromptLogprobs, StepResult
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.request_states import RequestStates
from triptych_services.enginecore.scheduler.step_results import InFlightStep


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
