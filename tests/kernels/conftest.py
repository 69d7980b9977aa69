"""Fixtures for tests of Triton kernels, which run on a CUDA device if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.pairwise import bring_new_values
from tests.kernels.device import ON_DEVICE, TRITON_DTYPES
from triptych_kernels.cpu.library import usable_isas


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that launch Triton's kernels as those of a GPU, if there is one.

    `make test` proves the kernels of this CPU, so those that plain torch and the widest instruction set compute. Of the
    narrower ones each test has one quick case, and each file one of Triton's interpreter, which takes up to seconds for
    a launch: there, cases that bring no new value of a parameter are slow.
    """
    seen = set[tuple[str, str]]()
    interpreted: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.nodeid.startswith("tests/kernels/"):
            continue
        if ON_DEVICE and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        other = _other_than_this_cpu(item)
        if other and item.get_closest_marker("slow") is None:
            case = (str(item.path) if other == "triton" else item.nodeid.partition("[")[0], other)
            if case in seen:
                item.add_marker(pytest.mark.thorough)
            seen.add(case)
            if other == "triton" and hasattr(item, "callspec"):
                interpreted.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in interpreted.values():
        are_new = bring_new_values([item.callspec.params for item in same])  # type: ignore[attr-defined]
        for item, is_new in zip(same, are_new, strict=True):
            if not is_new:
                item.add_marker(pytest.mark.slow)


def _other_than_this_cpu(item: pytest.Item) -> str:
    """Return "triton" or the narrower instruction set that a test is for, else an empty string."""
    if item.nodeid.startswith("tests/kernels/triton/"):
        return "triton"
    others = ("triton", *usable_isas()[1:])
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        implementation = getattr(value, "implementation", value)  # of a case
        name = getattr(implementation, "name", implementation)
        if isinstance(name, str) and name in others:
            return name
    return ""


@pytest.fixture
def device() -> torch.device:
    """Return the device of a Triton kernel's operands."""
    return torch.device("cuda" if ON_DEVICE else "cpu")


@pytest.fixture(params=TRITON_DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return a dtype of activations and weights."""
    return request.param
