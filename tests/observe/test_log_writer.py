"""Buffered log lines: lost ones are counted, and writers do not wait for a slow reader."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

from triptych.observe.log_writer import BatchingHandler

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0


class Stream(StringIO):
    """A stream that counts its writes, and takes none or fails for as long as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_broken = False

    def write(self, text: str) -> int:
        assert self.may_write.wait(DEADLINE_S)
        if self.is_broken:
            raise BrokenPipeError
        self.num_writes += 1
        return super().write(text)

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def stream() -> Stream:
    return Stream()


def logger_of(handler: BatchingHandler) -> logging.Logger:
    log = logging.Logger("test")
    log.addHandler(handler)
    return log


@pytest.fixture
def log(stream: Stream) -> Iterator[logging.Logger]:
    log = logger_of(BatchingHandler(stream))
    yield log
    stream.may_write.set()


def is_taken(log: logging.Logger) -> bool:
    """Say whether the handler's thread has taken all lines, though it may not have written them."""
    (handler,) = log.handlers
    assert isinstance(handler, BatchingHandler)
    return not handler._queue


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def test_many_lines_are_few_writes_in_order(log: logging.Logger, stream: Stream) -> None:
    for number in range(2000):
        log.info("line %d", number)
    eventually(lambda: len(stream.lines) == 2000)
    assert stream.lines == [f"line {number}" for number in range(2000)]
    assert stream.num_writes < 500


def test_a_warning_is_written_before_the_call_returns_behind_what_was_logged(
    log: logging.Logger, stream: Stream
) -> None:
    log.info("first")
    log.warning("second")
    assert stream.lines == ["first", "second"]
    log.info("third")
    log.error("fourth")
    assert stream.lines == ["first", "second", "third", "fourth"]


def test_lines_of_many_threads_come_once_each(log: logging.Logger, stream: Stream) -> None:
    def talk(name: int) -> None:
        for number in range(200):
            log.log(logging.WARNING if number % 7 == 0 else logging.INFO, "%d-%d", name, number)

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(stream.lines) == 1600)
    for name in range(8):
        own = [line for line in stream.lines if line.startswith(f"{name}-")]
        assert own == [f"{name}-{number}" for number in range(200)]


@pytest.mark.parametrize("limits", [{"max_lines": 10}, {"max_characters": 80}])
def test_slow_reader_blocks_no_writer_and_is_told_of_lost_lines(
    stream: Stream, limits: dict[str, int]
) -> None:
    log = logger_of(BatchingHandler(stream, **limits))
    stream.may_write.clear()
    log.info("begin")
    eventually(lambda: is_taken(log))  # the thread is in its write
    for number in range(100):
        log.info("line %02d", number)  # 8 characters with its end
    stream.may_write.set()
    eventually(lambda: len(stream.lines) == 12)
    expected = ["begin", *(f"line {number:02}" for number in range(10))]
    assert stream.lines == [*expected, "90 log lines were dropped here: the log's reader is too slow"]
    log.info("later")
    eventually(lambda: stream.lines[-1] == "later")


def test_lines_that_a_broken_stream_has_not_taken_are_counted(log: logging.Logger, stream: Stream) -> None:
    stream.is_broken = True
    log.info("one")
    log.warning("two")
    stream.is_broken = False
    log.warning("three")
    assert stream.lines == ["three", "2 log lines were dropped here: the log's reader is too slow"]


def test_a_flush_writes_what_waits_and_gives_up_on_a_stream_that_takes_nothing(
    log: logging.Logger, stream: Stream
) -> None:
    log.info("first")
    log.handlers[0].flush()
    assert stream.lines == ["first"]
    stream.may_write.clear()
    log.info("second")
    eventually(lambda: is_taken(log))
    log.handlers[0].flush()
    assert stream.lines == ["first"]


@pytest.mark.parametrize("end", ["", "raise RuntimeError", "sys.exit(3)", "logging.shutdown(); os._exit(0)"])
def test_no_line_is_lost_at_the_end_of_a_process(end: str) -> None:
    program = f"""
import logging, os, sys
from triptych.config import LogConfig
from triptych.observe.logging import configure
configure(LogConfig(), "frontend", is_batched=True)
for number in range(500):
    logging.info("line %d", number)
{end}
"""
    sources = os.pathsep.join(str(ROOT / source) for source in ("libs", "kernels", "."))
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [
        line.rsplit(" ", 1)[1] for line in run.stderr.splitlines() if " line " in line and "Z INFO" in line
    ]
    assert found == [str(number) for number in range(500)]
