"""The instruction sets that tests of native kernels run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads


@pytest.fixture(params=usable_isas() or [""])
def each_isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the kernels of an instruction set compute, on one thread afterwards."""
    if not request.param:
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(request.param):
        yield
        use_threads(1)
