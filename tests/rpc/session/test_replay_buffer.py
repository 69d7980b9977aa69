"""Sequence numbers: what is kept, what is repeated, what is missing."""

from __future__ import annotations

import random

import pytest

from triptych.errors import ProtocolViolation, SequenceGap
from triptych.rpc.session.replay_buffer import ReplayBuffer, is_repeated


def filled(num_messages: int, **limits: int) -> ReplayBuffer[str]:
    buffer: ReplayBuffer[str] = ReplayBuffer(**limits)
    for number in range(1, num_messages + 1):
        assert buffer.append(f"m{number}", num_bytes=number) == number
    return buffer


def test_confirmed_messages_are_forgotten() -> None:
    buffer = filled(4)
    assert buffer.confirm(3) == ["m1", "m2", "m3"]
    assert (len(buffer), buffer.num_bytes, buffer.after(0), buffer.get(4)) == (1, 4, ["m4"], "m4")
    assert buffer.confirm(2) == ()


def test_unsent_message_cannot_be_confirmed() -> None:
    buffer = filled(4)
    with pytest.raises(ProtocolViolation, match="message 5 is said to have arrived, but only 4 were sent"):
        buffer.confirm(5)
    assert buffer.after(0) == ["m1", "m2", "m3", "m4"]


def test_replay_is_possible_behind_what_was_confirmed() -> None:
    buffer = filled(4)
    buffer.confirm(2)
    assert [buffer.can_replay_after(number) for number in range(6)] == [False] * 2 + [True] * 3 + [False]
    assert buffer.after(3) == ["m4"]
    buffer.check_received(2)
    with pytest.raises(ProtocolViolation, match="message 1 is said to be the last one received, but 2"):
        buffer.check_received(1)
    with pytest.raises(ProtocolViolation, match="only 4 were sent"):
        buffer.check_received(5)


def test_bounds_in_messages_and_bytes() -> None:
    assert not filled(2, max_messages=3).is_full
    assert filled(3, max_messages=3).is_full
    assert not filled(3, max_bytes=6).is_full
    full = filled(4, max_bytes=6)
    assert full.is_full
    full.confirm(3)
    assert not full.is_full


def test_cleared_numbers_stay_used() -> None:
    buffer = filled(4)
    buffer.clear()
    assert (len(buffer), buffer.num_bytes, buffer.append("m5")) == (0, 0, 5)
    assert not buffer.can_replay_after(3)


def test_random_use_matches_a_list() -> None:
    rng = random.Random(7)
    buffer: ReplayBuffer[int] = ReplayBuffer()
    naive: list[int] = []
    num_confirmed = 0
    for _ in range(2000):
        if rng.random() < 0.6:
            naive.append(buffer.append(len(naive) + 1, num_bytes=3))
        else:
            num_confirmed = max(num_confirmed, rng.randint(0, len(naive)))
            buffer.confirm(num_confirmed)
        number = rng.randint(num_confirmed, len(naive))
        assert buffer.after(number) == naive[number:]
        assert buffer.num_bytes == 3 * (len(naive) - num_confirmed)


def test_received_messages_are_new_repeated_or_out_of_order() -> None:
    assert not is_repeated(4, 3, "step")
    assert is_repeated(3, 3, "step")
    assert is_repeated(1, 3, "step")
    with pytest.raises(SequenceGap, match="step 5 after 3"):
        is_repeated(5, 3, "step")
