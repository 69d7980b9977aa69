"""Collects garbage in small pieces while requests are served, and all of it only while there are none.

A full collection looks at every object that is alive, and nothing else runs meanwhile: 0.1 s with 10,000 requests.
Objects of a request refer to each other in one direction only, so they are freed without the collector. What is left
to it are mistakes, exceptions and libraries.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

THRESHOLDS = (5_000, 10, 200)
"""Those of `gc.set_threshold`. A young collection looks at 5,000 new objects, the next older at 50,000 (some ms). By
itself Python collects everything only after 10 million objects that stayed: a bound on memory, should there never be
a moment without requests."""

_INTERVAL_S = 2.0


def freeze() -> None:
    """Leave out everything that lives now from all collections, and collect rarely from now on.

    Called when a process has loaded what lives as long as it does.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


async def collect_when_idle(is_idle: Callable[[], bool], *, interval_s: float = _INTERVAL_S) -> None:
    """Collect all garbage whenever no request is served at two looks in a row, if there may be any. Runs for ever.

    Args:
        is_idle: Whether nothing waits for this process.
        interval_s: Time between two looks.
    """
    was_idle, num_before = False, _num_partial_collections()
    while True:
        await asyncio.sleep(interval_s)
        was_idle, may_collect = is_idle(), was_idle
        if was_idle and may_collect and _num_partial_collections() != num_before:
            gc.collect()
            num_before = _num_partial_collections()


def _num_partial_collections() -> int:
    """Return the number of collections of young objects. Where it stays the same, few objects are new."""
    young, middle, _ = gc.get_stats()
    return int(young["collections"] + middle["collections"])
