"""Sums of inputs by groups of 32: those of each row alone."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.triton.linear.group_sums import sum_input_groups


@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (5, 9), (17, 3), (40, 20)])
def test_each_group_of_each_row_is_summed(
    num_rows: int, num_groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(num_rows)
    padded = torch.randn(num_rows, 32 * num_groups + 8).to(device, dtype)
    x = padded[:, : 32 * num_groups]
    padded[:, 32 * num_groups :] = torch.nan
    with poisoned_allocations():
        padded_sums = sum_input_groups(x, 16)
    sums = padded_sums[:num_groups, :num_rows]
    assert padded_sums.shape[0] >= num_groups
    assert padded_sums.shape[1] > num_rows
    assert padded_sums.count_nonzero() == sums.count_nonzero(), "what is beyond is 0"
    exact = x.double().unflatten(1, (num_groups, 32)).sum(2).T
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(sum_input_groups(x[-1:], 64)[:num_groups, :1], sums[:, -1:]), "whatever the batch"


def test_what_is_no_number_stays_in_its_group(device: torch.device) -> None:
    x = torch.ones(3, 96, device=device)
    x[1, 40] = torch.nan
    sums = sum_input_groups(x, 16)
    assert sums.isnan().nonzero().tolist() == [[1, 1]]


def test_no_rows_have_no_sums(device: torch.device) -> None:
    assert sum_input_groups(torch.empty(0, 64, device=device), 16).numel() == 0
