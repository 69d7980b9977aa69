"""sample: exact against the reference, right in distribution, and a function of seed, position and values alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import sample
from triptych_kernels.reference.sampling import gumbel, kept_tokens

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


@pytest.fixture(params=[*usable_isas(), "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernel for each instruction set that this processor has, and plain torch."""
    with forced_isa("" if request.param == "plain" else request.param):
        use_threads(2)  # of which 8 rows are enough for a row each
        yield request.param


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


def test_later_filters_see_the_probabilities_that_earlier_ones_left() -> None:
    # of 0.4, 0.3, 0.2, 0.1 top_k 2 leaves 4/7 and 3/7: top_p 0.55 then keeps one, of all four it would keep two
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(300, -1)
    rows = {**columns(300, [{"top_k": 2, "top_p": 0.55}]), "positions": torch.arange(300)}
    assert set(sample(logits, **rows).tolist()) == {0}
    rows = {**columns(300, [{"top_p": 0.55}]), "positions": torch.arange(300)}
    assert set(sample(logits, **rows).tolist()) == {0, 1}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 30), -torch.inf)
    logits[:, [3, 17]] = torch.tensor([0.0, 1.0])
    rows = {**columns(500, [{"temperature": 2.0}, {"top_p": 0.999}]), "positions": torch.arange(500)}
    assert set(sample(logits, **rows).tolist()) == {3, 17}


@pytest.mark.parametrize("place", [0, 76, 8191, 8192, 9000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_logit_that_is_not_finite_gets_no_token_and_disturbs_no_other(
    bad: float, place: int
) -> None:
    logits, asked = random_logits(20, 9001), columns(20, RESTRICTIONS)
    expected = sample(logits, **asked)
    logits[::5, place] = bad
    expected[::5] = -1
    assert torch.equal(sample(logits, **asked), expected)
    assert torch.equal(sample(logits[:6], **pick(asked, slice(6))), expected[:6])


def test_a_row_without_any_token_left_gets_none() -> None:
    logits = torch.full((10, 65), -torch.inf)
    logits[4, 64] = -3.0
    assert sample(logits, **columns(10, RESTRICTIONS)).tolist() == [-1] * 4 + [64] + [-1] * 5


@pytest.mark.parametrize("vocab_size", [63, 64, 65, 8191, 8192, 8193, 20_001])
def test_greedy_finds_the_first_of_the_largest_wherever_it_stands(vocab_size: int) -> None:
    places = [0, vocab_size // 3, vocab_size // 2, vocab_size - 2, vocab_size - 1]
    logits = random_logits(len(places), vocab_size)
    for row, place in enumerate(places):
        logits[row, place:] = logits[row, place:].clamp(max=50.0)
        logits[row, [place, vocab_size - 1]] = 50.0
    for num_rows in (1, len(places)):
        assert (
            sample(logits[:num_rows], **columns(num_rows, [{"temperature": 0.0}])).tolist()
            == places[:num_rows]
        )


def test_the_noise_of_a_token_is_that_of_the_reference() -> None:
    # of two tokens the first wins as soon as its logit makes up for the difference of their noise
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab_size = 400, 9000
    asked = columns(num_rows, [{}])
    asked["seeds"] = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    asked["positions"] = torch.randint(0, 2**40, (num_rows,), generator=generator)
    pairs = [torch.randperm(vocab_size, generator=generator)[:2].tolist() for _ in range(num_rows)]
    for margin, winner in ((1e-5, 0), (-1e-5, 1)):
        logits = torch.full((num_rows, vocab_size), -torch.inf)
        for row, pair in enumerate(pairs):
            noise = [gumbel(int(asked["seeds"][row]), int(asked["positions"][row]), t) for t in pair]
            logits[row, pair] = torch.tensor([noise[1] - noise[0] + margin, 0.0])
        assert sample(logits, **asked).tolist() == [pair[winner] for pair in pairs]


def test_logits_may_be_a_part_of_a_wider_tensor() -> None:
    wide, asked = random_logits(12, 300), columns(12, RESTRICTIONS)
    for part in (wide[:, 7:290], wide[:, ::2], wide.T[:12].T):
        asked_here = pick(asked, slice(len(part)))
        assert torch.equal(sample(part, **asked_here), sample(part.contiguous(), **asked_here))


def test_the_logits_are_not_written() -> None:
    logits = random_logits(10, 65)
    before = logits.clone()
    sample(logits, **columns(10, RESTRICTIONS))
    assert torch.equal(logits, before)


def test_shapes_and_dtypes_that_disagree_are_named() -> None:
    asked = columns(2, [{}])
    with pytest.raises(ValueError, match=r"logits \[2, 5\] torch.bfloat16 must be"):
        sample(torch.zeros(2, 5, dtype=torch.bfloat16), **asked)
    with pytest.raises(ValueError, match=r"top_p \[1\] torch.float32 does not fit logits \[2, 5\]"):
        sample(torch.zeros(2, 5), **{**asked, "top_p": torch.ones(1)})
    with pytest.raises(ValueError, match=r"top_k \[2\] torch.int64 .* it must be \[num_rows\] torch.int32"):
        sample(torch.zeros(2, 5), **{**asked, "top_k": torch.ones(2, dtype=torch.int64)})
