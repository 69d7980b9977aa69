"""token_logprobs against float64 and a sorted vocabulary."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import token_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 9), (1, 5), (6, 129)])
def test_looks_up_like_the_reference(num_rows: int, vocab_size: int, num_top: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(num_rows, vocab_size) * 5 + 100
    token_ids = torch.randint(0, vocab_size, (num_rows,))
    chosen, ranks, top_ids, top = token_logprobs(logits, token_ids, num_top)
    expected = token_logprobs(logits, token_ids, num_top, impl="reference")
    torch.testing.assert_close(chosen, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(ranks, expected[1])
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top, expected[3], rtol=1e-6, atol=1e-6)


def test_logprobs_of_the_whole_vocabulary_sum_to_one() -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0, 700.0, 699.0]])
    _, _, _, top = token_logprobs(logits, torch.tensor([0]), 5)
    assert top.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_rank_counts_only_likelier_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]] * 4)
    _, ranks, _, _ = token_logprobs(logits, torch.tensor([0, 1, 2, 3]), 0)
    assert ranks.tolist() == [4, 1, 1, 3]


def test_a_masked_token_has_probability_zero() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    chosen, ranks, _, _ = token_logprobs(logits, torch.tensor([1]), 1)
    assert chosen.item() == -torch.inf
    assert ranks.item() == 3


def test_shapes_and_counts_out_of_range_are_named() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"token_ids \[3\] do not fit logits \[2, 5\]"):
        token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"num_top 6 must be 0..vocab_size = 5"):
        token_logprobs(logits, torch.zeros(2, dtype=torch.int64), 6)
    with pytest.raises(ValueError, match=r"logits \[2, 5\] torch.float64"):
        token_logprobs(logits.double(), torch.zeros(2, dtype=torch.int64), 1)
