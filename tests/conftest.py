"""What holds for every test."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell that starts us in the background has SIGINT ignored, which children inherit; tests send it to both.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Read when a Triton kernel is defined, so before any test imports one; tools/test_gpu.py knows that there is a device.
if "TRITON_INTERPRET" not in os.environ and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _the_log_is_as_it_was() -> Iterator[None]:
    """A test that runs a service's main sends the process's log elsewhere; the next test must not find it there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
