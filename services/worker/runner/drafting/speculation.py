"""The guesses of a runner's steps: asked of proposers before a step, counted after it. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from triptych.types.facts import WorkerFacts
from triptych.types.step import U32, NewRow, empty_u32
from triptych_services.worker.runner.drafting.base import I64, Proposer
from triptych_services.worker.runner.drafting.budget import F64, GuessBudget
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
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

    Guesses are made when a row has got its tokens, and verified by the next step that may give it several. They are
    written into the row behind what is known, so that each verified position has the tokens before it in their place.
    What was not accepted is overwritten by later tokens.
    """

    def __init__(self, rows: RequestRows, proposers: Sequence[Proposer], max_guesses: int) -> None:
        """
        Args:
            proposers: The first one with a guess for a row decides. The one that was right most often for the row
                lately is asked first, of equals the first of these.
            max_guesses: The most guesses of one row in a step.
        """
        self._rows = rows
        self._proposers = tuple(proposers)
        self._budget = GuessBudget(rows.live.size, len(proposers), max_guesses)
        self._takes_part: Flags = np.zeros(rows.live.size, np.bool_)
        """[max_num_seqs] whether the row has entered here."""
        self._is_asked: Flags = np.zeros(rows.live.size, np.bool_)
        """[max_num_seqs] whether proposers have been asked since the row entered."""
        self._ready: dict[int, tuple[int, I64]] = {}
        """Slot -> index of a proposer, and what it expects behind the row's known tokens."""
        rows.observer = self

    def enter(self, row: NewRow) -> None:
        if not row.sampling.speculation:
            return
        self._takes_part[row.slot], self._is_asked[row.slot] = True, False
        self._budget.enter(row.slot)
        for proposer in self._proposers:
            proposer.enter(row)

    def leave(self, slot: int) -> None:
        if self._takes_part[slot]:
            self._takes_part[slot] = False
            self._ready.pop(slot, None)
            for proposer in self._proposers:
                proposer.leave(slot)

    def guess(self, step: StepRows) -> StepRows:
        """Return the step with guesses for those rows that may get several tokens; the same step if there are none."""
        if step.sample_limits is None:
            return step
        slots, num_left = step.sampling_slots, MAX_GUESSES_PER_STEP
        entered = np.flatnonzero(self._takes_part[slots] & ~self._is_asked[slots])
        if entered.size:  # an engine that knows no reports gives rows that enter several tokens
            new = slots[entered]
            self._propose(new, step.sample_limits[entered] - 1, self._budget.hopes(new))
        found: list[I64] = []
        for slot, limit in zip(slots.tolist(), step.sample_limits.tolist(), strict=True):
            _, token_ids = self._ready.get(slot, _NOTHING)
            found.append(token_ids[: min(limit - 1, num_left)])
            num_left -= found[-1].size
        counts = np.array([token_ids.size for token_ids in found], np.int64)
        if not counts.any():
            return step
        places = SamplingPlaces.of(np.concatenate(found), counts)
        is_guess = places.offsets < counts[places.rows]
        rows, known = places.rows[is_guess], self._rows.num_known[slots]
        self._rows.token_ids[slots[rows], known[rows] + places.offsets[is_guess]] = places.guesses[is_guess]
        return replace(step, places=places)

    def finish(self, step: StepRows, token_counts: I64 | None, forward_ns: int) -> U32:
        """Take in what the rows of a step have got, once it is recorded, and guess what follows.

        Args:
            token_counts: [num_sampling] tokens of each sampling row; None: one each.
            forward_ns: The time of the model.

        Returns:
            Guesses that each sampling row may have when it computes next, [num_sampling]; empty: no row has any. The
            engine may have planned its next step, so these are as many as were looked for, not those that were found.
        """
        if (step.query_lens == 1).all():  # a prompt's positions cost something else than guesses
            self._budget.costs.note(int(step.computed_lens.sum()), forward_ns * 1e-9)
        slots = step.sampling_slots
        if step.places is not None:
            assert token_counts is not None, "a step that verifies guesses counts its tokens"
            self._note_verified(slots, step.places.counts, token_counts - 1)
        takes_part = self._takes_part[slots]
        if not takes_part.any():
            return empty_u32()
        counts = np.ones(slots.size, np.int64) if token_counts is None else token_counts
        own = slots[takes_part]
        for proposer in self._proposers:
            proposer.accept(own, counts[takes_part])
        for slot in own.tolist() if self._ready else ():
            self._ready.pop(slot, None)
        self._is_asked[own] = True
        self._budget.fade(own)
        limits = self._guess_next(own, slots.size)
        if not limits.any():
            return empty_u32()
        reported = np.zeros(slots.size, np.uint32)
        reported[takes_part] = limits
        return reported

    def _note_verified(self, slots: I64, drafted: I64, accepted: I64) -> None:
        rows = np.flatnonzero(drafted)
        proposers = np.array([self._ready[slot][0] for slot in slots[rows].tolist()], np.int64)
        self._budget.note_verified(slots[rows], proposers, drafted[rows], accepted[rows])

    def _guess_next(self, slots: I64, num_positions: int) -> I64:
        """Find guesses for these rows, and keep as many as the next step should verify.

        Args:
            num_positions: Positions of that step without guesses.

        Returns:
            Guesses that were looked for, [num_rows].
        """
        budget, sizes = self._budget, (num_positions, MAX_GUESSES_PER_STEP)
        if not budget.may_gain(slots.size, *sizes):
            return np.zeros(slots.size, np.int64)
        hopes = budget.hopes(slots)
        limits = budget.allot(hopes.max(axis=1), None, *sizes)
        self._propose(slots, limits, hopes)
        if not self._ready:
            return limits
        ready = [self._ready.get(slot, _NOTHING) for slot in slots.tolist()]
        found = np.array([token_ids.size for _, token_ids in ready])
        rates = budget.rates(slots)[np.arange(slots.size), [proposer for proposer, _ in ready]]
        kept = budget.allot(rates, found, *sizes)
        for row in np.flatnonzero(kept < found).tolist():
            proposer, token_ids = ready[row]
            self._ready[int(slots[row])] = proposer, token_ids[: kept[row]]
        return limits

    def _propose(self, slots: I64, limits: I64, hopes: F64) -> None:
        """Ask proposers for guesses of these rows, until each row has some: the one that was right most often first.

        Args:
            limits: [num_rows] the most guesses of each; 0: none.
            hopes: [num_rows, num_proposers] as of `GuessBudget.hopes`; a proposer with 0 is not asked.
        """
        waiting = np.flatnonzero(limits).tolist()
        row_to_ranked = {row: _ranked(hopes[row].tolist()) for row in waiting}
        for _ in self._proposers:
            proposer_to_rows: defaultdict[int, list[int]] = defaultdict(list)
            for row in waiting:
                if ranked := row_to_ranked[row]:
                    proposer_to_rows[ranked.pop()].append(row)
            for index, rows in proposer_to_rows.items():
                self._ask(index, slots[rows], limits[rows])
            waiting = [row for row in waiting if int(slots[row]) not in self._ready]

    def _ask(self, index: int, slots: I64, limits: I64) -> None:
        """Ask one proposer for guesses of these rows."""
        guesses = self._proposers[index].propose(slots, limits)
        ends = np.cumsum(guesses.counts).tolist()
        for row, start, end in zip(range(slots.size), [0, *ends], ends, strict=False):
            token_ids = self._usable(guesses.token_ids[start : min(end, start + int(limits[row]))])
            if token_ids.size:
                self._ready[int(slots[row])] = index, token_ids
        self._budget.note_searched(slots, index, guesses.counts > 0)

    def _usable(self, token_ids: I64) -> I64:
        """Return the guesses before the first one that is no token."""
        is_token = (token_ids >= 0) & (token_ids < self._rows.sampling.vocab_size)
        return token_ids if is_token.all() else token_ids[: int(is_token.argmin())]


_NOTHING: tuple[int, I64] = 0, np.zeros(0, np.int64)


def _ranked(hopes: list[float]) -> list[int]:
    """Return the proposers of a row that are worth asking, the best one last; of equals the first one."""
    return sorted((i for i, hope in enumerate(hopes) if hope), key=lambda i: (hopes[i], -i))
