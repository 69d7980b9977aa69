from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from triptych_services.worker.context.garbage import without_collection


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_it_was_even_after_an_error(was_enabled):
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with suppress(ZeroDivisionError), without_collection():
            inside = gc.isenabled()
            raise ZeroDivisionError
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert (inside, after) == (False, was_enabled)
