"""What a step, or the lack of one, means for requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.enginecore.request import Request
from services.enginecore.scheduler.running_rows import Ints, Slots
from triptych.errors import TriptychError
from triptych.types.outputs import FinishReason
from triptych.types.step import U32, PromptLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request's good end, its one terminal outcome."""

    request: Request
    reason: FinishReason
    stop_token_id: int | None = None
    """The member of stop_token_ids that ended it, or an EOS that is not the tokenizer's own; None for that."""


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """A request's end by an error, its one terminal outcome."""

    request: Request
    error: TriptychError


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """New tokens as columns, one entry per token: at most one per request and step."""

    sessions: Ints
    """[t] the frontend stream that each token goes to."""
    numbers: U32
    """[t] the request's number there."""
    token_ids: U32
    """[t] the token that ended its request among them."""
    rows: Slots
    """[t] where each token stands in the worker's result: logprobs are found by it."""
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()
    prompt_logprobs: tuple[tuple[Request, PromptLogprobs], ...] = ()
    """Parts of prompts, those of one request in order."""

    def with_tokens(
        self, late: Sequence[tuple[Request, int, int]], finished: tuple[Finished, ...]
    ) -> StepOutput:
        """With further tokens, given as (request, token id, row), and all that finished."""
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


def _extended(column: U32, values: Sequence[int]) -> U32:
    return np.concatenate([column, np.array(values, np.uint32)])
