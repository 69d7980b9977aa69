"""token_logprobs against float64 and a sorted vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta_float32, meta_int64
from tests.kernels.ops.implementations import Implementation, implementations_of
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.ops import token_logprobs

implementation = implementations_of("token_logprobs")


def look_up(
    implementation: Implementation,
    logits: Tensor,
    token_ids: Tensor,
    num_top: int,
    rows: Tensor | None = None,
) -> list[Tensor]:
    """Look up on the implementation's device, in all rows if None, and return the results on the host."""
    rows = torch.arange(len(logits)) if rows is None else rows
    operands = (operand.to(implementation.device) for operand in (logits, rows, token_ids))
    return [result.cpu() for result in implementation(token_logprobs, *operands, num_top)]


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(0, 9), (1, 5), (6, 129), (2, 9001), (9, 700), (1, 32_003)]
)
def test_looks_up_like_the_reference(
    num_rows: int, vocab_size: int, num_top: int, implementation: Implementation
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(num_rows + 2, vocab_size) * 5 + 100
    rows = torch.randperm(num_rows + 2)[:num_rows]
    token_ids = torch.randint(0, vocab_size, (num_rows,))
    chosen, ranks, top_ids, top = look_up(implementation, logits, token_ids, num_top, rows)
    expected = token_logprobs(logits, rows, token_ids, num_top, impl="reference")
    torch.testing.assert_close(chosen, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(ranks, expected[1])
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top, expected[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_top", "vocab_size"), [(1, 1), (3, 300), (20, 90), (64, 300), (300, 300)])
def test_the_best_of_many_equals_are_as_good_as_any(
    num_top: int, vocab_size: int, implementation: Implementation
) -> None:
    if implementation.is_triton and num_top > 20:
        pytest.skip("a pass over the groups for each of the best is meant for a few tens")
    logits = (torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)) * 2).round()
    logits[1] = 2.0
    logits[2, 2:] = -torch.inf
    _, _, top_ids, top = look_up(implementation, logits, torch.zeros(5, dtype=torch.int64), num_top)
    assert all(len(set(row)) == num_top for row in top_ids.tolist())
    logprobs = logits.double().log_softmax(-1)
    torch.testing.assert_close(top.double(), logprobs.topk(num_top).values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(top.double(), logprobs.gather(1, top_ids), rtol=1e-5, atol=1e-6)
    if implementation.is_triton:  # of equals the first
        expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
        assert torch.equal(top_ids[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("vocab_size", [9001, 20_001])
def test_a_row_has_the_same_bits_in_any_batch(vocab_size: int, implementation: Implementation) -> None:
    if not implementation.has_fixed_sums:
        pytest.skip("plain torch promises no order of summation")
    num_rows = 4 if implementation.is_interpreted else 20
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    token_ids = torch.arange(num_rows) * 400
    together = look_up(implementation, logits, token_ids, 4)
    for num_threads in (1, 3):
        use_threads(num_threads)
        for row in (2, num_rows - 1):
            single = look_up(implementation, logits, token_ids[row : row + 1], 4, torch.tensor([row]))
            for result, whole in zip(single, together, strict=True):
                assert torch.equal(result[0], whole[row])


@pytest.mark.thorough
def test_logits_may_be_a_view(implementation: Implementation) -> None:
    wide = torch.randn(5, 200, generator=torch.Generator().manual_seed(3)).to(implementation.device)
    for part in (wide[:, 3:130], wide[:, ::2], wide.T[:5].T):
        token_ids = torch.zeros(len(part), dtype=torch.int64)
        expected = look_up(implementation, part.contiguous(), token_ids, 3)
        for result, value in zip(look_up(implementation, part, token_ids, 3), expected, strict=True):
            assert torch.equal(result, value)


def test_logprobs_of_the_vocabulary_sum_to_one(implementation: Implementation) -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0, 700.0, 699.0]])
    _, _, _, top = look_up(implementation, logits, torch.tensor([0]), 5)
    assert top.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_rank_counts_only_likelier_tokens(implementation: Implementation) -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]] * 4)
    _, ranks, _, _ = look_up(implementation, logits, torch.tensor([0, 1, 2, 3]), 0)
    assert ranks.tolist() == [4, 1, 1, 3]


def test_a_masked_token_has_probability_zero(implementation: Implementation) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    chosen, ranks, _, _ = look_up(implementation, logits, torch.tensor([1]), 1)
    assert chosen.item() == -torch.inf
    assert ranks.item() == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_affects_no_other(bad: float, implementation: Implementation) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(4))
    token_ids = torch.tensor([7, 8, 9, 10])
    expected = look_up(implementation, logits, token_ids, 2)
    logits[1, 4500] = bad
    logits[3] = -torch.inf
    results = look_up(implementation, logits, token_ids, 2)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result[[0, 2]], value[[0, 2]])
    assert not results[0][[1, 3]].isfinite().any()


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


def _model_call(num_rows: int, vocab_size: int, num_top: int) -> object:
    rows, token_ids = meta_int64(num_rows), meta_int64(num_rows)
    return token_logprobs(meta_float32(256, vocab_size), rows, token_ids, num_top, impl="triton")


MODEL_CALLS = {
    "none beside": ModelCall(lambda: _model_call(256, 128256, 0)),
    "1 of 49152": ModelCall(lambda: _model_call(1, 49152, 1)),
    "20 of 128256": ModelCall(lambda: _model_call(256, 128256, 20)),
}


def launch_small(draw: SmallOperands) -> None:
    logits = torch.randn(5, draw.vocab_size, device=draw.device)
    rows = torch.arange(5, device=draw.device)
    token_logprobs(logits, rows, torch.randint(draw.vocab_size, (5,), device=draw.device), 3, impl="triton")
