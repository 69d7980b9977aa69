"""Operators' calls at the engine core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from triptych.admin.v1 import admin_pb2
from triptych.types.facts import EngineStatus
from triptych_services.enginecore.frontends import servicer as servicer_module
from triptych_services.enginecore.frontends.servicer import AdminServicer


class CountedLooks:
    """An engine whose counters change at some looks at them only."""

    def __init__(self, changes_at: set[int]) -> None:
        """`changes_at`: The first look is number 1."""
        self.num_looks = self._num_changes = 0
        self._changes_at = changes_at
        self.welcome = SimpleNamespace(model=None)
        self.operator = self

    def status(self) -> EngineStatus:
        self.num_looks += 1
        self._num_changes += self.num_looks in self._changes_at
        return EngineStatus("e", True, "", num_running=self._num_changes)


@pytest.mark.parametrize(
    ("unchanged_interval_ms", "told_at"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        (2, [1, 2, 3, 4, 5, 6]),
        (8, [1, 3, 4, 6, 8, 9]),  # two looks after the last message, or at a change
        (4000, [1, 4, 9]),
    ],
)
async def test_unchanged_counters_are_told_rarely(
    unchanged_interval_ms: int | None, told_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer_module, "_MIN_INTERVAL_MS", 1)
    looks = CountedLooks({4, 9})
    servicer = AdminServicer(cast(Any, looks))
    request = admin_pb2.WatchStatusRequest(interval_ms=4, unchanged_interval_ms=unchanged_interval_ms)
    watched = servicer.WatchStatus(request, cast(Any, None))
    found = []
    for _ in told_at:
        response = await anext(watched)
        found.append(looks.num_looks)
        assert response.status.num_running == sum(look <= looks.num_looks for look in (4, 9))
    await watched.aclose()
    assert found == told_at
