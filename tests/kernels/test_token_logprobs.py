"""token_logprobs against float64 and a sorted vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import token_logprobs


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernel for each instruction set that this processor has, and plain torch."""
    with forced_isa("" if request.param == "plain" else request.param):
        use_threads(2)
        yield request.param


def look_up(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return token_logprobs(logits, torch.arange(len(logits)), token_ids, num_top)


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 9), (1, 5), (6, 129), (2, 9001), (9, 700)])
def test_looks_up_like_the_reference(num_rows: int, vocab_size: int, num_top: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(num_rows + 2, vocab_size) * 5 + 100
    rows = torch.randperm(num_rows + 2)[:num_rows]
    token_ids = torch.randint(0, vocab_size, (num_rows,))
    chosen, ranks, top_ids, top = token_logprobs(logits, rows, token_ids, num_top)
    expected = token_logprobs(logits, rows, token_ids, num_top, impl="reference")
    torch.testing.assert_close(chosen, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(ranks, expected[1])
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top, expected[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_top", [3, 64, 300])
def test_the_best_of_many_equals_are_as_good_as_any(num_top: int) -> None:
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * 2).round()
    _, _, top_ids, top = look_up(logits, torch.zeros(5, dtype=torch.int64), num_top)
    assert all(len(set(row)) == num_top for row in top_ids.tolist())
    logprobs = logits.double().log_softmax(-1)
    torch.testing.assert_close(top.double(), logprobs.topk(num_top).values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(top.double(), logprobs.gather(1, top_ids), rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_in_any_company(form: str) -> None:
    if form == "plain":
        pytest.skip("plain torch promises no order of summation")
    logits = torch.randn(20, 20_001, generator=torch.Generator().manual_seed(2)) * 3
    token_ids = torch.arange(20) * 1000
    together = look_up(logits, token_ids, 4)
    for num_threads in (1, 3):
        use_threads(num_threads)
        for row in range(20):
            alone = token_logprobs(logits, torch.tensor([row]), token_ids[row : row + 1], 4)
            for result, whole in zip(alone, together, strict=True):
                assert torch.equal(result[0], whole[row])


def test_logits_may_be_a_part_of_a_wider_tensor() -> None:
    wide = torch.randn(5, 200, generator=torch.Generator().manual_seed(3))
    for part in (wide[:, 3:130], wide[:, ::2], wide.T[:5].T):
        token_ids = torch.zeros(len(part), dtype=torch.int64)
        expected = look_up(part.contiguous(), token_ids, 3)
        for result, value in zip(look_up(part, token_ids, 3), expected, strict=True):
            assert torch.equal(result, value)


def test_logprobs_of_the_whole_vocabulary_sum_to_one() -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0, 700.0, 699.0]])
    _, _, _, top = look_up(logits, torch.tensor([0]), 5)
    assert top.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_rank_counts_only_likelier_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]] * 4)
    _, ranks, _, _ = look_up(logits, torch.tensor([0, 1, 2, 3]), 0)
    assert ranks.tolist() == [4, 1, 1, 3]


def test_a_masked_token_has_probability_zero() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    chosen, ranks, _, _ = look_up(logits, torch.tensor([1]), 1)
    assert chosen.item() == -torch.inf
    assert ranks.item() == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_logprobs_and_disturbs_no_other(bad: float) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    token_ids = torch.tensor([7, 8, 9])
    expected = look_up(logits, token_ids, 2)
    logits[1, 200] = bad
    results = look_up(logits, token_ids, 2)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result[[0, 2]], value[[0, 2]])
    assert not results[0][1].isfinite()


def test_shapes_dtypes_and_counts_out_of_range_are_named() -> None:
    logits, rows = torch.zeros(2, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"token_ids \[3\] torch.int64 do not fit rows \[2\]"):
        token_logprobs(logits, rows, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"rows \[2\] torch.float32 must be \[num_rows\] torch.int64"):
        token_logprobs(logits, rows.float(), rows, 1)
    with pytest.raises(ValueError, match=r"num_top 6 must be 0..vocab_size = 5"):
        token_logprobs(logits, rows, rows, 6)
    with pytest.raises(ValueError, match=r"logits \[2, 5\] torch.float64"):
        token_logprobs(logits.double(), rows, rows, 1)
