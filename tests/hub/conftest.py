from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.gguf_files import use_own_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    home = tmp_path / "cache"
    use_own_cache(monkeypatch, home)
    return home
