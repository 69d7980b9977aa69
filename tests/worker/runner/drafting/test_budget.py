"""How many guesses a step has, by made-up costs of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych_services.worker.runner.drafting.budget import NO_PROPOSER, GuessBudget, PlaceSeconds
from triptych_services.worker.runner.drafting.costs import StepCosts

Q4 = {1: 3.0, 2: 3.4, 4: 4.4, 8: 6.2, 16: 10.5, 32: 19.0, 64: 37.0, 128: 73.0}
"""Positions of a step -> its milliseconds, of a model with 4 bits per weight on a CPU."""
BF16 = {1: 7.6, 8: 9.8, 32: 21.0, 64: 40.0, 128: 80.0}


def budget_of(
    costs: dict[int, float], num_rows: int, rate: float, place_seconds: PlaceSeconds | None = None
) -> GuessBudget:
    """Return a budget that has seen such steps, and guesses of each row that were right at this rate.

    Args:
        place_seconds: Those of the first proposer; None: its time does not grow with places.
    """
    timed = None if place_seconds is None else {0: place_seconds}
    budget = GuessBudget(max_num_seqs=64, num_proposers=2, max_guesses=8, place_seconds=timed)
    for size, milliseconds in costs.items():
        for _ in range(3):
            budget.costs.note(size, milliseconds * 1e-3)
    for slot in range(num_rows):
        budget.enter(slot)
        for _ in range(40):
            # Guesses of a row are looked at up to the first wrong one.
            budget.note_verified(slot, 0, 10, round(10 * rate))
    return budget


def allotted(costs: dict[int, float], num_rows: int, rate: float) -> list[int]:
    return allot(budget_of(costs, num_rows, rate), num_rows)


def allot(budget: GuessBudget, num_rows: int, most: int = 64) -> list[int]:
    """Return the guesses of rows that the first proposer finds as many for as are wanted."""
    rates = [budget.rates(slot)[0] for slot in range(num_rows)]
    counts = budget.allot(rates, None, num_rows, most)
    least = budget.least_chance(num_rows, num_rows, most)
    assert least <= max(rates) or not any(counts), "none of those that are worth it is left out"
    return counts if least <= 1 else [0] * num_rows


def speed(costs: dict[int, float], rate: float, counts: list[int]) -> float:
    """Return the expected tokens per second of a step in which rows have so many guesses."""
    tokens = sum(rate**place for count in counts for place in range(count + 1))
    return float(tokens / np.interp(len(counts) + sum(counts), list(costs), list(costs.values())))


@pytest.mark.parametrize("costs", [Q4, BF16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 0.9])
def test_no_equal_number_of_guesses_is_faster(costs: dict[int, float], num_rows: int, share: float) -> None:
    budget = budget_of(costs, num_rows, share)
    counts = allot(budget, num_rows)
    rate = budget.rates(0)[0]
    best = max(speed(costs, rate, [count] * num_rows) for count in range(9) if count * num_rows <= 64)
    assert speed(costs, rate, counts) > best / 1.021


@pytest.mark.parametrize("costs", [Q4, BF16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("share", [0.03, 0.1, 0.3])
def test_no_equal_number_of_guesses_of_a_model_is_faster(
    costs: dict[int, float], num_rows: int, rate: float, share: float
) -> None:
    """The model that guesses takes a share of the step of one row for a place, and a tenth of that for each row."""

    def place_seconds(num_rows: int) -> float:
        return 1e-3 * costs[1] * share * (0.9 + 0.1 * num_rows)

    budget = budget_of(costs, num_rows, rate, place_seconds)
    rates = [budget.rates(slot)[0] for slot in range(num_rows)]
    counts = budget.allot(rates, None, num_rows, 64, [0] * num_rows)

    def speed_with(counts: list[int]) -> float:
        seconds = 1e-3 * float(
            np.interp(num_rows + sum(counts), list(costs), list(costs.values()))
        ) + place_seconds(num_rows) * max(counts)
        return sum(rates[0] ** place for count in counts for place in range(count + 1)) / seconds

    best = max(speed_with([count] * num_rows) for count in range(9))
    assert speed_with(counts) > best / 1.021
    found = budget.allot(rates, [8] * num_rows, num_rows, 64)
    assert sum(found) >= sum(counts), "what has been looked for has cost what it costs"


def test_a_model_that_takes_as_long_as_a_step_has_no_guess_worth_asking_for() -> None:
    budget = budget_of(BF16, 1, 0.9, lambda num_rows: 1e-3 * BF16[1])
    assert budget.allot([0.98], None, 1, 64, [0]) == [0]
    assert budget.allot([0.98], None, 1, 64, [1])[0] > 4
    budget.note_step(1, 0, 1, 1e-3 * BF16[1])
    assert budget.prices(1) == [pytest.approx(1.0), 0.0]


def test_a_model_of_which_no_time_is_known_is_asked_for_one_guess() -> None:
    budget = budget_of(BF16, 3, 0.9, lambda num_rows: None)
    assert budget.allot([0.9, 0.9, 0.0], None, 3, 64, [0, 0, NO_PROPOSER]) == [1, 1, 0]
    budget.note_step(3, 0, 3, 1e-3 * BF16[1])
    assert budget.prices(2) == [0.0, 0.0]


def test_full_batches_and_wrong_guesses_have_none() -> None:
    assert allotted(Q4, 64, 0.5) == [0] * 64
    assert allotted(Q4, 1, 0.0) == [0]
    assert allotted(BF16, 8, 0.0) == [0] * 8


def test_one_stream_of_right_guesses_has_all() -> None:
    assert allotted(BF16, 1, 1.0) == [8]
    assert allotted(Q4, 1, 1.0)[0] >= 5


def test_the_better_rows_have_more() -> None:
    budget = budget_of(Q4, 4, 0.9)
    for _ in range(30):
        budget.note_verified(2, 0, drafted=5, accepted=0)
    counts = allot(budget, 4)
    assert counts[2] == 0
    assert min(counts[0], counts[1], counts[3]) >= 2


def test_the_sum_is_bounded() -> None:
    budget = budget_of(BF16, 8, 1.0)
    assert sum(allot(budget, 8, most=5)) <= 5
    assert allot(budget, 8, most=0) == [0] * 8


def test_nothing_is_guessed_before_anything_is_measured() -> None:
    budget = GuessBudget(4, 1, 8)
    assert budget.least_chance(2, 2, 64) > 1
    assert budget.allot([0.9, 0.9], None, 2, 64) == [0, 0]


def test_rows_with_fewer_guesses_leave_them_to_others() -> None:
    budget = budget_of(BF16, 3, 1.0)
    counts = budget.allot([0.9, 0.9, 0.0], [2, 8, 8], 3, 64)
    assert counts[0] == 2
    assert counts[1] > 2
    assert counts[2] == 0


def test_proposers_that_find_nothing_are_hoped_for_rarely() -> None:
    budget = budget_of(Q4, 1, 0.5)
    num_asked = 0
    for _ in range(2000):
        budget.start_step()
        if budget.hopes(0)[1]:
            num_asked += 1
            budget.note_searched(0, 1, has_found=False)
    assert 100 <= num_asked <= 150
    while not budget.hopes(0)[1]:
        budget.start_step()
    budget.note_searched(0, 1, has_found=True)
    budget.note_searched(0, 1, has_found=False)
    assert budget.hopes(0) == budget.rates(0)
    budget.enter(0)
    assert all(budget.hopes(0))


def test_bad_guesses_are_tried_again_later() -> None:
    budget = budget_of(Q4, 1, 0.0)
    num_tries = 0
    for _ in range(2000):
        budget.start_step()
        if (count := allot(budget, 1)[0]) > 0:
            num_tries += 1
            budget.note_verified(0, 0, drafted=count, accepted=0)
    assert 5 <= num_tries <= 100, "often enough to notice that a text has changed, and nearly for nothing"


def note(costs: StepCosts, size: int, *seconds: float) -> None:
    for each in seconds:
        costs.note(size, each)


def estimates(costs: StepCosts, *sizes: int) -> list[float]:
    found = [costs.estimate(size, 1) for size in sizes]
    return [float(seconds[0]) for seconds in found if seconds is not None]


def test_costs_grow_with_size_and_follow_the_latest_steps() -> None:
    costs = StepCosts()
    assert costs.estimate(1, 9) is None
    for size, seconds in ((1, 3.0), (4, 2.0), (8, 6.0)):
        note(costs, size, *[seconds] * 3)
    assert estimates(costs, 1, 4, 6, 8, 99) == [2.0, 2.0, 4.0, 6.0, 6.0]
    assert costs.estimate(4, 5) == [2.0, 3.0, 4.0, 5.0, 6.0]
    note(costs, 8, *[10.0] * 13)
    assert estimates(costs, 8) == [10.0]


def test_single_slow_steps_say_nothing() -> None:
    """The first steps of a size included: it is tried until it was measured several times."""
    costs = StepCosts()
    note(costs, 1, *[3.0] * 3)
    note(costs, 8, 100.0, 90.0)
    assert estimates(costs, 8) == [3.0]
    note(costs, 8, 6.0, 80.0)
    assert estimates(costs, 8) == [6.0]
    note(costs, 1, *[50.0] * 4)
    assert estimates(costs, 1) == [3.0]


def test_a_measurement_is_doubted_after_a_while() -> None:
    costs = StepCosts()
    note(costs, 8, *[100.0] * 3)  # a bad moment
    note(costs, 1, *[3.0] * 900)
    assert estimates(costs, 8) == [100.0]
    note(costs, 1, *[3.0] * 120)
    assert estimates(costs, 8) == [3.0]
    note(costs, 8, 6.0)
    note(costs, 1, *[3.0] * 10)
    assert estimates(costs, 8) == [6.0]


LOSS_SHARE, MOST_LOST = 0.005, 8
"""The time that guesses may lose: its share of that of steps, and steps without guesses."""


class Decoding:
    """Steps of some rows with made-up costs, in which a budget decides. One proposer always has guesses."""

    def __init__(
        self,
        cost: Callable[[int], float],
        num_rows: int,
        max_guesses: int = 8,
        place_cost: Callable[[int], float] = lambda num_rows: 0.0,
        keep_s: float = 0.0,
    ) -> None:
        """
        Args:
            cost: Positions of a step -> its seconds.
            place_cost: Rows -> the seconds that the proposer takes for each place ahead of them.
            keep_s: The seconds in which the states of a step are kept for it; 0: it reads none.
        """
        self.budget = GuessBudget(num_rows, 1, max_guesses, {0: place_cost}, {0} if keep_s else ())
        self.keep_s = keep_s
        self.cost, self.num_rows, self.place_cost = cost, num_rows, place_cost
        self.seconds = self.plain_seconds = 0.0
        """The time of all steps, and of those that would give the same tokens without guesses."""
        self.most_seconds = 0.0
        """The time of the longest step with its search."""
        self.num_guesses = 0
        self.rest = self.num_rested = 0
        for slot in range(num_rows):
            self.budget.enter(slot)

    def step(self, accept: Callable[[int, int], int], *, noise: float = 1.0, search_s: float = 0.0) -> None:
        """Verify what the budget has decided on.

        Args:
            accept: Slot and its guesses -> how many of them are right.
        """
        budget, slots = self.budget, range(self.num_rows)
        if self.num_rested < self.rest:
            self.num_rested += 1
            self.seconds += self.cost(self.num_rows) * noise + self.keep_s * budget.keeps_states
            self.plain_seconds += self.cost(self.num_rows)
            return
        counts = wanted = [0] * self.num_rows
        if (least := budget.least_chance(self.num_rows, self.num_rows, 64)) <= 1:
            of_rows, is_trial = budget.hopes_of(slots, least)
            hopes = [max(of_row) for of_row in of_rows]
            found = [1] * self.num_rows if is_trial else None
            if max(hopes) >= least:
                counts = wanted = budget.allot(hopes, found, self.num_rows, 64, [0] * self.num_rows)
            if budget.needs_plain(self.num_rows):
                counts = [0] * self.num_rows
            if any(counts):
                search_s += self.place_cost(sum(count > 0 for count in counts)) * max(counts)
        self.rest = 0 if any(wanted) else budget.rest()
        right = [accept(slot, count) if count else 0 for slot, count in enumerate(counts)]
        took = self.cost(self.num_rows + sum(counts)) * noise
        num_tokens = self.num_rows + sum(right)
        if any(counts):
            budget.note_search(self.num_rows, 0.0, search_s)
            self.seconds += search_s
        kept_s = self.keep_s * budget.keeps_states
        self.seconds += took + kept_s
        self.most_seconds = max(self.most_seconds, took + search_s + kept_s)
        self.plain_seconds += self.cost(self.num_rows) * num_tokens / self.num_rows
        self.num_guesses += sum(counts)
        budget.note_step(self.num_rows, sum(counts), num_tokens, took)
        if kept_s:
            budget.note_keeping(self.num_rows, kept_s, self.num_rested)
        budget.start_step(self.num_rested)
        self.num_rested = 0
        for slot, count in enumerate(counts):
            if count:
                budget.note_verified(slot, 0, count, right[slot])

    @property
    def most_lost(self) -> float:
        """Seconds that all guesses together may have lost: the account is looked at before a step, not within it, and
        not where it rests, in which states are kept all the same."""
        at_once = self.most_seconds + 31 * self.keep_s
        return LOSS_SHARE * self.seconds + MOST_LOST * self.cost(self.num_rows) + at_once


@pytest.mark.thorough
@settings(max_examples=60)
@given(
    base=st.floats(0.5, 20.0),
    slope=st.floats(0.01, 2.0),
    num_rows=st.integers(1, 2),
    search=st.floats(0.0, 3.0),
    place=st.floats(0.0, 1.5),
    keep=st.sampled_from([0.0, 0.01, 0.05]),
    phases=st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 1.0)), min_size=1, max_size=6),
    random=st.randoms(use_true_random=False),
)
def test_no_proposer_loses_more_than_the_account_allows(
    base: float,
    slope: float,
    num_rows: int,
    search: float,
    place: float,
    keep: float,
    phases: list[tuple[int, float]],
    random: Random,
) -> None:
    """The proposer is right at any rate that changes, and takes any time, for a place and beside that."""
    cost = lambda size: 1e-3 * (base + slope * size)  # noqa: E731
    decoding = Decoding(
        cost, num_rows, place_cost=lambda rows: place * cost(rows), keep_s=keep * cost(num_rows)
    )

    def chance_of(rate: float) -> Callable[[int, int], int]:
        return lambda slot, count: next((n for n in range(count) if random.random() >= rate), count)

    for num_steps, rate in phases:
        for _ in range(num_steps):
            decoding.step(chance_of(rate), search_s=search * decoding.cost(num_rows))
            assert decoding.seconds - decoding.plain_seconds <= decoding.most_lost


@pytest.mark.parametrize("costs", [Q4, BF16])
def test_a_proposer_that_turns_wrong_whenever_it_is_trusted_loses_no_more(costs: dict[int, float]) -> None:
    """It is right until guesses are many, and wrong from then on until there are few."""
    decoding = Decoding(lambda size: float(np.interp(size, list(costs), list(costs.values()))), 1)
    is_right = True

    def accept(slot: int, count: int) -> int:
        nonlocal is_right
        is_right = count < 6 if is_right else count == 1
        return count if is_right else 0

    for _ in range(3000):
        decoding.step(accept)
        assert decoding.seconds - decoding.plain_seconds <= decoding.most_lost
    assert decoding.num_guesses > 0


def test_right_guesses_are_found_out_where_unknown_ones_do_not_pay() -> None:
    """A guess of which nothing is known counts as right in half of the cases, and here that is not enough."""
    cost = lambda size: float(np.interp(size, list(Q4), list(Q4.values())))  # noqa: E731
    right, wrong = Decoding(cost, 12), Decoding(cost, 12)
    for _ in range(600):
        right.step(lambda slot, count: count)
        wrong.step(lambda slot, count: 0)
        assert wrong.seconds - wrong.plain_seconds <= wrong.most_lost
    least = wrong.budget.least_chance(12, 12, 64)
    assert least > 0.5, "they do not pay"
    assert right.plain_seconds > 1.1 * right.seconds
    assert 0 < wrong.num_guesses < 12 * 60
    rest = wrong.num_guesses
    for _ in range(600):
        wrong.step(lambda slot, count: count)
    assert wrong.num_guesses > rest + 600, "bad ones are tried again"


@pytest.mark.parametrize("costs", [Q4, BF16])
@pytest.mark.parametrize("num_rows", [1, 4, 12, 64])
@pytest.mark.parametrize("place", [0.0, 0.1, 0.3])
def test_a_proposer_that_is_always_wrong_costs_two_percent(
    costs: dict[int, float], num_rows: int, place: float
) -> None:
    """A place takes this share of a step, beside what the search takes anyway."""
    cost = lambda size: float(np.interp(size, list(costs), list(costs.values())))  # noqa: E731
    decoding = Decoding(cost, num_rows, place_cost=lambda rows: place * cost(rows))
    for _ in range(1500):
        decoding.step(lambda slot, count: 0, search_s=0.05)
    assert decoding.seconds / decoding.plain_seconds < 1.02
    assert decoding.num_guesses > 0, "it is tried"


@pytest.mark.parametrize("keep", [0.002, 0.02])
def test_kept_states_are_part_of_what_wrong_guesses_lose(keep: float) -> None:
    """Once it is used up, none are kept for a while; then guesses are tried again. Those of right ones are kept on."""

    def decoding_of() -> Decoding:
        return Decoding(lambda size: float(np.interp(size, list(Q4), list(Q4.values()))), 1, keep_s=3 * keep)

    decoding, num_kept = decoding_of(), 0
    for _ in range(6000):
        decoding.step(lambda slot, count: 0)
        assert decoding.seconds - decoding.plain_seconds <= decoding.most_lost
        num_kept += decoding.budget.keeps_states
    assert 500 < num_kept < 6000
    before = decoding.num_guesses
    for _ in range(3000):
        decoding.step(lambda slot, count: 0)
    assert decoding.num_guesses > before, "it is tried"
    decoding = decoding_of()
    for _ in range(500):
        decoding.step(lambda slot, count: count)
        assert decoding.budget.keeps_states
    assert decoding.plain_seconds > 2 * decoding.seconds


@pytest.mark.parametrize("costs", [Q4, BF16])
@pytest.mark.parametrize("rate", [0.6, 0.8, 0.95])
def test_the_account_takes_nothing_from_good_guesses(costs: dict[int, float], rate: float) -> None:
    """A machine that is disturbed at random, and a step without guesses in 64."""
    random = Random(3)
    decoding = Decoding(lambda size: float(np.interp(size, list(costs), list(costs.values()))), 1)
    for _ in range(1500):
        noise = 1 + random.expovariate(8)
        decoding.step(
            lambda slot, count: next((n for n in range(count) if random.random() >= rate), count),
            noise=noise,
        )
    best = max(speed(costs, rate, [count]) for count in range(9)) / speed(costs, rate, [0])
    gain = decoding.plain_seconds / (decoding.seconds / (1 + 1 / 8))
    assert gain > 1 + 0.85 * (best - 1)


def test_a_slow_moment_of_the_machine_decides_for_a_hundred_steps_at_most() -> None:
    """Steps without guesses are measured while it lasts, so that guesses seem to gain whatever they are."""

    def steps(first: int, end: int) -> Iterator[None]:
        for number in range(first, end):
            decoding.step(lambda slot, count: 0, noise=3.0 if number < 3 else 1.0)
            yield

    decoding = Decoding(lambda size: float(np.interp(size, list(Q4), list(Q4.values()))), 1)
    for _ in steps(0, 100):
        pass
    before = decoding.num_guesses
    seconds, plain_seconds = decoding.seconds, decoding.plain_seconds
    for _ in steps(100, 600):
        pass
    assert decoding.seconds - seconds < 1.03 * (decoding.plain_seconds - plain_seconds)
    assert decoding.num_guesses - before < 60


def test_a_step_without_guesses_is_due_now_and_then() -> None:
    decoding = Decoding(lambda size: float(np.interp(size, list(BF16), list(BF16.values()))), 1)
    num_plain = 0
    for _ in range(1000):
        before = decoding.num_guesses
        decoding.step(lambda slot, count: count)
        num_plain += decoding.num_guesses == before
    assert 1000 / 65 - 1 <= num_plain <= 1000 / 65 + 5


def test_slow_moments_of_right_guesses_end_none() -> None:
    """As long as it is not measured anew, such a step takes as long as the steps that it saves, and no longer."""
    budget = GuessBudget(max_num_seqs=1, num_proposers=1, max_guesses=8)
    for _ in range(5):
        budget.note_step(1, 0, 1, 0.001)
    before = budget._balance
    for _ in range(3):  # it is known from then on
        budget.note_step(1, 1, 2, 0.02)
    assert before < budget._balance < before + 1
    assert budget.least_chance(1, 1, 8) > 1, "no guess is worth that"


MOST_SILENT, MOST_SILENT_WITH_STATES = 1100, 2000
"""Steps within which right guesses are made again, whatever has been before: what was measured is doubted after 1,000.
Until then states are kept in vain, which is earned again after that."""


def comes_again(decoding: Decoding) -> bool:
    """Return whether a few right guesses are made in so many steps."""
    before = decoding.num_guesses
    for _ in range(MOST_SILENT_WITH_STATES if decoding.keep_s else MOST_SILENT):
        decoding.step(lambda slot, count: count)
        if decoding.num_guesses >= before + 20:
            return True
    return False


@pytest.mark.parametrize("slows", ["steps", "searches", "both"])
def test_a_stall_ends_guesses_for_a_thousand_steps_at_most(slows: str) -> None:
    """Guesses are wrong during it, so that all that they may lose is lost, and steps of every size seem long."""
    decoding = Decoding(lambda size: float(np.interp(size, list(Q4), list(Q4.values()))), 1)
    for _ in range(100):
        decoding.step(lambda slot, count: count)
    for _ in range(100):
        decoding.step(
            lambda slot, count: 0,
            noise=1.0 if slows == "searches" else 20.0,
            search_s=0.0 if slows == "steps" else 300.0,
        )
    assert comes_again(decoding)


@pytest.mark.thorough
@settings(max_examples=30)
@given(
    base=st.floats(0.5, 8.0),
    slope=st.floats(0.01, 0.3),
    keep=st.sampled_from([0.0, 0.01, 0.05]),
    phases=st.lists(
        st.tuples(
            st.integers(1, 150),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.floats(1.0, 50.0),
            st.floats(0.0, 50.0),
            st.sampled_from([0.1, 0.5, 1.0]),
        ),
        max_size=5,
    ),
    is_right=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_what_a_machine_was_slow_at_has_an_end(
    base: float,
    slope: float,
    keep: float,
    phases: list[tuple[int, float, float, float, float]],
    is_right: bool,
    random: Random,
) -> None:
    """In each phase a share of steps and searches are slower. Then right guesses come again. Wrong ones lose little, as
    soon as a step without guesses is measured anew: what they seemed to gain before, and what they may lose anyway."""
    decoding = Decoding(
        lambda size: 1e-3 * (base + slope * base * size),
        1,
        place_cost=lambda rows: 5e-5 * base,
        keep_s=1e-3 * keep * base,
    )
    for num_steps, rate, slow_step, slow_search, share in phases:
        for _ in range(num_steps):
            decoding.step(
                lambda slot, count: next((n for n in range(count) if random.random() >= rate), count),  # noqa: B023
                noise=slow_step if random.random() < share else 1.0,
                search_s=slow_search * decoding.cost(1) if random.random() < share else 0.0,
            )
    if is_right:
        assert comes_again(decoding)
        return
    for _ in range(100):
        decoding.step(lambda slot, count: 0)
    seconds, plain_seconds = decoding.seconds, decoding.plain_seconds
    for _ in range(2000):
        decoding.step(lambda slot, count: 0)
    assert decoding.seconds - seconds < 1.02 * (decoding.plain_seconds - plain_seconds)
