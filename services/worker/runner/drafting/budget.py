"""How many guesses a step verifies: as many as bring the most tokens per second, none where they bring nothing.

A step of P positions takes cost(P), which is measured as steps run. A guess at the i-th place behind what is known of a
row is accepted if all before it are: with a chance of p^i, where p is what was accepted of the row's guesses lately.

    gains of two rows           0.9  0.81  0.73  0.66  …          0.3  0.09  …
    in falling order            0.9  0.81  0.73  0.66  0.3  0.09
    tokens per second with m    (2 + the first m of these) / cost(2 + m)      the best m decides

It is asked twice for a step: how many guesses the rows should look for, if the best proposer of each has some, and how
many of those that were found are verified, with what is known of the proposer that has found them. What a model takes
to guess counts in the first question: rows that it looks two places ahead for wait for two places. In the second it is
spent.

An account holds what guesses have brought, and what it took to look for them and to verify them. They may lose 0.5% of
the time of steps, and where that is used up, a step has none: chances may be misjudged, time is not. A second one holds
what a model took to read texts, which bring guesses later: of what is gained beyond the first, and a fixed advance.
Both count in steps without guesses, each as long as such a step is when something is gained or lost. So what was lost
while a machine was slow takes no more steps to be earned again than what is lost at any other time.
Needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import repeat

from triptych_services.worker.runner.drafting.costs import MAX_PLAIN_AGE, StepCosts

PlaceSeconds = Callable[[int], "float | None"]
"""Number of rows -> the seconds that a proposer takes to look one place further ahead of them; None: not known."""

_RATE_WEIGHT = 0.1
"""The weight of the latest verified guesses among those of their row."""
_OVERALL_WEIGHT = 0.02
"""The weight of the latest guesses of a row among those of all rows."""
_FADING = 0.99
"""The part of the knowledge of a row's guesses that is left after a step. Bad ones are tried again."""
_DRIFT = 0.002
"""The part of the way to `_PRIOR_RATE` that the share of right guesses of all rows takes in a step."""
_PRIOR_RATE = 0.5
"""The share of right guesses of a row of which nothing is known."""
_PRIOR_GUESSES = 2.0
"""Guesses of a row that weigh as much as those of all rows together."""
_MAX_RATE = 0.98
_MAX_VAIN = 60
"""Searches without any guess after which a proposer is asked for a row rarely: as many as the tokens of a long text
between two keys of a form."""
_VAIN_PAUSE = 25
"""Steps until it is asked then."""
_LEAST_CHANCE = 0.01
"""A guess that is right less often is not considered."""
_LOSS_SHARE = 0.005
"""The part of the time of steps that guesses may lose."""
_MAX_LOSS = 8.0
"""The steps without guesses that they may lose beyond that: when nothing is known yet, and when a text changes."""
_MAX_LOSS_OF_TRIALS = 4.0
"""Those of them that guesses may lose which are made to learn how often they are right."""
_MAX_CREDIT = 12.0
"""The gains that may be lost again, in steps without guesses."""
_MAX_DEBT = 3.0
"""The steps without guesses that are lost beyond `_MAX_LOSS` at most: with `_LOSS_SHARE` earned in each step, guesses
end for 600 steps, however long a search took in a bad moment of the machine."""
_LEAST_FOR_STATES = 2.0
"""The steps that guesses may lose when states are kept for them again. So some are there before all is used up anew, of
which better guesses are made than of the first one."""
_READING_SHARE = 0.5
"""The part of a step that all rows may wait for a model that reads the texts of some."""
_MAX_READING = 32.0
"""The steps without guesses that it may read for in advance, and of gains that are kept for it."""
_MIN_REST, _MAX_REST = 7, 31
"""Steps in which nothing is decided or measured, where guesses have no chance: a look at all costs a percent of a step
of a small model."""
NO_PROPOSER = -1
"""In place of the proposer of a row that has no guesses."""
_NEVER = 2.0
"""A chance that no guess has."""
_LEAST_GAIN = 1.02
"""Tokens per second with guesses, over those without, below which a step has none. Covers what is not measured."""


class _Row:
    """The experience with the guesses of one row."""

    __slots__ = ("accepted", "asked_from", "since", "tried", "vain")

    def __init__(self, num_proposers: int) -> None:
        self.tried = [0.0] * num_proposers
        """By proposer: guesses that were looked at lately, the first wrong one included."""
        self.accepted = [0.0] * num_proposers
        """By proposer: those of them that were right."""
        self.vain = [0] * num_proposers
        """By proposer: its latest searches that have found none."""
        self.asked_from = [0] * num_proposers
        """By proposer: the step from which it is asked."""
        self.since = 0
        """The step of which `tried` and `accepted` are."""


class GuessBudget:
    """Decides how many guesses rows have. Owned by the `Speculation`.

    It computes with plain numbers: for the few rows that guesses are worth having for, arrays take longer.
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_proposers: int,
        max_guesses: int,
        place_seconds: Mapping[int, PlaceSeconds] | None = None,
        state_readers: Collection[int] = (),
    ) -> None:
        """
        Args:
            max_guesses: The most guesses of one row in a step.
            place_seconds: Of proposers that take longer for each place that they look ahead. The time of others counts
                in the account alone. None: there are only others.
            state_readers: The proposers for which states are kept.
        """
        self.costs = StepCosts()
        self._max_guesses = max_guesses
        self._rows = [_Row(num_proposers) for _ in range(max_num_seqs)]
        self._overall = [_PRIOR_RATE] * num_proposers
        """By proposer: share of right guesses, of all rows."""
        self._step = 0
        self._place_seconds = place_seconds or {}
        self._state_readers = frozenset(state_readers)
        self._keeping_costs = StepCosts()
        """The seconds in which states are kept, by the tokens of a step."""
        self.keeps_states = True
        """Whether states are kept for proposers. They are not while guesses may lose nothing more."""
        self._balance = 0.0
        """Steps without guesses that guesses have gained; below 0: that they have lost."""
        self._reading_balance = 0.0
        """Steps of gains beyond the account that are left for reading texts; below 0: what was read in advance."""
        self._plain_seconds = 0.0
        """The time of the latest step that was noted, without its guesses; 0: not known."""
        self._chances: dict[tuple[int, int, int], float] = {}
        """Arguments of `least_chance` -> what the costs say, as of `_num_looks`."""
        self._num_looks = 0

    def enter(self, slot: int) -> None:
        """Forget the row that was in a slot."""
        self._rows[slot] = _Row(len(self._overall))

    def start_step(self, num_rested: int = 0) -> None:
        """Let what is known of guesses fade, so that those which were bad are tried again.

        Args:
            num_rested: Steps before this one of which nothing was noted.
        """
        self._step += 1 + num_rested
        self.costs.pass_to(self._step)  # what was measured grows old in steps that rest, too
        drift = _DRIFT * (1 + num_rested)
        self._overall = [rate + drift * (_PRIOR_RATE - rate) for rate in self._overall]
        self._gain(num_rested * _LOSS_SHARE)

    def rest(self) -> int:
        """Return how many steps may pass before it is worth asking again, where guesses have no chance just now."""
        if not self._plain_seconds:
            return 0
        lacking = -_MAX_LOSS - self._balance
        if lacking <= 0:
            return _MIN_REST
        return min(_MIN_REST + int(lacking / _LOSS_SHARE), _MAX_REST)

    def note_searched(self, slot: int, proposer: int, *, has_found: bool) -> None:
        """Take in whether a proposer has found guesses for a row that it was asked for."""
        row = self._rows[slot]
        row.vain[proposer] = 0 if has_found else row.vain[proposer] + 1
        if row.vain[proposer] >= _MAX_VAIN:
            row.asked_from[proposer] = self._step + _VAIN_PAUSE

    def prices(self, num_rows: int) -> list[float]:
        """Return by proposer what one place of so many rows takes, in steps without guesses; 0: next to nothing, or
        that is not known.

        A proposer gains less than one that takes no time and is right less often by this.
        """
        prices = [0.0] * len(self._overall)
        if self._plain_seconds:
            for proposer, seconds_of in self._place_seconds.items():
                prices[proposer] = (seconds_of(num_rows) or 0.0) / self._plain_seconds
        return prices

    def note_verified(self, slot: int, proposer: int, drafted: int, accepted: int) -> None:
        """Take in how many of a proposer's guesses for a row were verified in a step, and how many were right."""
        row, looked_at = self._faded(slot), min(accepted + 1, drafted)
        row.tried[proposer] = row.tried[proposer] * (1 - _RATE_WEIGHT) + looked_at
        row.accepted[proposer] = row.accepted[proposer] * (1 - _RATE_WEIGHT) + accepted
        self._overall[proposer] += _OVERALL_WEIGHT * (accepted / looked_at - self._overall[proposer])

    def rates(self, slot: int) -> list[float]:
        """Return by proposer the chance that its next guess for a row is right, if all before it are."""
        row = self._faded(slot)
        return [
            min((accepted + _PRIOR_GUESSES * overall) / (tried + _PRIOR_GUESSES), _MAX_RATE)
            for accepted, tried, overall in zip(row.accepted, row.tried, self._overall, strict=True)
        ]

    def hopes(self, slot: int) -> list[float]:
        """Return the same, and 0 for a proposer that has found no guess for the row for long, or lacks its states."""
        asked_from = self._rows[slot].asked_from
        rates = self.rates(slot)
        hopes = [rate if step <= self._step else 0.0 for rate, step in zip(rates, asked_from, strict=True)]
        if not self.keeps_states:
            for proposer in self._state_readers:
                hopes[proposer] = 0.0
        return hopes

    def hopes_of(self, slots: Sequence[int], least: float) -> tuple[list[list[float]], bool]:
        """Return the hopes of each row, and whether they are those of trials.

        Where no row hopes for as much as guesses need, they are tried as long as the account allows: a row then counts
        as if all that is not known of its guesses were right, and should have one at most. So good ones are found out
        where those of which nothing is known are not worth their time, as with many rows.

        Args:
            least: As of `least_chance`.
        """
        hopes = [self.hopes(slot) for slot in slots]
        if max(map(max, hopes)) >= least or self._balance <= -_MAX_LOSS_OF_TRIALS:
            return hopes, False
        return [self._hopes_of_trials(slot, own) for slot, own in zip(slots, hopes, strict=True)], True

    def _hopes_of_trials(self, slot: int, hopes: Sequence[float]) -> list[float]:
        row = self._rows[slot]
        return [
            min((accepted + _PRIOR_GUESSES) / (tried + _PRIOR_GUESSES), _MAX_RATE) if hope else 0.0
            for accepted, tried, hope in zip(row.accepted, row.tried, hopes, strict=True)
        ]

    def note_step(self, num_rows: int, num_guesses: int, num_tokens: int, seconds: float | None) -> None:
        """Take in what a step has brought.

        Args:
            num_tokens: What its rows have got, all together.
            seconds: Its time; None if prompts are part of it.
        """
        size = num_rows + num_guesses
        if seconds is not None:
            self.costs.note(size, seconds)
        if (estimates := self.costs.estimate(num_rows, num_guesses + 1)) is None:
            return
        plain, took = estimates[0], estimates[-1]
        self._plain_seconds = plain
        if seconds is not None and not self.costs.knows(size):
            took = max(took, seconds)
        # as steps without guesses; more is the fault of what else runs
        num_steps = min(took / plain, size / num_rows)
        gained = num_tokens / num_rows - num_steps if num_guesses else 0.0
        self._gain(gained + _LOSS_SHARE * num_steps)

    def note_search(self, num_rows: int, seconds: float, model_seconds: float = 0.0) -> None:
        """Take in how long proposers have looked for guesses for a step of so many rows.

        Args:
            seconds: The time of look-ups. More than that of a step is the fault of what else runs.
            model_seconds: The time of models that guess.
        """
        if (estimates := self.costs.estimate(num_rows, 1)) is not None:
            self._gain(-min(seconds / estimates[0], 1.0) - model_seconds / estimates[0])

    def note_keeping(self, num_tokens: int, seconds: float, num_rested: int) -> None:
        """Take in how long it took to keep the states of a step's tokens for proposers.

        Args:
            num_rested: Steps before this one in which it took as long, of which nothing was noted.
        """
        self._keeping_costs.pass_to(self._step)
        self._keeping_costs.note(num_tokens, seconds)
        if (kept := self._keeping_costs.estimate(num_tokens, 1)) is not None and self._plain_seconds:
            self._gain(-(1 + num_rested) * kept[0] / self._plain_seconds)

    def _gain(self, num_steps: float) -> None:
        """Take in what was gained, in steps without guesses; below 0: lost."""
        self._balance = max(self._balance + num_steps, -_MAX_LOSS - _MAX_DEBT)
        if self._balance < -_MAX_LOSS:
            self.keeps_states = False
        elif self._balance >= _LEAST_FOR_STATES - _MAX_LOSS:
            self.keeps_states = True
        if (surplus := self._balance - _MAX_CREDIT) > 0:
            self._balance -= surplus
            self._reading_balance = min(self._reading_balance + surplus, _MAX_READING)

    def reading_seconds(self) -> float | None:
        """Return how long models may read texts before the next step; None: that is not known yet."""
        if not self._plain_seconds:
            return None
        left = self._reading_balance + _MAX_READING
        return max(min(_READING_SHARE, left), 0.0) * self._plain_seconds

    def note_reading(self, seconds: float) -> None:
        """Take in how long a model has read texts."""
        if self._plain_seconds:
            left = self._reading_balance - seconds / self._plain_seconds
            self._reading_balance = max(left, -_MAX_READING - _MAX_DEBT)

    def least_chance(self, num_rows: int, num_positions: int, most: int) -> float:
        """Return the chance of being right below which no guess gains; above 1: none does, or may lose any more.

        Arguments as of `allot`.
        """
        seconds = self.costs.estimate(num_positions, most + 1)
        if seconds is None or self._balance < -_MAX_LOSS:
            return _NEVER
        if self._num_looks != self.costs.num_looks:
            self._num_looks = self.costs.num_looks
            self._chances.clear()
        key = num_rows, num_positions, most
        if (found := self._chances.get(key)) is None:
            most = min(most, num_rows * self._max_guesses)
            least = _LEAST_GAIN * num_rows / seconds[0]
            needed = [(least * seconds[count] - num_rows) / count for count in range(1, most + 1)]
            found = self._chances[key] = min(needed, default=_NEVER)
        return found

    def needs_plain(self, num_positions: int) -> bool:
        """Return whether the next step must have no guesses, since what such a step takes is not known any more."""
        return not self.costs.knows(num_positions, MAX_PLAIN_AGE)

    def allot(
        self,
        rates: Sequence[float],
        found: Sequence[int] | None,
        num_positions: int,
        most: int,
        asked: Sequence[int] | None = None,
    ) -> list[int]:
        """Return how many guesses each row should have in the next step.

        Args:
            rates: By row: the chance that its next guess is right, if all before it are.
            found: By row: the most guesses that it may have; None: no row has fewer than others.
            num_positions: Positions of the step without guesses.
            most: Guesses of all rows together, at most.
            asked: By row: the proposer that will be asked for them, in time that counts, or `NO_PROPOSER`. A row has
                one guess of a model until its time is known. None: they are there.
        """
        counts, seconds = [0] * len(rates), self.costs.estimate(num_positions, most + 1)
        if seconds is None:
            return counts
        place_seconds = {} if asked is None else self._seconds_of(asked)
        gains: list[tuple[float, int]] = []
        for row, rate in enumerate(rates):
            gain, limit = 1.0, self._max_guesses if found is None else min(found[row], self._max_guesses)
            if asked is not None and place_seconds.get(asked[row], 0.0) is None:
                limit = min(limit, 1)
            for _ in range(limit):
                gain *= rate
                if gain < _LEAST_CHANCE:
                    break
                gains.append((gain, -row))
        gains.sort(reverse=True)
        searches = _search_seconds(gains, asked, place_seconds) if asked and place_seconds else repeat(0.0)
        num_tokens, best, num_kept = float(len(rates)), _LEAST_GAIN * len(rates) / seconds[0], 0
        for count, ((gain, _), duration, search) in enumerate(
            zip(gains, seconds[1:], searches, strict=False), 1
        ):
            num_tokens += gain
            if num_tokens > best * (duration + search):
                best, num_kept = num_tokens / (duration + search), count
        for _, row in gains[:num_kept]:
            counts[-row] += 1
        return counts

    def _seconds_of(self, asked: Sequence[int]) -> dict[int, float | None]:
        """Return what each of these proposers takes for one place of the rows that it is asked for, where it does."""
        return {
            proposer: seconds_of(asked.count(proposer))
            for proposer, seconds_of in self._place_seconds.items()
            if proposer in asked
        }

    def _faded(self, slot: int) -> _Row:
        """Return what is known of a row, as it has faded until this step."""
        row = self._rows[slot]
        if row.since < self._step:
            left = _FADING ** (self._step - row.since)
            row.tried = [count * left for count in row.tried]
            row.accepted = [count * left for count in row.accepted]
            row.since = self._step
        return row


def _search_seconds(
    gains: Sequence[tuple[float, int]], asked: Sequence[int], place_seconds: Mapping[int, float | None]
) -> Iterator[float]:
    """Yield what it takes to look for the first of these guesses, for the first two, …

    A model guesses for all of its rows at once, one place after the other.

    Args:
        gains: Of each guess its chance and the negative number of its row. Those of a row are in the order of places.
    """
    row_to_places: defaultdict[int, int] = defaultdict(int)
    num_places: defaultdict[int, int] = defaultdict(int)
    total = 0.0
    for _, negative_row in gains:
        row_to_places[negative_row] += 1
        proposer = asked[-negative_row]
        if row_to_places[negative_row] > num_places[proposer]:
            num_places[proposer] += 1
            total += place_seconds.get(proposer) or 0.0
        yield total
