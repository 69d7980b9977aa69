"""Guesses from states of the model: a layer of the checkpoint (docs/adr/0126), and EAGLE-3 heads (docs/adr/0130).

A head goes on from the state of a token and the token behind it, and guesses the one after that. A row of it is the
text of the request without its first token, each beside the state of the one before:

    known to the row             a   b   c   d
    state of the model           A   B   C           that of d is computed by the next step
    computed here               bA  cB  dC           chooses e, and leaves D, the head's own state in place of that
    each further place                      eD       chooses f; the guesses are e and f

So what was computed of guesses is computed anew once they are verified, from states of the model.

States are there only during the step that computes them. They are copied, and wait until the row is guessed for. Tokens
that the worker has not computed for the row, in cached blocks or those of another worker, have no states. Such a row
begins at its first state, as if there were no text before. So does one that lost its states to others, and one for
which none were kept for some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.facts import WorkerFacts
from triptych.types.step import NewRow
from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.drafting.base import I64
from triptych_services.worker.runner.drafting.draft_model import DraftModel, DraftModelProposer
from triptych_services.worker.runner.request_rows import StepRows
from triptych_services.worker.runner.step_inputs import StepSizes
from triptych_services.worker.sampling.params import TokenHistory

_MAX_WAITING = 4096
_NOWHERE = -1
"""In place of the position at which a row begins, if it has no state yet."""


def num_waiting_states(max_num_batched_tokens: int) -> int:
    """Return the number of states that may wait: those of a long prompt, and those of any step."""
    return max(_MAX_WAITING, max_num_batched_tokens)


class HeadProposer(DraftModelProposer):
    """A `DraftModelProposer` that `ReadsStates`. Owns those that wait."""

    state_layers: tuple[int, ...] = ()

    def __init__(
        self, draft: DraftModel, facts: WorkerFacts, *, history: TokenHistory, state_size: int | None = None
    ) -> None:
        """
        Args:
            state_size: Elements of what it reads of a token; None: as many as its own state has.
        """
        assert draft.states_before is not None, "the head reads states"
        num_places = num_waiting_states(facts.max_num_batched_tokens)
        self._states = draft.states_before
        self._waiting = self._states.new_empty(num_places, state_size or self._states.shape[1])
        """[number of places, state_size] the states that wait, in any order."""
        self._waiting_bytes: NDArray[np.uint8] = self._waiting.view(torch.uint8).numpy()
        self._free_places = list(range(num_places))
        self._places: list[list[int]] = [[] for _ in range(facts.max_num_seqs)]
        """By slot: the places of its states that wait, in their order."""
        self._latest = self._states.new_zeros(facts.max_num_seqs, self._states.shape[1])
        """[max_num_seqs, hidden_size] the head's own state behind the latest token that it has computed of a row."""
        self._takes_part: NDArray[np.bool_] = np.zeros(facts.max_num_seqs, np.bool_)
        self._first = [_NOWHERE] * facts.max_num_seqs
        """By slot: the position of the first state of its row."""
        self._num_read = [0] * facts.max_num_seqs
        """By slot: states of its row that the head has gone on from, so that they wait no more."""
        super().__init__(draft, facts, history=history)

    @property
    def num_waiting(self) -> int:
        """States that wait."""
        return len(self._waiting) - len(self._free_places)

    def enter(self, row: NewRow) -> None:
        super().enter(row)
        self._takes_part[row.slot] = True

    def leave(self, slot: int) -> None:
        super().leave(slot)
        self._takes_part[slot] = False

    def take_states(self, step: StepRows, token_counts: I64 | None, states: Tensor) -> None:
        """Let the states of known tokens wait, which right guesses are."""
        own = np.flatnonzero(self._takes_part[step.slots])
        if not own.size:
            return
        computed_lens, num_known = step.computed_lens, step.query_lens.copy()
        if token_counts is not None:
            num_known[step.samples] += np.maximum(token_counts - 1, 0)
        firsts = (np.cumsum(computed_lens) - computed_lens)[own].tolist()
        counts = num_known[own].tolist()
        self._make_places(sum(counts))
        sources, places = list[int](), list[int]()
        rows = zip(step.slots[own].tolist(), step.starts[own].tolist(), counts, firsts, strict=True)
        for slot, start, count, first in rows:
            if start != self._first[slot] + self._num_read[slot] + len(self._places[slot]):
                self._forget(slot)
            if self._first[slot] == _NOWHERE:
                self._first[slot] = start
            taken = self._free_places[len(self._free_places) - count :]
            del self._free_places[len(self._free_places) - count :]
            self._places[slot] += taken
            places += taken
            sources += range(first, first + count)
        # a step of a small model takes milliseconds, and each call of torch for it microseconds
        self._waiting_bytes[places] = states.view(torch.uint8).numpy()[sources]

    def _make_places(self, count: int) -> None:
        """Let rows with most states that wait begin anew, until there are so many places."""
        while len(self._free_places) < count:
            self._forget(max(range(len(self._places)), key=lambda slot: len(self._places[slot])))

    def _forget(self, slot: int) -> None:
        super()._forget(slot)
        self._free_places += self._places[slot]
        self._places[slot] = []
        self._first[slot], self._num_read[slot] = _NOWHERE, 0

    def _take_over(self, slot: int, limit: int) -> int:
        """Copy the tokens behind a row's states; return how many guesses it can have; 0: states are missing."""
        known, first, num_read = (
            int(each[slot]) for each in (self._history.num_known, self._first, self._num_read)
        )
        num_states = num_read + len(self._places[slot])
        if first == _NOWHERE or first + num_states != known - 1:
            return 0
        limit = min(limit, self._max_len + 1 - num_states)
        if limit < 1:
            self._forget(slot)
            return 0
        if not self._make_room(slot, num_states + limit - 1):
            return 0
        tokens = self._history.token_ids[slot, first + num_read + 1 : known]
        self._rows.token_ids[slot, num_read:num_states] = tokens
        self._rows.num_known[slot], self._rows.num_computed[slot] = num_states, num_read
        return limit

    def _forward(self, step: StepRows) -> tuple[StepSizes, StepOutput]:
        """Compute what rows have got, from states that wait; or one guess of each, from the head's own state."""
        if (step.starts < self._rows.num_known[step.slots]).all():
            places = list[int]()
            for slot, count in zip(step.slots.tolist(), step.query_lens.tolist(), strict=True):
                places += self._places[slot][:count]
                del self._places[slot][:count]
                self._num_read[slot] += count
            if places:
                self._states[: len(places)] = self._combined(self._waiting[torch.tensor(places)])
            self._free_places += places
        else:
            self._states[: step.slots.size] = self._latest[torch.from_numpy(step.slots)]
        sizes, output = super()._forward(step)
        assert output.hidden is not None, "a CPU gives the states of all tokens"
        last_tokens = (np.cumsum(step.query_lens) - 1)[step.samples]
        latest = output.hidden[torch.from_numpy(last_tokens)]
        self._latest[torch.from_numpy(step.sampling_slots)] = latest.to(self._latest.dtype)
        return sizes, output

    def _combined(self, states: Tensor) -> Tensor:
        """Return what the head goes on from, [num_tokens, hidden_size]: here it is what was read."""
        return states


class MtpProposer(HeadProposer):
    """The proposer of a layer of the checkpoint, which reads the model's last state."""

    name = "mtp"


class Eagle3Proposer(HeadProposer):
    """The proposer of an EAGLE-3 head, which joins several states of a token and has a vocabulary of its own."""

    name = "eagle3"

    def __init__(
        self,
        draft: DraftModel,
        facts: WorkerFacts,
        *,
        history: TokenHistory,
        layers: tuple[int, ...],
        state_size: int,
        combine: Callable[[Tensor], Tensor],
        tokens: Tensor | None,
    ) -> None:
        """
        Args:
            layers: As of `ReadsStates.state_layers`.
            state_size: Elements of all states of a token.
            combine: Maps them to one of the head.
            tokens: [tokens of the head] int64, their ids in the model; None: they are the model's.
        """
        self.state_layers = layers
        self._combine, self._tokens = combine, tokens
        super().__init__(draft, facts, history=history, state_size=state_size)

    def _combined(self, states: Tensor) -> Tensor:
        return self._combine(states)

    def _forward(self, step: StepRows) -> tuple[StepSizes, StepOutput]:
        sizes, output = super()._forward(step)
        if self._tokens is None:
            return sizes, output
        chosen = output.token_ids  # negative where nothing could be chosen
        return sizes, replace(
            output, token_ids=torch.where(chosen < 0, chosen, self._tokens[chosen.clamp(0)])
        )
