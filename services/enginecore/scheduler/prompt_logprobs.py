"""Log-probabilities of prompts in a result: which requests they belong to, and that none is missing or comes twice.

A row reports from where its request stood when it was admitted. So a request that starts over gets nothing twice: what
its former row reports late belongs to no row any more, and the next row computes it again.
"""

from __future__ import annotations

from services.enginecore.request import Request
from services.enginecore.scheduler.request_states import RequestStates
from triptych.errors import ProtocolViolation
from triptych.types.step import PromptLogprobs, StepResult


def prompt_logprobs_of(
    result: StepResult, states: RequestStates
) -> tuple[tuple[Request, PromptLogprobs], ...]:
    """Return what a result reports of prompts, but for rows that are gone; changes nothing.

    Raises:
        ProtocolViolation: a part does not follow the one before it.
    """
    reported = []
    row_to_end: dict[tuple[int, int], int] = {}
    for entry in result.prompt_logprobs:
        row, part = (entry.slot, entry.slot_version), entry.logprobs
        request = states.by_row(*row)
        if request is None:
            continue
        due = row_to_end.get(row, max(request.prompt_logprobs_start, 1))
        if part.first_position != due or not due < part.end <= request.num_prompt_tokens:
            raise ProtocolViolation(
                f"result of step {result.step_id}: slot {entry.slot} reports positions {part.first_position} to "
                f"{part.end - 1} of a prompt of {request.num_prompt_tokens} tokens; position {due} is due"
            )
        row_to_end[row] = part.end
        reported.append((request, part))
    return tuple(reported)
