"""gather_rows: rows of a tensor in the asked order."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ops.implementations import Case, cases_of
from tests.kernels.ops.weights import random
from triptych_kernels.ops import gather_rows

case = cases_of("gather_rows")


@pytest.mark.parametrize("rows", [[], [3], [8, 0, 0, 3]], ids=str)
def test_gathered_rows_are_those_asked_for(rows: list[int], case: Case) -> None:
    x, index = random(9, 5, dtype=case.dtype), torch.tensor(rows, dtype=torch.int64)
    assert torch.equal(case(gather_rows, x, index), gather_rows(x, index, impl="reference"))


def test_shapes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"gather_rows: x \[2\] must be"):
        gather_rows(torch.ones(2), torch.zeros(1, dtype=torch.int64))
