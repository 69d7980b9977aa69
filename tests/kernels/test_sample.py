"""sample: exact against the reference, right in distribution, and a function of seed, position and values alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triptych_kernels.ops import sample
from triptych_kernels.reference.sample import gumbel, kept_tokens
from triptych_kernels.torch import sample as torch_implementation

SEEDS = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])

OFF: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
RESTRICTIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.1},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.0},
    {"top_k": 1000},
]


def columns(num_rows: int, rows: list[dict[str, float]]) -> dict[str, Tensor]:
    """Sampling columns with these settings in turn, each row with its own seed and position."""
    settings_of = [{**OFF, **rows[row % len(rows)]} for row in range(num_rows)]
    return {
        "temperature": torch.tensor([s["temperature"] for s in settings_of], dtype=torch.float32),
        "top_k": torch.tensor([s["top_k"] for s in settings_of], dtype=torch.int32),
        "top_p": torch.tensor([s["top_p"] for s in settings_of], dtype=torch.float32),
        "min_p": torch.tensor([s["min_p"] for s in settings_of], dtype=torch.float32),
        "seeds": SEEDS[torch.arange(num_rows) % len(SEEDS)],
        "positions": torch.arange(num_rows) * 3 + 1,
    }


def pick(all_columns: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
    return {name: column[rows] for name, column in all_columns.items()}


def random_logits(num_rows: int, vocab_size: int, spread: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * spread


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 63, 130])
@pytest.mark.parametrize(
    "rows", [RESTRICTIONS, RESTRICTIONS[:1], [{"temperature": 0.0}]], ids=["mixed", "unrestricted", "greedy"]
)
def test_samples_like_the_reference(rows: list[dict[str, float]], vocab_size: int) -> None:
    logits, asked = random_logits(40, vocab_size), columns(40, rows)
    assert torch.equal(sample(logits, **asked), sample(logits, **asked, impl="reference"))


@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_row_and_one_row(num_rows: int) -> None:
    token_ids = sample(random_logits(num_rows, 7), **columns(num_rows, RESTRICTIONS))
    assert token_ids.shape == (num_rows,)
    assert token_ids.dtype == torch.int64


def test_greedy_takes_the_lowest_id_of_equals_in_any_company() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 9.0, 9.0]])
    assert sample(logits, **columns(3, [{"temperature": 0.0}])).tolist() == [1, 0, 2]
    mixed = sample(logits, **columns(3, [{"temperature": 0.0}, {}, {"temperature": 0.0}]))
    assert [mixed[0], mixed[2]] == [1, 2]


def test_a_row_keeps_its_token_wherever_it_stands() -> None:
    logits, asked = random_logits(20, 513), columns(20, RESTRICTIONS)
    token_ids = sample(logits, **asked)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits[order], **pick(asked, order)), token_ids[order])
    for row in range(20):
        alone = slice(row, row + 1)
        assert torch.equal(sample(logits[alone], **pick(asked, alone)), token_ids[alone])


def test_seed_and_position_change_the_token() -> None:
    logits = torch.zeros(200, 50)
    asked = columns(200, [{}])
    same_seed = {**asked, "seeds": torch.zeros(200, dtype=torch.int64)}
    same_position = {**asked, "positions": torch.zeros(200, dtype=torch.int64), "seeds": torch.arange(200)}
    for varied in (same_seed, same_position):
        assert len(set(sample(logits, **varied).tolist())) > 40  # 50 equal tokens, 200 draws: about 49 appear
    fixed = {**same_seed, "positions": torch.full((200,), 77)}
    assert len(set(sample(logits, **fixed).tolist())) == 1


@pytest.mark.parametrize("by", ["positions", "seeds"])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.75}, {"min_p": 0.25}])
def test_draws_are_distributed_as_the_kept_probabilities(asked: dict[str, float], by: str) -> None:
    num_draws, asked = 6000, {**OFF, **asked}
    logits = torch.tensor([1.0, 0.3, -0.2, 1.4, 0.0, -1.0, 0.9, 0.1, -0.5, 0.6, -2.0])
    rows = columns(num_draws, [asked])
    constant = "seeds" if by == "positions" else "positions"
    rows = {**rows, by: torch.arange(num_draws) + 10**6, constant: torch.full((num_draws,), 4242)}
    counts = torch.bincount(sample(logits.expand(num_draws, -1), **rows), minlength=len(logits))

    scaled = [value / asked["temperature"] for value in logits.tolist()]
    kept = sorted(kept_tokens(scaled, int(asked["top_k"]), asked["top_p"], asked["min_p"]))
    assert counts.sum() == counts[kept].sum()
    expected = torch.softmax(torch.tensor([scaled[t] for t in kept]), dim=0) * num_draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    # 4.5 standard deviations above the mean of chi square; seeds are fixed, so it passes always or never
    degrees = len(kept) - 1
    assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees)


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
    thresholds = torch_implementation._thresholds(
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
def test_top_p_of_a_flat_distribution_reaches_past_the_first_candidates(top_p: float) -> None:
    logits = random_logits(2, 5000, spread=0.5)
    limits = torch.tensor([top_p, 0.01])
    thresholds = torch_implementation._thresholds(
        logits, logits.amax(-1), torch.zeros(2, dtype=torch.int32), limits, torch.zeros(2)
    )
    for row in range(2):
        kept = kept_tokens(logits[row].tolist(), 0, limits[row].item(), 0.0)
        # float32 sums of 5,000 terms: the boundary may move by a token
        assert abs(int((logits[row] >= thresholds[row]).sum()) - len(kept)) <= 1


def test_later_filters_see_the_probabilities_that_earlier_ones_left() -> None:
    # of 0.4, 0.3, 0.2, 0.1 top_k 2 leaves 4/7 and 3/7: top_p 0.55 then keeps one, of all four it would keep two
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(300, -1)
    rows = {**columns(300, [{"top_k": 2, "top_p": 0.55}]), "positions": torch.arange(300)}
    assert set(sample(logits, **rows).tolist()) == {0}
    rows = {**columns(300, [{"top_p": 0.55}]), "positions": torch.arange(300)}
    assert set(sample(logits, **rows).tolist()) == {0, 1}


def test_both_ways_to_draw_agree() -> None:
    logits = random_logits(9, 1003)
    kept = logits > -1.0
    seeds, positions = torch.arange(9), torch.arange(9) * 1000
    few = torch_implementation._draw_among_few(logits, kept, seeds, positions)
    assert torch.equal(few, torch_implementation._draw_among_many(logits, kept, seeds, positions))


def test_tiles_of_rows_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, asked = random_logits(11, 400, spread=0.5), columns(11, [{}])
    whole = sample(logits, **asked)
    monkeypatch.setattr(torch_implementation, "_TILE_COUNTERS", 300)  # three rows of 100 counters
    assert torch.equal(sample(logits, **asked), whole)


def test_noise_is_finite_and_exact_at_both_ends() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    expected = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words.tolist()]
    torch.testing.assert_close(
        torch_implementation._gumbel(words), torch.tensor(expected), rtol=1e-6, atol=1e-6
    )
    assert expected[-1] - expected[0] < torch_implementation._GUMBEL_SPAN


def test_noise_of_torch_is_that_of_the_reference() -> None:
    seed, position = -(2**63) + 17, 2**33 + 5
    quads = torch.arange(10)
    words = torch_implementation._words(torch.tensor([seed]), torch.tensor([position]), quads)
    noise = torch_implementation._gumbel(torch.stack(words, dim=-1).flatten())
    expected = torch.tensor([gumbel(seed, position, token_id) for token_id in range(40)])
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 30), -torch.inf)
    logits[:, [3, 17]] = torch.tensor([0.0, 1.0])
    rows = {**columns(500, [{"temperature": 2.0}, {"top_p": 0.999}]), "positions": torch.arange(500)}
    assert set(sample(logits, **rows).tolist()) == {3, 17}


def test_a_row_of_nan_disturbs_no_other() -> None:
    logits, asked = random_logits(12, 77), columns(12, RESTRICTIONS)
    expected = sample(logits, **asked)
    logits[[0, 5, 9]] = torch.nan
    token_ids = sample(logits, **asked)
    sound = [row for row in range(12) if row not in (0, 5, 9)]
    assert torch.equal(token_ids[sound], expected[sound])
    assert bool(((token_ids >= 0) & (token_ids < 77)).all())


def test_the_logits_are_not_written() -> None:
    logits = random_logits(10, 65)
    before = logits.clone()
    sample(logits, **columns(10, RESTRICTIONS))
    assert torch.equal(logits, before)


def test_shapes_that_disagree_are_named() -> None:
    asked = columns(2, [{}])
    with pytest.raises(ValueError, match=r"logits \[2, 5\] torch.bfloat16 must be"):
        sample(torch.zeros(2, 5, dtype=torch.bfloat16), **asked)
    with pytest.raises(ValueError, match=r"top_p \[1\] does not fit logits \[2, 5\]"):
        sample(torch.zeros(2, 5), **{**asked, "top_p": torch.ones(1)})
