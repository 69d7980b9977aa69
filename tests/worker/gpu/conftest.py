"""Tests of the runner that need a CUDA device; `make test-gpu` runs them."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/worker/gpu/"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
