"""clear_other_rows: zeros where another rank has the row."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ops.implementations import Case, cases_of
from tests.kernels.ops.weights import random
from triptych_kernels.ops import clear_other_rows

case = cases_of("clear_other_rows")


@pytest.mark.parametrize("num_tokens", [0, 1, 200])
def test_rows_of_other_ranks_become_zero(num_tokens: int, case: Case) -> None:
    x, token_ids = random(num_tokens, 5, dtype=case.dtype), torch.arange(num_tokens) % 9
    expected = clear_other_rows(x.clone(), token_ids, 3, 4, impl="reference")
    assert case(clear_other_rows, x, token_ids, 3, 4) is x
    assert torch.equal(x, expected)


def test_shapes_that_disagree_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"clear_other_rows: token_ids \[2\] torch.int64 do not fit x \[3, 4\]"
    ):
        clear_other_rows(torch.ones(3, 4), torch.zeros(2, dtype=torch.int64), 0, 1)
