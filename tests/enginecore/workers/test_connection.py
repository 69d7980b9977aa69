"""Losses of a worker, and which of them count as crashes of the requests in flight."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.helpers.stack import NaiveRunner, make_config
from triptych.errors import EngineUnavailable, HandshakeMismatch
from triptych.rpc.session import dialer
from triptych_services.enginecore.workers import connection as connection_module
from triptych_services.enginecore.workers.base import Connected, WorkerGone, WorkerLost
from triptych_services.enginecore.workers.connection import Recovery, WorkerConnection

FACTS = NaiveRunner(make_config()).facts


class ScriptedExecutor:
    """Answers each dial with the next welcome or error; a welcome of boot id `x@y` is at address `y`."""

    address = ""

    def __init__(self, *answers: Connected | Exception) -> None:
        self._answers = list(answers)

    async def connect(self, on_event: object, *, resume: bool) -> Connected:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        _, _, self.address = answer.facts.boot_id.partition("@")
        return answer


def welcome(boot_id: str = "a", *, is_resumed: bool = False) -> Connected:
    return Connected(
        replace(FACTS, boot_id=boot_id), max_steps_in_flight=2, resume_ttl_s=10.0, is_resumed=is_resumed
    )


def recover(loss: WorkerLost, *welcomes: Connected | Exception, num_losses: int = 1) -> Recovery:
    """Return the recovery after the last of several losses in a row."""

    async def run() -> Recovery:
        connection = WorkerConnection(
            ScriptedExecutor(welcome(), *welcomes),  # type: ignore[arg-type]
            on_event=lambda: None,
            on_given_up=lambda: None,
            on_unreachable=lambda why: None,
        )
        await connection.connect()
        for _ in range(num_losses):
            recovery = await connection.recover(loss)
        return recovery

    return asyncio.run(run())


@pytest.mark.parametrize(("refused_s", "is_refused"), [(0.0, True), (3600.0, False)])
def test_a_mismatch_that_lasts_is_a_refusal_unless_another_answer_comes(
    refused_s, is_refused, monkeypatch
) -> None:
    monkeypatch.setattr(connection_module, "_REFUSED_S", refused_s)
    monkeypatch.setattr(dialer, "FIRST_REDIAL_S", 0.001)
    mismatch, loading = HandshakeMismatch("another model"), EngineUnavailable("the worker is loading (0%)")
    executor = ScriptedExecutor(mismatch, loading, mismatch, welcome(), mismatch, welcome(is_resumed=True))
    found: list[bool] = []

    async def run() -> None:
        connection = WorkerConnection(
            executor,  # type: ignore[arg-type]
            on_event=lambda: None,
            on_given_up=lambda: None,
            on_unreachable=lambda why: found.append(connection.is_refused),
        )
        await connection.connect()
        found.append(connection.is_refused)
        await connection.recover(WorkerLost("cut"))  # its session is still kept when the mismatch comes

    asyncio.run(run())
    assert found == [is_refused, False, is_refused, False, False]


def test_another_worker_means_a_crash() -> None:
    assert recover(WorkerLost("gone"), welcome("b")).is_crash
    assert recover(WorkerLost("it says so", is_crash=True), welcome()).is_crash


def test_a_worker_that_drained_has_not_crashed() -> None:
    assert not recover(WorkerLost("it drains", is_orderly=True), welcome("b")).is_crash


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_worker_that_lives_has_not_crashed(is_resumed) -> None:
    assert not recover(WorkerLost("cut"), welcome(is_resumed=is_resumed)).is_crash


def test_a_network_that_flaps_is_no_crash() -> None:
    resumed = [welcome(is_resumed=True)] * 3
    recovery = recover(WorkerLost("cut"), *resumed, welcome(), num_losses=4)
    assert not recovery.connected.is_resumed
    assert not recovery.is_crash


@pytest.mark.parametrize("has_died", [True, False])
def test_another_worker_of_a_pool_says_what_was_found_of_the_one_before(has_died) -> None:
    gone = WorkerGone("it does not listen", has_died=has_died)
    assert recover(WorkerLost("cut"), gone, welcome("b@other")).is_crash == has_died


def test_another_worker_after_silence_accuses_no_request() -> None:
    assert not recover(WorkerLost("cut"), welcome("b@other")).is_crash
