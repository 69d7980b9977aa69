"""Triton kernels run on a CUDA device where there is one (`make test-gpu`), else in Triton's interpreter.

The interpreter computes on the CPU what the kernel says, block by block: in float32 and float16, whose products it
gets right; bfloat16 is for the device.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()

if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that launch nothing need no device, and run where there is none."""
    if ON_DEVICE:
        for item in items:
            if Path(__file__).parent in item.path.parents and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """Return the device that the operands of a kernel must be on."""
    return torch.device("cuda" if ON_DEVICE else "cpu")


@pytest.fixture(
    params=[torch.float32, torch.float16, torch.bfloat16] if ON_DEVICE else [torch.float32, torch.float16]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return the dtype of activations and weights."""
    return request.param
