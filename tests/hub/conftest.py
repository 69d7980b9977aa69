from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    home = tmp_path / "cache"
    monkeypatch.setenv("TRIPTYCH_HOME", str(home))
    return home
