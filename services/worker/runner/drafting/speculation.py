"""The guesses of a runner's steps: asked of proposers before a step, counted after it. Needs no torch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import NewRow, VerifiedGuesses, empty_u32
from triptych_services.worker.runner.drafting.base import (
    I64,
    GuessReport,
    Proposer,
    ReadsStates,
    ReadsTexts,
    TakesTime,
)
from triptych_services.worker.runner.drafting.budget import NO_PROPOSER, GuessBudget
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.sampling.sampled import SamplingPlaces

if TYPE_CHECKING:
    from torch import Tensor

Flags = NDArray[np.bool_]

MAX_GUESSES_PER_STEP = 64
"""A step with more would be bound by arithmetic, not by reading weights. It bounds the memory of logits."""


def max_sampling_places(max_num_seqs: int, max_samples_per_row: int) -> int:
    """Return the number of positions at which a step samples at most."""
    return max_num_seqs + min(max_num_seqs * (max_samples_per_row - 1), MAX_GUESSES_PER_STEP)


class Speculation:
    """A `RowObserver`. Owned by the runner; used on its thread.

    Guesses are made when a row has got its tokens, and verified by the next step that may give it several. They are
    written into the row behind what is known, so that each verified position has the tokens before it in their place.
    What was not accepted is overwritten by later tokens.
    """

    def __init__(
        self,
        rows: RequestRows,
        proposers: Sequence[Proposer],
        max_guesses: int,
        *,
        asks_for_found: bool = False,
    ) -> None:
        """
        Args:
            proposers: The first one with a guess for a row decides. The one that gains most is asked first, by how
                often it was right for the row lately and by its own time; of equals the first of these.
            max_guesses: The most guesses of one row in a step.
            asks_for_found: Whether only those guesses are reported that were found, since a step that may have some
                waits for the steps before it.
        """
        self._rows = rows
        self._asks_for_found = asks_for_found
        self._proposers = tuple(proposers)
        self._timed = {i: each for i, each in enumerate(proposers) if isinstance(each, TakesTime)}
        self._readers = {i: each for i, each in enumerate(proposers) if isinstance(each, ReadsTexts)}
        place_seconds = {index: proposer.place_seconds for index, proposer in self._timed.items()}
        self._state_readers = {i: each for i, each in enumerate(proposers) if isinstance(each, ReadsStates)}
        self._budget = GuessBudget(
            rows.live.size, len(proposers), max_guesses, place_seconds, self._state_readers
        )
        self._takes_part: Flags = np.zeros(rows.live.size, np.bool_)
        """[max_num_seqs] whether the row has entered here."""
        self._not_asked: set[int] = set()
        """Slots of rows that proposers have not been asked for since they entered."""
        self._ready: dict[int, tuple[int, list[int]]] = {}
        """Slot -> index of a proposer, and what it expects behind the row's known tokens."""
        self._rest = self._num_rested = 0
        """Steps in which nothing is decided, since guesses have no chance, and how many of these have passed."""
        rows.observer = self

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Return `ReadsStates.state_layers` of the proposer that has some; empty: none has."""
        return next((each.state_layers for each in self._state_readers.values() if each.state_layers), ())

    def enter(self, row: NewRow) -> None:
        if not row.sampling.speculation:
            return
        self._takes_part[row.slot] = True
        self._rest = 0
        self._not_asked.add(row.slot)
        self._budget.enter(row.slot)
        for proposer in self._proposers:
            proposer.enter(row)

    def leave(self, slot: int) -> None:
        if self._takes_part[slot]:
            self._takes_part[slot] = False
            self._ready.pop(slot, None)
            self._not_asked.discard(slot)
            for proposer in self._proposers:
                proposer.leave(slot)

    def guess(self, step: StepRows) -> StepRows:
        """Return the step with guesses for those rows that may get several tokens; the same step if there are none."""
        if step.sample_limits is None:
            return step
        slots, limits = step.sampling_slots.tolist(), step.sample_limits.tolist()
        entered = [(s, most - 1) for s, most in zip(slots, limits, strict=True) if s in self._not_asked]
        if entered:  # an engine that knows no reports gives rows that enter several tokens
            self._propose(
                [(slot, most, self._budget.rates(slot)) for slot, most in entered if most], len(slots)
            )
        found, counts = list[int](), list[int]()
        for slot, limit in zip(slots, limits, strict=True):
            ready = self._ready.get(slot)
            count = 0 if ready is None else min(len(ready[1]), limit - 1, MAX_GUESSES_PER_STEP - len(found))
            counts.append(count)
            if ready is not None and count:
                found += ready[1][:count]
        return with_guesses(self._rows, step, np.array(found, np.int64), np.array(counts, np.int64))

    def note_wait(self, num_rows: int, seconds: float) -> None:
        """Take in how long a step of so many rows waits since it has guesses."""
        self._budget.note_search(num_rows, seconds)

    def finish(
        self,
        step: StepRows,
        token_counts: I64 | None,
        forward_ns: int,
        states: Tensor | None = None,
        layer_states: Tensor | None = None,
        is_current: Flags | None = None,
    ) -> GuessReport:
        """Take in what the rows of a step have got, once it is recorded, and guess what follows.

        Args:
            token_counts: [num_sampling] tokens of each sampling row; None: one each.
            forward_ns: The time of the model.
            states: [num_tokens or more, hidden_size] behind the last norm; None: no proposer reads them.
            layer_states: As of `StepOutput`, of `state_layers`.
            is_current: [num_sampling] whether the slot of each has got no other row since; None: none has.

        Returns:
            The report. The engine may have planned the next step, so rows may have as many guesses as were looked for,
            not only those that were found, unless these are asked for.
        """
        keeping_seconds = self._keep_states(step, token_counts, states, layer_states)
        slots = step.sampling_slots
        verified: tuple[VerifiedGuesses, ...] = ()
        if self._num_rested < self._rest and step.places is None:
            self._num_rested += 1
            self._accept(slots, token_counts, self._taking_part(slots, is_current))
            return GuessReport(empty_u32())
        num_known = int(step.query_lens.sum())
        if slots.size:
            num_guesses = 0 if step.places is None else int(step.places.counts.sum())
            num_tokens = slots.size if token_counts is None else int(token_counts.sum())
            is_plain = num_known == step.slots.size  # a prompt's positions cost something else than guesses
            seconds = forward_ns * 1e-9 if is_plain else None
            self._budget.note_step(slots.size, num_guesses, num_tokens, seconds)
        if keeping_seconds is not None:
            self._budget.note_keeping(num_known, keeping_seconds, self._num_rested)
        self._budget.start_step(self._num_rested)
        self._rest = self._num_rested = 0
        if step.places is not None:
            assert token_counts is not None, "a step that verifies guesses counts its tokens"
            verified = self._note_verified(slots.tolist(), step.places.counts.tolist(), token_counts.tolist())
        takes_part = self._taking_part(slots, is_current)
        own = self._accept(slots, token_counts, takes_part)
        if not own.size:
            return GuessReport(empty_u32(), verified)
        if self._ready or self._not_asked:
            for slot in own.tolist():
                self._ready.pop(slot, None)
                self._not_asked.discard(slot)
        limits = self._guess_and_count(own.tolist(), slots.size)
        if not any(limits):
            self._rest = 0 if self._ready or self._not_asked else self._budget.rest()
            return GuessReport(empty_u32(), verified)
        next_counts = np.zeros(slots.size, np.uint32)
        next_counts[takes_part] = limits
        return GuessReport(next_counts, verified)

    def _keep_states(
        self, step: StepRows, token_counts: I64 | None, states: Tensor | None, layer_states: Tensor | None
    ) -> float | None:
        """Let proposers keep the states of a step as long as guesses may lose what that takes; see `finish`.

        Returns:
            Its seconds; None: nothing was kept.
        """
        if not (self._state_readers and self._budget.keeps_states):
            return None
        started = time.perf_counter()
        for reader in self._state_readers.values():
            read = layer_states if reader.state_layers else states
            assert read is not None, "the caller has them where a proposer reads them"
            reader.take_states(step, token_counts, read)
        return time.perf_counter() - started

    def _taking_part(self, slots: I64, is_current: Flags | None) -> Flags:
        takes_part = self._takes_part[slots]
        return takes_part if is_current is None else takes_part & is_current

    def _accept(self, slots: I64, token_counts: I64 | None, takes_part: Flags) -> I64:
        """Tell proposers of the tokens of sampling rows, and return the slots of those that take part."""
        own = slots[takes_part]
        if own.size:
            counts = np.ones(own.size, np.int64) if token_counts is None else token_counts[takes_part]
            for proposer in self._proposers:
                proposer.accept(own, counts)
        return own

    def _note_verified(
        self, slots: list[int], drafted: list[int], token_counts: list[int]
    ) -> tuple[VerifiedGuesses, ...]:
        """Take in what came of the guesses of a step, by sampling row."""
        verified = [[0] * max(drafted) for _ in self._proposers]
        accepted = [[0] * max(drafted) for _ in self._proposers]
        rows, row_counts = ([list[int]() for _ in self._proposers] for _ in range(2))
        for row, (slot, num_drafted, num_tokens) in enumerate(zip(slots, drafted, token_counts, strict=True)):
            if num_drafted:
                index = self._ready[slot][0]
                self._budget.note_verified(slot, index, num_drafted, num_tokens - 1)
                rows[index].append(row)
                row_counts[index].append(num_drafted)
                for place in range(num_drafted):
                    verified[index][place] += 1
                    accepted[index][place] += place < num_tokens - 1
        nums_places = [sum(count > 0 for count in counts) for counts in verified]
        return tuple(
            VerifiedGuesses(
                self._proposers[index].name,
                np.array(verified[index][:num_places], np.uint32),
                np.array(accepted[index][:num_places], np.uint32),
                np.array(rows[index], np.uint32),
                np.array(row_counts[index], np.uint32),
            )
            for index, num_places in enumerate(nums_places)
            if num_places
        )

    def _guess_and_count(self, slots: list[int], num_positions: int) -> list[int]:
        """Return the guesses that each row may have in the next step; see `finish` and `_guess_next`.

        Args:
            slots: Ascending.
        """
        if slots[-1] < self._rows.num_guessing_slots:
            limits = self._guess_next(slots, num_positions)
        else:
            guessing = [slot for slot in slots if slot < self._rows.num_guessing_slots]
            limits = self._guess_next(guessing, num_positions) if guessing else []
            limits += [0] * (len(slots) - len(guessing))
        if not self._asks_for_found:
            return limits
        return [most if slot in self._ready else 0 for slot, most in zip(slots, limits, strict=True)]

    def _guess_next(self, slots: list[int], num_positions: int) -> list[int]:
        """Find guesses for these rows, and keep as many as the next step should verify.

        Args:
            num_positions: Positions of that step without guesses.

        Returns:
            Guesses that were looked for, by row.
        """
        budget, sizes = self._budget, (num_positions, MAX_GUESSES_PER_STEP)
        if (least := budget.least_chance(len(slots), *sizes)) > 1:
            return [0] * len(slots)
        hopes, is_trial = budget.hopes_of(slots, least)
        if max(map(max, hopes)) < least:
            return [0] * len(slots)
        prices = budget.prices(len(slots))
        asked = [_best(of_row, prices) for of_row in hopes]
        hoped = [of_row[proposer] for of_row, proposer in zip(hopes, asked, strict=True)]
        limits = budget.allot(hoped, [1] * len(slots) if is_trial else None, *sizes, asked)
        if not any(limits) or budget.needs_plain(num_positions):
            return limits
        self._propose([entry for entry in zip(slots, limits, hopes, strict=True) if entry[1]], num_positions)
        ready = [self._ready.get(slot, _NOTHING) for slot in slots]
        found = [len(token_ids) for _, token_ids in ready]
        rates = [of_row[proposer] for of_row, (proposer, _) in zip(hopes, ready, strict=True)]
        if any(found) and (found, rates) != (limits, hoped):  # not all that was hoped for
            kept = budget.allot(rates, found, *sizes)
            for slot, (proposer, token_ids), count in zip(slots, ready, kept, strict=True):
                if count < len(token_ids):
                    self._ready[slot] = proposer, token_ids[:count]
        return limits

    def _propose(self, rows: Sequence[tuple[int, int, list[float]]], num_positions: int) -> None:
        """Ask proposers for guesses of these rows, until each row has some: the one that gains most first.

        Args:
            rows: For each its slot, the most guesses, >= 1, and by proposer the chance that one is right; 0: it is not
                asked.
            num_positions: Positions of the next step without guesses.
        """
        started, prices = time.perf_counter(), self._budget.prices(len(rows))
        waiting = [_Waiting(slot, limit, hopes, _ranked(hopes, prices)) for slot, limit, hopes in rows]
        model_seconds = 0.0
        while waiting := [row for row in waiting if row.ranked]:
            proposer_to_rows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for row in waiting:
                proposer_to_rows[row.ranked.pop()].append((row.slot, row.limit))
            for index, asked in proposer_to_rows.items():
                asked_at = time.perf_counter()
                self._ask(index, asked)
                if (timed := self._timed.get(index)) is not None:
                    started += time.perf_counter() - asked_at
                    model_seconds += timed.take_seconds()
            waiting = [row for row in waiting if row.slot not in self._ready and row.ranked]
            if waiting:
                waiting = self._still_worth_it(waiting, num_positions)
        self._budget.note_search(num_positions, time.perf_counter() - started, model_seconds)

    def _still_worth_it(self, rows: Sequence[_Waiting], num_positions: int) -> list[_Waiting]:
        """Return those rows for which the next proposer should be asked, with as many guesses as it should look for."""
        others = max(num_positions - len(rows), 0)  # get one token each, which they have to wait for
        asked = [row.ranked[-1] for row in rows] + [NO_PROPOSER] * others
        rates = [row.hopes[row.ranked[-1]] for row in rows] + [0.0] * others
        counts = self._budget.allot(rates, None, num_positions, MAX_GUESSES_PER_STEP, asked)
        return [
            replace(row, limit=min(row.limit, count))
            for row, count in zip(rows, counts, strict=False)
            if count
        ]

    def _ask(self, index: int, rows: Sequence[tuple[int, int]]) -> None:
        """Ask one proposer for guesses.

        Args:
            rows: Slot of each row, and the most guesses that are of use for it.
        """
        slots, limits = np.array(rows, np.int64).T
        if (reader := self._readers.get(index)) is not None:
            reader.allow_reading(self._budget.reading_seconds())
        guesses = self._proposers[index].propose(slots, limits)
        if reader is not None:
            self._budget.note_reading(reader.take_reading_seconds())
        token_ids, start = guesses.token_ids.tolist(), 0
        for (slot, limit), count in zip(rows, guesses.counts.tolist(), strict=True):
            usable = self._usable(token_ids[start : start + min(count, limit)])
            start += count
            if usable or reader is None or not reader.is_reading(slot):
                self._budget.note_searched(slot, index, has_found=bool(usable))
            if usable:
                self._ready[slot] = index, usable

    def _usable(self, token_ids: list[int]) -> list[int]:
        """Return the guesses before the first one that is no token."""
        vocab_size = self._rows.sampling.vocab_size
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                return token_ids[:place]
        return token_ids


def with_guesses(rows: RequestRows, step: StepRows, token_ids: I64, counts: I64) -> StepRows:
    """Write guesses into the rows of a step behind what is known, and return the step with them; the same step if
    there are none.

    Args:
        token_ids, counts: As of `SamplingPlaces.of`.
    """
    if not token_ids.size:
        return step
    start = 0
    for slot, count in zip(step.sampling_slots.tolist(), counts.tolist(), strict=True):
        if count:
            known = int(rows.num_known[slot])
            rows.token_ids[slot, known : known + count] = token_ids[start : start + count]
            start += count
    return replace(step, places=SamplingPlaces.of(token_ids, counts))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row that has no guesses yet."""

    slot: int
    limit: int
    """The most guesses that are of use for it, >= 1."""
    hopes: list[float]
    """By proposer: the chance that a guess of it is right; 0: it is not asked."""
    ranked: list[int]
    """The proposers that may still be asked, the best one last."""


_NOTHING: tuple[int, list[int]] = 0, []


def _best(hopes: list[float], prices: list[float]) -> int:
    """Return the proposer of a row that gains most; of equals the first one."""
    return max(range(len(hopes)), key=lambda i: (hopes[i] - prices[i], -i))


def _ranked(hopes: list[float], prices: list[float]) -> list[int]:
    """Return the proposers of a row that are worth asking, the best one last; of equals the first one."""
    worth = (i for i, hope in enumerate(hopes) if hope > prices[i])
    return sorted(worth, key=lambda i: (hopes[i] - prices[i], -i))
