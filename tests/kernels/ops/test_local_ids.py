"""local_ids: ids as the rank that holds their rows numbers them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ops.implementations import Case, cases_of
from triptych_kernels.ops import local_ids

case = cases_of("local_ids")


@pytest.mark.parametrize("ids", [[], [7], [0, 6, 7, 11, 12, 1 << 40]], ids=str)
def test_own_ids_are_numbered_from_zero_and_others_are_zero(ids: list[int], case: Case) -> None:
    token_ids = torch.tensor(ids, dtype=torch.int64)
    found = case(local_ids, token_ids, 7, 5)
    assert torch.equal(found, local_ids(token_ids, 7, 5, impl="reference"))
    assert token_ids.tolist() == ids


def test_ids_of_another_type_are_named() -> None:
    with pytest.raises(ValueError, match=r"local_ids: token_ids \[2\] torch.int32 must be \[num_tokens\]"):
        local_ids(torch.zeros(2, dtype=torch.int32), 0, 1)
