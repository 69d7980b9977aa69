"""The parts of sampling in plain torch: thresholds, both ways to draw, noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ops.test_sample import columns, random_logits
from triptych_kernels.reference.sampling import gumbel, kept_tokens
from triptych_kernels.torch import sampling as torch_implementation


@given(
    quantized=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.013, 1.0),
    min_p=st.floats(0.0, 0.97),
)
@settings(max_examples=300, deadline=None)
def test_kept_sets_are_those_of_the_naive_way(
    quantized: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    # steps of 0.37 make many equals, and no sum of probabilities that is a round number
    logits = torch.tensor([quantized], dtype=torch.float32) * 0.37
    top_p, min_p = (torch.tensor([value], dtype=torch.float32) for value in (top_p, min_p))
    thresholds = torch_implementation.filter_thresholds(
        logits, logits.amax(-1), torch.tensor([top_k], dtype=torch.int32), top_p, min_p
    )
    kept = set((logits[0] >= thresholds[0]).nonzero().flatten().tolist())
    # probabilities that meet a limit within rounding may fall to either side
    choices = [
        kept_tokens(logits[0].tolist(), top_k, top_p.item() * p_shift, min_p.item() * m_shift)
        for p_shift in (1 - 1e-5, 1, 1 + 1e-5)
        for m_shift in (1 - 1e-5, 1, 1 + 1e-5)
    ]
    assert kept in choices


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
def test_top_p_reaches_past_the_first_candidates(top_p: float) -> None:
    logits = random_logits(2, 5000, spread=0.5)
    limits = torch.tensor([top_p, 0.01])
    thresholds = torch_implementation.filter_thresholds(
        logits, logits.amax(-1), torch.zeros(2, dtype=torch.int32), limits, torch.zeros(2)
    )
    for row in range(2):
        kept = kept_tokens(logits[row].tolist(), 0, limits[row].item(), 0.0)
        # float32 sums of 5,000 terms: the boundary may move by a token
        assert abs(int((logits[row] >= thresholds[row]).sum()) - len(kept)) <= 1


def test_both_ways_to_draw_agree() -> None:
    logits = random_logits(9, 1003)
    kept = logits > -1.0
    seeds, positions = torch.arange(9), torch.arange(9) * 1000
    few = torch_implementation.draw_among_few(logits, kept, seeds, positions)
    assert torch.equal(few, torch_implementation.draw_among_many(logits, kept, seeds, positions))


def test_tiles_of_rows_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, asked = random_logits(11, 400, spread=0.5), columns(11, [{}])
    whole = torch_implementation.sample(logits, rows=None, masks=None, **asked)
    monkeypatch.setattr(torch_implementation, "TILE_COUNTERS", 300)  # three rows of 100 counters
    assert torch.equal(torch_implementation.sample(logits, rows=None, masks=None, **asked), whole)


def test_noise_is_finite_and_exact_at_both_ends() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    expected = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words.tolist()]
    torch.testing.assert_close(
        torch_implementation.gumbel(words), torch.tensor(expected), rtol=1e-6, atol=1e-6
    )
    assert expected[-1] - expected[0] < torch_implementation.GUMBEL_SPAN


def test_noise_of_torch_is_that_of_the_reference() -> None:
    seed, position = -(2**63) + 17, 2**33 + 5
    quads = torch.arange(10)
    words = torch_implementation.token_words(torch.tensor([seed]), torch.tensor([position]), quads)
    noise = torch_implementation.gumbel(torch.stack(words, dim=-1).flatten())
    expected = torch.tensor([gumbel(seed, position, token_id) for token_id in range(40)])
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)
