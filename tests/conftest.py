"""What holds for every test."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

# A shell that starts us in the background has SIGINT ignored, which children inherit; tests send it to both.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _the_log_is_as_it_was() -> Iterator[None]:
    """A test that runs a service's main sends the process's log elsewhere; the next test must not find it there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
