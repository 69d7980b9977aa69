"""Tests that need a CUDA device; `make test-gpu` runs them, and Triton's own, without network or installed packages.

Inputs are fresh in every run. A failure prints its seed; TRIPTYCH_TEST_SEED draws the same again.
"""

from __future__ import annotations

import os
import secrets

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Return the seed of torch's default generators."""
    seed = int(os.environ.get("TRIPTYCH_TEST_SEED") or secrets.randbelow(1 << 31))
    print(f"TRIPTYCH_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return seed
