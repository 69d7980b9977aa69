"""When a client dials again, and when it gives its session up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.chaos.grounds.fake_time import in_fake_time
from triptych.errors import EngineUnavailable, HandshakeMismatch, StaleEpoch
from triptych.rpc.session.dialer import Dialer


@dataclass(frozen=True)
class Welcome:
    is_resumed: bool = False
    resume_ttl_s: float = 60.0


FRESH, RESUMED = Welcome(), Welcome(is_resumed=True)


@dataclass
class Client:
    """Answers each attempt with the next of a script: a welcome, an error, None for silence, or a late refusal after so
    many seconds."""

    script: Iterator[Welcome | Exception | float | None]
    failures: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)

    async def connect(self) -> Welcome:
        outcome = next(self.script)
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, float):
            await asyncio.sleep(outcome)
            outcome = EngineUnavailable("late")
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome


def make(*script: Welcome | Exception | float | None) -> tuple[Client, Dialer[Welcome]]:
    client = Client(iter(script))
    dialer = Dialer(
        client.connect,
        on_failed=lambda error: client.failures.append(str(error)),
        on_given_up=client.given_up.append,
        fatal=(StaleEpoch,),
    )
    return client, dialer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make sleeps instant on a clock that only they advance. Returns the list of their lengths in seconds."""
    delays: list[float] = []
    began_at = time.monotonic()

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr("triptych.rpc.session.dialer.asyncio.sleep", sleep)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda self: began_at + sum(delays))
    return delays


async def test_delays_double_from_50_ms_to_250_ms(clock: list[float]) -> None:
    client, dialer = make(*[EngineUnavailable("refused")] * 7, FRESH)
    assert await dialer.dial() is FRESH
    assert clock == [0.05, 0.1, 0.2, 0.25, 0.25, 0.25, 0.25]
    assert client.failures == ["refused"] * 7
    assert dialer.has_session


async def test_a_server_that_held_the_caller_is_dialed_again_at_once(clock: list[float]) -> None:
    loading = EngineUnavailable("loading")
    _, dialer = make(loading, loading, loading, 2.0, loading, FRESH)
    await dialer.dial()
    assert clock == [0.05, 0.1, 0.2, 2.0, 0.05, 0.1]


async def test_a_fatal_error_ends_the_dialing(clock: list[float]) -> None:
    _, dialer = make(HandshakeMismatch("not yet"), StaleEpoch("fenced"))
    with pytest.raises(StaleEpoch):
        await dialer.dial()


async def test_a_resumed_session_goes_on(clock: list[float]) -> None:
    client, dialer = make(FRESH, EngineUnavailable("refused"), RESUMED)
    await dialer.dial()
    dialer.note_broken("cut")
    assert await dialer.dial() is RESUMED
    assert client.given_up == []


async def test_a_session_that_the_server_forgot_is_given_up(clock: list[float]) -> None:
    client, dialer = make(FRESH, FRESH)
    await dialer.dial()
    dialer.note_broken("cut")
    await dialer.dial()
    (why,) = client.given_up
    assert "has not kept the session" in why
    assert dialer.has_session


async def test_four_streams_without_progress_end_the_session(clock: list[float]) -> None:
    client, dialer = make(FRESH, *[RESUMED] * 6, FRESH)
    await dialer.dial()
    for num_broken in range(1, 8):
        if num_broken == 4:
            dialer.note_progress()
        dialer.note_broken(f"cut {num_broken}")
        await dialer.dial()
    assert client.given_up == ["cut 7"]


async def test_streams_that_the_network_broke_are_not_counted(clock: list[float]) -> None:
    client, dialer = make(FRESH, *[RESUMED] * 6)
    await dialer.dial()
    for _ in range(6):
        dialer.note_broken("cut", is_futile=False)
        await dialer.dial()
    assert client.given_up == []


async def test_a_session_that_cannot_go_on_is_given_up_at_once() -> None:
    client, dialer = make(FRESH)
    await dialer.dial()
    dialer.note_broken("refused", is_over=True)
    dialer.note_broken("again", is_over=True)
    assert (client.given_up, dialer.has_session) == (["refused"], False)


async def test_a_time_to_live_of_0_ends_the_session_with_its_stream() -> None:
    client, dialer = make(Welcome(resume_ttl_s=0.0))
    await dialer.dial()
    dialer.note_broken("cut")
    assert client.given_up == ["cut"]


async def test_past_the_time_to_live_the_session_is_given_up(clock: list[float]) -> None:
    client, dialer = make(Welcome(resume_ttl_s=0.3), *[EngineUnavailable("refused")] * 5, FRESH)
    await dialer.dial()
    dialer.note_broken("cut")
    await dialer.dial()
    assert client.given_up == ["cut; not back within 0.3 s"]
    assert clock[:3] == [0.05, 0.1, pytest.approx(0.15)]


@in_fake_time
async def test_a_silent_server_does_not_outlast_the_time_to_live() -> None:
    client, dialer = make(Welcome(resume_ttl_s=0.05), None, FRESH)
    await dialer.dial()
    dialer.note_broken("cut")
    async with asyncio.timeout(60):
        assert await dialer.dial() is FRESH
    assert client.given_up == ["cut; not back within 0.05 s"]
    assert client.failures == ["no answer within 0.05 s"]
