"""Which request kills the workers: found in few crashes, and never an innocent one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.enginecore.crashes import CrashInquiry
from services.enginecore.request import Request, RequestState
from tests.helpers.scheduling import make_request

PROBATION = 32


def requests(count: int) -> list[Request]:
    return [make_request(number, [1, 2]) for number in range(count)]


def end(request: Request) -> None:
    request.state = RequestState.ENDED


def in_flight(inquiry: CrashInquiry, alive: Sequence[Request]) -> list[Request]:
    """Everybody who may run does."""
    inquiry.review()
    on_trial = inquiry.on_trial
    return [r for r in alive if r.state is not RequestState.ENDED and (on_trial is None or r in on_trial)]


def survive(inquiry: CrashInquiry, num_steps: int = PROBATION) -> None:
    for _ in range(num_steps):
        inquiry.note_step()


@given(count=st.integers(1, 70), culprit=st.integers(0, 69))
def test_the_one_that_kills_is_found_in_about_log2_crashes_and_nobody_else_fails(count, culprit) -> None:
    alive, inquiry = requests(count), CrashInquiry()
    poison = alive[culprit % count]
    for num_crashes in range(1, 100):
        while poison not in (group := in_flight(inquiry, alive)):
            assert group, "nobody may run"
            survive(inquiry)
        convicted = inquiry.note_crash(group)
        if convicted is not None:
            assert convicted is poison
            assert num_crashes <= 2 + math.ceil(math.log2(count))
            assert inquiry.on_trial is None
            return
    raise AssertionError("never found")


def test_a_single_crash_accuses_nobody() -> None:
    alive, inquiry = requests(1), CrashInquiry()
    for _ in range(5):
        assert inquiry.note_crash(alive) is None
        assert inquiry.on_trial is None
        survive(inquiry)
        assert not inquiry.is_open


def test_a_request_alone_at_two_crashes_is_the_one() -> None:
    alive, inquiry = requests(1), CrashInquiry()
    assert inquiry.note_crash(alive) is None
    survive(inquiry, PROBATION - 1)
    assert inquiry.note_crash(alive) is alive[0]


def test_the_only_one_common_to_two_crashes_is_tried_alone_before_it_is_convicted() -> None:
    (first, second, third), inquiry = requests(3), CrashInquiry()
    assert inquiry.note_crash([first, second]) is None
    assert inquiry.note_crash([second, third]) is None
    assert inquiry.on_trial == [second]
    survive(inquiry)
    assert inquiry.on_trial is None
    assert not inquiry.is_open


def test_crashes_of_different_requests_accuse_nobody() -> None:
    alive, inquiry = requests(4), CrashInquiry()
    assert inquiry.note_crash(alive[:2]) is None
    assert inquiry.note_crash(alive[2:]) is None
    assert inquiry.on_trial is None


def test_an_idle_workers_crash_changes_nothing() -> None:
    alive, inquiry = requests(2), CrashInquiry()
    assert inquiry.note_crash([]) is None
    assert not inquiry.is_open
    inquiry.note_crash(alive)
    inquiry.note_crash(alive)
    on_trial = inquiry.on_trial
    assert inquiry.note_crash([]) is None
    assert inquiry.on_trial == on_trial


@pytest.mark.parametrize("count", [2, 5])
def test_a_trial_whose_suspects_have_all_ended_is_over(count) -> None:
    alive, inquiry = requests(count), CrashInquiry()
    inquiry.note_crash(alive)
    inquiry.note_crash(alive)
    while inquiry.on_trial:
        for request in inquiry.on_trial:
            end(request)
        inquiry.review()
    assert all(request.state is RequestState.ENDED for request in alive)
    assert not inquiry.is_open
