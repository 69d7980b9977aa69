"""Fixtures of every test."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell that starts us in the background has SIGINT ignored, which children inherit; tests send it to both.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes of pytest-xdist share the cores, and torch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    _num_threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_threads))

# Read when a Triton kernel is defined, so before any test imports one; tools/test_gpu.py knows that there is a device.
if "TRITON_INTERPRET" not in os.environ and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

with contextlib.suppress(ModuleNotFoundError):  # a machine with a GPU may have none; its tests need none
    import hypothesis

    # No test depends on the time that it takes: machines are busy.
    hypothesis.settings.register_profile(
        "triptych", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("triptych")


LONGEST_FILES = (
    "oracle/test_greedy_tokens.py",
    "e2e/test_stack.py",
    "kernels/triton/test_compiles.py",
    "oracle/test_logprobs.py",
    "kernels/triton/test_paged_attention.py",
    "kernels/ops/test_sample.py",
    "benchmarks/test_gpu.py",
)
"""Files that take longer than 15 s, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files where processes share the tests, so that they end at about the same time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _the_log_is_as_it_was() -> Iterator[None]:
    """A test that runs a service's main sends the process's log elsewhere; the next test must not find it there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
