"""The guesses of a runner's steps: asked of proposers before a step, counted after it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from triptych.types.facts import WorkerFacts
from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import I64, Proposer
from triptych_services.worker.runner.drafting.ngram import NgramProposer
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.sampling.params import TokenHistory
from triptych_services.worker.sampling.sampled import SamplingPlaces

Flags = NDArray[np.bool_]

MAX_GUESSES_PER_STEP = 64
"""A step with more would be bound by arithmetic, not by reading weights. It bounds the memory of logits."""


def max_sampling_places(facts: WorkerFacts) -> int:
    """Return the number of positions at which a step samples at most."""
    guesses = facts.max_num_seqs * (facts.max_samples_per_row - 1)
    return facts.max_num_seqs + min(guesses, MAX_GUESSES_PER_STEP)


class Speculation:
    """A `RowObserver`. Owned by the runner; used on its thread.

    The guesses of a step are written into the rows behind what is known, so that each verified position has the tokens
    before it in their place. What was not accepted is overwritten by later tokens.
    """

    def __init__(self, rows: RequestRows, proposers: Sequence[Proposer]) -> None:
        """
        Args:
            proposers: In the order in which they are asked: the first one with a guess for a row decides.
        """
        self._rows = rows
        self._proposers = tuple(proposers)
        self._takes_part: Flags = np.zeros(rows.live.size, np.bool_)
        """[max_num_seqs] whether the row has entered here."""
        rows.observer = self

    def enter(self, row: NewRow) -> None:
        self._takes_part[row.slot] = True
        for proposer in self._proposers:
            proposer.enter(row)

    def leave(self, slot: int) -> None:
        if self._takes_part[slot]:
            self._takes_part[slot] = False
            for proposer in self._proposers:
                proposer.leave(slot)

    def guess(self, step: StepRows) -> StepRows:
        """Return the step with guesses for those rows that may get several tokens; the same step if there are none."""
        if step.sample_limits is None:
            return step
        slots = step.sampling_slots
        room = np.where(self._takes_part[slots], step.sample_limits - 1, 0)
        before = np.cumsum(room) - room
        room = np.minimum(room, np.maximum(MAX_GUESSES_PER_STEP - before, 0))  # [num_sampling]
        found: list[I64] = [_NO_IDS] * slots.size
        for proposer in self._proposers:
            asked = np.flatnonzero(room)
            if not asked.size:
                break
            guesses = proposer.propose(slots[asked], room[asked])
            ends = np.cumsum(guesses.counts).tolist()
            for row, start, end in zip(asked.tolist(), [0, *ends], ends, strict=False):
                token_ids = self._usable(guesses.token_ids[start : min(end, start + int(room[row]))])
                if token_ids.size:
                    found[row], room[row] = token_ids, 0
        counts = np.array([token_ids.size for token_ids in found], np.int64)
        if not counts.any():
            return step
        places = SamplingPlaces.of(np.concatenate(found), counts)
        is_guess = places.offsets < counts[places.rows]
        rows, known = places.rows[is_guess], self._rows.num_known[slots]
        self._rows.token_ids[slots[rows], known[rows] + places.offsets[is_guess]] = places.guesses[is_guess]
        return replace(step, places=places)

    def accept(self, step: StepRows, token_counts: I64 | None) -> None:
        """Let the proposers see what the rows of a step have got, once it is recorded.

        Args:
            token_counts: [num_sampling] tokens of each sampling row; None: one each.
        """
        slots = step.sampling_slots
        takes_part = self._takes_part[slots]
        if not takes_part.any():
            return
        counts = np.ones(slots.size, np.int64) if token_counts is None else token_counts
        for proposer in self._proposers:
            proposer.accept(slots[takes_part], counts[takes_part])

    def _usable(self, token_ids: I64) -> I64:
        """Return the guesses before the first one that is no token."""
        is_token = (token_ids >= 0) & (token_ids < self._rows.sampling.vocab_size)
        return token_ids if is_token.all() else token_ids[: int(is_token.argmin())]


_NO_IDS: I64 = np.zeros(0, np.int64)


CreateProposers = Callable[[WorkerFacts, TokenHistory], Sequence[Proposer]]
"""Creates the proposers of a runner, which read this history of its rows."""


def ngram_only(facts: WorkerFacts, history: TokenHistory) -> Sequence[Proposer]:
    """Create a proposer that needs nothing but the rows."""
    return [NgramProposer(facts.max_num_seqs, history=history)]


def create_speculation(
    rows: RequestRows, facts: WorkerFacts, create: CreateProposers | None = None
) -> Speculation | None:
    """Return what guesses for a worker with these facts; None if a row gets one token in a step.

    Args:
        create: None: `ngram_only`.
    """
    if facts.max_samples_per_row == 1:
        return None
    return Speculation(rows, (create or ngram_only)(facts, rows.history))
