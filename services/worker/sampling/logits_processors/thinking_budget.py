"""`thinking_token_budget`: the token that ends the reasoning is forced once it has so many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.output_limits import ThinkingBudget
from triptych.types.sampling import SamplingParams
from triptych.types.step import RowError
from triptych_services.worker.sampling.batch import to_device
from triptych_services.worker.sampling.logits_processors.base import (
    I64,
    ChangedRows,
    Flags,
    OwnRow,
    SlotValues,
)
from triptych_services.worker.sampling.params import LogitChange, TokenHistory

_OPENS_WITHIN = 16
"""Tokens of an output in which its reasoning begins, if it does: white space may come before it."""
_NEVER = np.iinfo(np.int64).max


class ThinkingBudgets:
    """A `DirectProcessor`. It reads no tokens before the budget can be spent, nor after the reasoning has ended."""

    needs_history = True
    fault = None

    def __init__(self, max_num_seqs: int, *, history: TokenHistory) -> None:
        self._history = history
        self._thoughts: SlotValues[_Thought] = SlotValues(max_num_seqs)
        self._first_end: I64 = np.full(max_num_seqs, _NEVER, np.int64)
        """[max_num_seqs] tokens of the output after which the reasoning may have to be ended."""

    def enter(self, slot: int, params: SamplingParams) -> LogitChange:
        budget = params.thinking_token_budget
        if budget is None:
            return LogitChange.NEVER
        assert isinstance(budget, ThinkingBudget), "the frontend has completed it"
        self._thoughts[slot] = _Thought(budget)
        self._first_end[slot] = budget.num_tokens + (not budget.is_open)
        return LogitChange.SOMETIMES

    def leave(self, slot: int) -> None:
        self._thoughts.discard(slot)
        self._first_end[slot] = _NEVER

    def find_rows(self, slots: I64) -> Flags | None:
        if not self._thoughts:
            return None
        num_output = self._history.num_known[slots] - self._history.num_prompt[slots]
        flags: Flags = num_output >= self._first_end[slots]
        return flags if flags.any() else None

    def apply(self, logits: Tensor, changed: ChangedRows, own: Sequence[OwnRow]) -> Mapping[int, RowError]:
        history, rows, closing_ids = self._history, list[int](), list[int]()
        for row, slot in own:
            thought = self._thoughts[slot]
            thought.advance(history.token_ids[slot, history.num_prompt[slot] : history.num_known[slot]])
            if thought.is_over:
                self._first_end[slot] = _NEVER
            elif thought.is_spent:
                rows.append(row)
                closing_ids.append(thought.closing_id)
        if rows:
            device_rows = to_device(np.array(rows, np.int64), changed.device)
            logits.index_fill_(0, device_rows, -torch.inf)
            columns = to_device(np.array(closing_ids, np.int64), changed.device)
            logits.index_put_((device_rows, columns), logits.new_zeros(()))
        return {}


class _Thought:
    """The reasoning of one request."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self.closing_id = budget.closing_id
        self.is_over = False
        """It has ended, or there is none."""
        self._budget = budget
        self._is_open = budget.is_open
        self._num_tokens = 0
        self._num_seen = 0
        """Tokens of the output that have been taken in."""

    @property
    def is_spent(self) -> bool:
        """Whether the next token has to end it."""
        return self._is_open and not self.is_over and self._num_tokens >= self._budget.num_tokens

    def advance(self, output: NDArray[np.integer]) -> None:
        """Take in what came since the last call.

        Args:
            output: [num_output] all tokens so far.
        """
        for token_id in output[self._num_seen :].tolist():
            self._num_seen += 1
            if self._is_open:
                self._num_tokens += 1
                self.is_over = self.is_over or token_id == self.closing_id
            elif token_id == self._budget.opening_id:
                self._is_open = True
            elif self._num_seen >= _OPENS_WITHIN:
                self.is_over = True
            if self.is_over:
                return
