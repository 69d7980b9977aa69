"""Coroutines for callers that have no loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading

import pytest

from triptych.client.loop_thread import LoopThread


@pytest.fixture
def loop():
    made = LoopThread("test")
    yield made
    made.close()


def test_results_and_errors_come_back(loop):
    async def succeed():
        return 3

    async def fail():
        raise ValueError("no")

    async def cancel():
        raise asyncio.CancelledError

    assert loop.run(succeed()) == 3
    with pytest.raises(ValueError, match="no"):
        loop.run(fail())
    with pytest.raises(concurrent.futures.CancelledError):
        loop.run(cancel())


def test_an_interrupt_waits_for_the_coroutine_to_clean_up(loop):
    cleaned_up = threading.Event()

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned_up.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert cleaned_up.is_set()


def test_the_loops_own_thread_is_told_from_others(loop):
    async def ask():
        return loop.is_current()

    assert loop.run(ask())
    assert not loop.is_current()


def test_close_may_be_called_twice():
    loop = LoopThread("test")
    loop.close()
    loop.close()
