"""The Triton embedding: rows as they stand, widened where asked."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.ops import embedding


@pytest.mark.parametrize("hidden_size", [1, 64, 576, 3000])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_finds_the_rows_of_the_tokens(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, hidden_size, device=device).to(dtype)
    token_ids = torch.tensor([9, 0, 3, 3, 1, 9], device=device)[:num_tokens]
    for out_dtype in (dtype, torch.float32):
        with poisoned_allocations():
            out = embedding(token_ids, weight, out_dtype=out_dtype, impl="triton")
        expected = embedding(token_ids, weight, out_dtype=out_dtype, impl="reference")
        assert out.dtype == out_dtype
        assert torch.equal(out, expected)


def test_a_weight_may_be_a_view(device: torch.device) -> None:
    weight = torch.randn(32, 10, device=device).T[:, 4:20]
    token_ids = torch.tensor([9, 0], device=device)
    assert torch.equal(embedding(token_ids, weight, impl="triton"), weight[[9, 0]])
