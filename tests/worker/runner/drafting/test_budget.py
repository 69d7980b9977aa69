"""How many guesses a step has, by made-up costs of steps."""

from __future__ import annotations

import numpy as np
import pytest

from triptych_services.worker.runner.drafting.budget import GuessBudget, StepCosts

Q4 = {1: 3.0, 2: 3.4, 4: 4.4, 8: 6.2, 16: 10.5, 32: 19.0, 64: 37.0, 128: 73.0}
"""Positions of a step -> its milliseconds, of a model with 4 bits per weight on a CPU."""
BF16 = {1: 7.6, 8: 9.8, 32: 21.0, 64: 40.0, 128: 80.0}


def budget_of(costs: dict[int, float], num_rows: int, rate: float) -> GuessBudget:
    """Return a budget that has seen such steps, and guesses of each row that were right at this rate."""
    budget = GuessBudget(max_num_seqs=64, num_proposers=2, max_guesses=8)
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
    if not budget.may_gain(num_rows, num_rows, most):
        return [0] * num_rows
    return budget.allot([budget.rates(slot)[0] for slot in range(num_rows)], None, num_rows, most)


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
    assert not budget.may_gain(2, 2, 64)
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
