"""The Triton token_logprobs against float64 and a sorted vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.ops import token_logprobs


def look_up(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int, device: torch.device
) -> list[Tensor]:
    """Return the results of the kernels, on the host."""
    with poisoned_allocations():
        found = token_logprobs(
            logits.to(device), rows.to(device), token_ids.to(device), num_top, impl="triton"
        )
    return [result.cpu() for result in found]


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 9), (1, 5), (6, 129), (2, 9001), (1, 32_003)])
def test_looks_up_like_the_reference(
    num_rows: int, vocab_size: int, num_top: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(num_rows + 2, vocab_size) * 5 + 100
    rows = torch.randperm(num_rows + 2)[:num_rows]
    token_ids = torch.randint(0, vocab_size, (num_rows,))
    chosen, ranks, top_ids, top = look_up(logits, rows, token_ids, num_top, device)
    expected = token_logprobs(logits, rows, token_ids, num_top, impl="reference")
    torch.testing.assert_close(chosen, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(ranks, expected[1])
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top, expected[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_top", "vocab_size"), [(1, 1), (3, 300), (20, 90)])
def test_the_first_of_equals_come_first(num_top: int, vocab_size: int, device: torch.device) -> None:
    logits = (torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * 2).round()
    logits[1] = 2.0
    logits[2, 2:] = -torch.inf
    _, _, top_ids, top = look_up(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64), num_top, device)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(top_ids[:2], expected[:2])
    assert all(len(set(row)) == num_top for row in top_ids.tolist())
    logprobs = logits.double().log_softmax(-1)
    torch.testing.assert_close(top.double(), logprobs.gather(1, expected), rtol=1e-5, atol=1e-6)


def test_rank_counts_only_likelier_tokens(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0], [0.0, -torch.inf, 0.0, 0.0]])
    chosen, ranks, *_ = look_up(
        logits, torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 1, 2, 3, 1]), 0, device
    )
    assert ranks.tolist() == [4, 1, 1, 3, 4]
    assert chosen[4] == -torch.inf


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_logprobs_and_disturbs_no_other(
    bad: float, device: torch.device
) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(4))
    rows, token_ids = torch.arange(4), torch.tensor([7, 8, 9, 10])
    expected = look_up(logits, rows, token_ids, 2, device)
    logits[1, 4500] = bad
    logits[3] = -torch.inf
    results = look_up(logits, rows, token_ids, 2, device)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result[[0, 2]], value[[0, 2]])
    assert not results[0][[1, 3]].isfinite().any()
    assert not results[3][[1, 3]].isfinite().any()


def test_a_row_has_the_same_bits_in_any_company(device: torch.device) -> None:
    logits = torch.randn(4, 9001, generator=torch.Generator().manual_seed(2)) * 3
    token_ids = torch.arange(4) * 1000
    together = look_up(logits, torch.arange(4), token_ids, 4, device)
    alone = look_up(logits, torch.tensor([2]), token_ids[2:3], 4, device)
    for result, whole in zip(alone, together, strict=True):
        assert torch.equal(result[0], whole[2])


def test_logits_may_be_a_part_of_a_wider_tensor(device: torch.device) -> None:
    wide = torch.randn(3, 200, generator=torch.Generator().manual_seed(3)).to(device)
    rows, token_ids = torch.arange(3, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    for part in (wide[:, 3:130], wide[:, ::2]):
        expected = token_logprobs(part.contiguous(), rows, token_ids, 2, impl="triton")
        for result, value in zip(
            token_logprobs(part, rows, token_ids, 2, impl="triton"), expected, strict=True
        ):
            assert torch.equal(result, value)
