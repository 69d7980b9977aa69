"""Fixtures for tests of Triton kernels, which run on a CUDA device if there is one, else in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.device import ON_DEVICE, TRITON_DTYPES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that launch kernels as those of a GPU, if there is one."""
    if ON_DEVICE:
        for item in items:
            if Path(__file__).parent in item.path.parents and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """Return the device of a Triton kernel's operands."""
    return torch.device("cuda" if ON_DEVICE else "cpu")


@pytest.fixture(params=TRITON_DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return a dtype of activations and weights."""
    return request.param
