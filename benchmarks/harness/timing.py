"""The clocks: wall time of a call, CPU time of this thread, and rounds that fill a given time."""

from __future__ import annotations

import time
from collections.abc import Callable

_MIN_ROUNDS, _MAX_ROUNDS = 5, 100


def wall_s(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread that one call takes."""
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def samples_s(work: Callable[[], object], num_rounds: int) -> tuple[float, ...]:
    """Return the seconds of each of several calls, after one that is not counted."""
    work()
    return tuple(wall_s(work) for _ in range(num_rounds))


def rounds_within(seconds: float, sample: Callable[[], float]) -> tuple[float, ...]:
    """Return samples, as many as fit into about `seconds`, but 5 to 100; a first one is not counted.

    Args:
        sample: Measures one round and returns the seconds that it took.
    """
    first_s = sample()
    num_rounds = min(max(int(seconds / max(first_s, 1e-9)), _MIN_ROUNDS), _MAX_ROUNDS)
    return tuple(sample() for _ in range(num_rounds))
