"""Counts what reference counts do not free."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[Counter[str]]:
    """Collect nothing meanwhile; then fill in what only the collector frees: name of each type, number of objects.

    Threads that earlier tests began may end meanwhile, and be among it: look for types that they have nothing of.
    """
    found = Counter[str]()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
