"""sample: exact against the reference, right in distribution, and a function of seed, position and values alone."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.operands import ModelCall, SmallOperands, meta, meta_float32, meta_int64
from tests.kernels.ops.implementations import Implementation, implementations_of
from triptych_kernels.logit_index import TokenMasks
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


implementation = implementations_of("sample")

# for tests of thousands of draws, which the interpreter takes minutes for
compiled = implementations_of("sample", interpreted=False)


def draw(implementation: Implementation, logits: Tensor, asked: dict[str, Any]) -> Tensor:
    """Sample on the implementation's device, and return the tokens on the host."""
    moved = {
        name: column.to(implementation.device) if isinstance(column, Tensor) else column
        for name, column in asked.items()
    }
    token_ids: Tensor = implementation(sample, logits.to(implementation.device), **moved)
    return token_ids.cpu()


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


def random_case(seed: int, vocab_size: int, num_rows: int = 64) -> tuple[Tensor, dict[str, Tensor]]:
    """Return rows from flat to peaked, with all combinations of filters."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def sometimes(column: Tensor, off: float) -> Tensor:
        return torch.where(uniform(num_rows) < 0.5, column, torch.tensor(off))

    logits = torch.randn(num_rows, vocab_size, generator=generator) * (uniform(num_rows, 1) * 6 + 0.01)
    if seed % 3 == 1:
        logits = (logits * 2).round() / 2  # many equals
    if seed % 3 == 2:
        logits[uniform(num_rows, vocab_size) < 0.5] = -torch.inf
    return logits, {
        "temperature": sometimes(uniform(num_rows) * 2 + 0.05, 1.0),
        "top_k": sometimes(uniform(num_rows) ** 4 * vocab_size, 0).int(),
        "top_p": sometimes(uniform(num_rows) ** 0.3 * 0.999 + 1e-4, 1.0),
        "min_p": sometimes(uniform(num_rows) ** 3 * 0.9, 0.0),
        "seeds": torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        "positions": torch.randint(0, 2**40, (num_rows,), generator=generator),
    }


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 63, 130])
@pytest.mark.parametrize(
    "rows", [RESTRICTIONS, RESTRICTIONS[:1], [{"temperature": 0.0}]], ids=["mixed", "unrestricted", "greedy"]
)
def test_samples_like_the_reference(
    rows: list[dict[str, float]], vocab_size: int, implementation: Implementation
) -> None:
    num_rows = 10 if implementation.is_interpreted else 40
    logits, asked = random_logits(num_rows, vocab_size), columns(num_rows, rows)
    assert torch.equal(draw(implementation, logits, asked), sample(logits, **asked, impl="reference"))


@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_row_and_one_row(num_rows: int, implementation: Implementation) -> None:
    token_ids = draw(implementation, random_logits(num_rows, 7), columns(num_rows, RESTRICTIONS))
    assert token_ids.shape == (num_rows,)
    assert token_ids.dtype == torch.int64


def test_greedy_takes_the_lowest_id_of_equals(implementation: Implementation) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 9.0, 9.0]])
    assert draw(implementation, logits, columns(3, [{"temperature": 0.0}])).tolist() == [1, 0, 2]
    mixed = draw(implementation, logits, columns(3, [{"temperature": 0.0}, {}, {"temperature": 0.0}]))
    assert [mixed[0], mixed[2]] == [1, 2]


def test_a_row_keeps_its_token_in_any_batch(implementation: Implementation) -> None:
    logits, asked = random_logits(10, 5001), columns(10, RESTRICTIONS)
    token_ids = draw(implementation, logits, asked)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(implementation, logits[order], pick(asked, order)), token_ids[order])
    for row in (0, 7):
        own = slice(row, row + 1)
        assert torch.equal(draw(implementation, logits[own], pick(asked, own)), token_ids[own])


def packed(allowed: Tensor) -> Tensor:
    """Pack [num_masks, vocab_size] bool into words; the bits past the vocabulary are set, and say nothing."""
    num_masks, vocab_size = allowed.shape
    bits = torch.ones(num_masks, -(-vocab_size // 32), 32, dtype=torch.int64)
    bits.view(num_masks, -1)[:, :vocab_size] = allowed
    return (bits << torch.arange(32)).sum(dim=-1).to(torch.int32)


def masked_case(vocab_size: int, num_rows: int) -> tuple[Tensor, TokenMasks, Tensor]:
    """Return logits, a mask for most rows, and the logits with -inf where a mask forbids.

    A mask has one token, few, most, all or none; two rows share each, so that they are not in the order of the rows.
    What is forbidden may be NaN or infinite.
    """
    generator = torch.Generator().manual_seed(vocab_size)
    chances = torch.tensor([0.0, 3.0 / vocab_size, 0.9, 1.0, 0.0])
    allowed = torch.rand(len(chances), vocab_size, generator=generator) < chances[:, None]
    allowed[0, vocab_size * 2 // 3] = True
    allowed[1, [0, vocab_size - 1]] = True
    numbers = torch.arange(num_rows) % (len(chances) + 1) - 1
    logits = random_logits(num_rows, vocab_size)
    forbidden = ~allowed[numbers] & (numbers >= 0)[:, None]
    expected = logits.masked_fill(forbidden, -torch.inf)
    odd = torch.rand(num_rows, vocab_size, generator=generator)
    logits[forbidden & (odd < 0.1)] = torch.nan
    logits[forbidden & (odd > 0.9)] = torch.inf
    return logits, TokenMasks(numbers.to(torch.int32), packed(allowed)), expected


def on_device(implementation: Implementation, masks: TokenMasks) -> TokenMasks:
    return TokenMasks(masks.rows.to(implementation.device), masks.words.to(implementation.device))


@pytest.mark.parametrize("vocab_size", [1, 5, 31, 33, 64, 130, 8193])
@pytest.mark.parametrize("rows", [RESTRICTIONS, [{"temperature": 0.0}]], ids=["mixed", "greedy"])
def test_a_masked_token_counts_as_one_of_minus_infinity(
    rows: list[dict[str, float]], vocab_size: int, implementation: Implementation
) -> None:
    num_rows = 12 if implementation.is_interpreted else 60
    logits, masks, expected = masked_case(vocab_size, num_rows)
    asked = columns(num_rows, rows)
    masks = on_device(implementation, masks)
    token_ids = draw(implementation, logits, {**asked, "masks": masks})
    assert torch.equal(token_ids, draw(implementation, expected, asked))
    assert (token_ids[masks.rows.cpu() == 4] == -1).all(), "nothing is left"
    assert (token_ids[masks.rows.cpu() == 0] == vocab_size * 2 // 3).all(), "one is left"


def test_the_reference_masks_as_well() -> None:
    logits, masks, expected = masked_case(70, 24)
    asked = columns(24, RESTRICTIONS)
    masked = sample(logits, **asked, masks=masks, impl="reference")
    assert torch.equal(masked, sample(expected, **asked, impl="reference"))


def test_some_rows_of_the_logits_in_any_order(implementation: Implementation) -> None:
    logits, masks, _ = masked_case(130, 12)
    asked = columns(12, RESTRICTIONS)
    whole = draw(implementation, logits, {**asked, "masks": on_device(implementation, masks)})
    rows = torch.tensor([7, 0, 3, 11, 2])
    some = {**pick(asked, rows), "rows": rows.to(implementation.device)}
    some["masks"] = on_device(implementation, TokenMasks(masks.rows[rows], masks.words))
    assert torch.equal(draw(implementation, logits, some), whole[rows])
    unmasked = draw(implementation, random_logits(12, 130), asked)
    alone = {**pick(asked, rows), "rows": rows.to(implementation.device)}
    assert torch.equal(draw(implementation, random_logits(12, 130), alone), unmasked[rows])


def test_few_masked_rows_are_shared_by_threads_as_many_are(compiled: Implementation) -> None:
    logits, masks, _ = masked_case(20_001, 36)
    asked = columns(36, RESTRICTIONS)
    whole = draw(compiled, logits, {**asked, "masks": on_device(compiled, masks)})
    for row in range(12):
        own = slice(row, row + 1)
        mask = on_device(compiled, TokenMasks(masks.rows[own], masks.words))
        assert draw(compiled, logits[own], {**pick(asked, own), "masks": mask}) == whole[row]


def test_seed_and_position_change_the_token(compiled: Implementation) -> None:
    logits = torch.zeros(200, 50)
    asked = columns(200, [{}])
    same_seed = {**asked, "seeds": torch.zeros(200, dtype=torch.int64)}
    same_position = {**asked, "positions": torch.zeros(200, dtype=torch.int64), "seeds": torch.arange(200)}
    for varied in (same_seed, same_position):
        assert (
            len(set(draw(compiled, logits, varied).tolist())) > 40
        )  # 50 equal tokens, 200 draws: about 49 appear
    fixed = {**same_seed, "positions": torch.full((200,), 77)}
    assert len(set(draw(compiled, logits, fixed).tolist())) == 1


@pytest.mark.parametrize("by", ["positions", "seeds"])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.75}, {"min_p": 0.25}])
def test_draws_follow_the_kept_probabilities(
    asked: dict[str, float], by: str, compiled: Implementation
) -> None:
    num_draws, asked = 6000, {**OFF, **asked}
    logits = torch.tensor([1.0, 0.3, -0.2, 1.4, 0.0, -1.0, 0.9, 0.1, -0.5, 0.6, -2.0])
    rows = columns(num_draws, [asked])
    constant = "seeds" if by == "positions" else "positions"
    rows = {**rows, by: torch.arange(num_draws) + 10**6, constant: torch.full((num_draws,), 4242)}
    counts = torch.bincount(draw(compiled, logits.expand(num_draws, -1), rows), minlength=len(logits))

    scaled = [value / asked["temperature"] for value in logits.tolist()]
    kept = sorted(kept_tokens(scaled, int(asked["top_k"]), asked["top_p"], asked["min_p"]))
    assert counts.sum() == counts[kept].sum()
    expected = torch.softmax(torch.tensor([scaled[t] for t in kept]), dim=0) * num_draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    # 4.5 standard deviations above the mean of chi square; seeds are fixed, so it passes always or never
    degrees = len(kept) - 1
    assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees)


def test_filters_see_what_earlier_ones_left(compiled: Implementation) -> None:
    # of 0.4, 0.3, 0.2, 0.1 top_k 2 leaves 4/7 and 3/7: top_p 0.55 then keeps one, of all four it would keep two
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(300, -1)
    rows = {**columns(300, [{"top_k": 2, "top_p": 0.55}]), "positions": torch.arange(300)}
    assert set(draw(compiled, logits, rows).tolist()) == {0}
    rows = {**columns(300, [{"top_p": 0.55}]), "positions": torch.arange(300)}
    assert set(draw(compiled, logits, rows).tolist()) == {0, 1}


def test_masked_tokens_are_never_drawn(compiled: Implementation) -> None:
    logits = torch.full((500, 30), -torch.inf)
    logits[:, [3, 17]] = torch.tensor([0.0, 1.0])
    rows = {**columns(500, [{"temperature": 2.0}, {"top_p": 0.999}]), "positions": torch.arange(500)}
    assert set(draw(compiled, logits, rows).tolist()) == {3, 17}


@pytest.mark.parametrize("place", [0, 76, 8191, 8192, 9000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gets_no_token(bad: float, place: int, compiled: Implementation) -> None:
    logits, asked = random_logits(20, 9001), columns(20, RESTRICTIONS)
    expected = draw(compiled, logits, asked)
    logits[::5, place] = bad
    expected[::5] = -1
    assert torch.equal(draw(compiled, logits, asked), expected)
    assert torch.equal(draw(compiled, logits[:6], pick(asked, slice(6))), expected[:6])


def test_a_row_without_any_token_left_gets_none(implementation: Implementation) -> None:
    logits = torch.full((10, 65), -torch.inf)
    logits[4, 64] = -3.0
    assert draw(implementation, logits, columns(10, RESTRICTIONS)).tolist() == [-1] * 4 + [64] + [-1] * 5


@pytest.mark.parametrize("vocab_size", [63, 64, 65, 8191, 8192, 8193, 20_001])
def test_greedy_finds_the_first_of_the_largest(vocab_size: int, implementation: Implementation) -> None:
    places = [0, vocab_size // 3, vocab_size // 2, vocab_size - 2, vocab_size - 1]
    logits = random_logits(len(places), vocab_size)
    for row, place in enumerate(places):
        logits[row, place:] = logits[row, place:].clamp(max=50.0)
        logits[row, [place, vocab_size - 1]] = 50.0
    for num_rows in (1, len(places)):
        assert (
            draw(implementation, logits[:num_rows], columns(num_rows, [{"temperature": 0.0}])).tolist()
            == places[:num_rows]
        )


def test_noise_is_that_of_the_reference(implementation: Implementation) -> None:
    # of two tokens the first wins as soon as its logit makes up for the difference of their noise
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab_size = 10 if implementation.is_interpreted else 400, 9000
    asked = columns(num_rows, [{}, {"min_p": 1e-12}])
    asked["seeds"] = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    asked["positions"] = torch.randint(0, 2**40, (num_rows,), generator=generator)
    pairs = [torch.randperm(vocab_size, generator=generator)[:2].tolist() for _ in range(num_rows)]
    close = 1e-6 if implementation.is_triton else 1e-5  # Triton decides in float64
    for margin, winner in ((close, 0), (-close, 1)):
        logits = torch.full((num_rows, vocab_size), -torch.inf)
        for row, pair in enumerate(pairs):
            noise = [gumbel(int(asked["seeds"][row]), int(asked["positions"][row]), t) for t in pair]
            logits[row, pair] = torch.tensor([noise[1] - noise[0] + margin, 0.0])
        assert draw(implementation, logits, asked).tolist() == [pair[winner] for pair in pairs]


def test_logits_may_be_a_view(implementation: Implementation) -> None:
    wide, asked = random_logits(4, 300), columns(4, RESTRICTIONS[4:])
    for part in (wide[:, 7:290], wide[:, ::2], wide.T[:4].T):
        asked_here = pick(asked, slice(len(part)))
        assert torch.equal(
            draw(implementation, part, asked_here), draw(implementation, part.contiguous(), asked_here)
        )


def test_the_logits_are_not_written(implementation: Implementation) -> None:
    logits = random_logits(10, 65)
    before = logits.clone()
    draw(implementation, logits, columns(10, RESTRICTIONS))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6, 1e38])
def test_extreme_temperatures_draw_like_the_reference(
    temperature: float, implementation: Implementation
) -> None:
    if implementation.name == "torch":
        pytest.skip("plain torch divides in float32")
    filters = ({}, {"top_k": 9}, {"top_p": 0.5})
    asked = columns(4, [{"temperature": temperature, **each} for each in filters])
    logits = random_logits(4, 60)
    assert torch.equal(draw(implementation, logits, asked), sample(logits, **asked, impl="reference"))


def test_rows_without_usable_logits_affect_no_other(implementation: Implementation) -> None:
    asked = columns(12, [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.7}])
    logits = random_logits(12, 5000)
    expected = draw(implementation, logits, asked)
    bad = {1: torch.nan, 3: torch.nan, 5: torch.inf, 6: torch.inf, 8: -torch.nan}
    for row, value in bad.items():
        logits[row, 4500] = value
        expected[row] = -1
    logits[9:] = -torch.inf
    expected[9:] = -1
    assert torch.equal(draw(implementation, logits, asked), expected)


def test_minus_zero_equals_zero(implementation: Implementation) -> None:
    logits = torch.zeros(1, 9001)
    logits[0, 3:7] = -0.0
    assert draw(implementation, logits, columns(1, [{"temperature": 0.0}])).tolist() == [0]


@pytest.mark.parametrize(("seed", "num_rows", "vocab_size"), [(0, 3, 32_003), (1, 5, 9001), (2, 7, 9001)])
def test_large_vocabularies_are_sampled_like_in_torch(
    seed: int, num_rows: int, vocab_size: int, implementation: Implementation
) -> None:
    # random; many equals; half of them masked
    logits, asked = random_case(seed, vocab_size)
    rows = slice(9 * seed, 9 * seed + num_rows)
    logits, asked = logits[rows], pick(asked, rows)
    assert torch.equal(draw(implementation, logits, asked), sample(logits, **asked, impl="torch"))


def test_shapes_and_dtypes_that_disagree_are_named() -> None:
    asked = columns(2, [{}])
    with pytest.raises(ValueError, match=r"logits \[2, 5\] torch.bfloat16 must be"):
        sample(torch.zeros(2, 5, dtype=torch.bfloat16), **asked)
    with pytest.raises(ValueError, match=r"top_p \[1\] torch.float32 does not fit logits \[2, 5\]"):
        sample(torch.zeros(2, 5), **{**asked, "top_p": torch.ones(1)})
    with pytest.raises(ValueError, match=r"top_k \[2\] torch.int64 .* it must be \[num_rows\] torch.int32"):
        sample(torch.zeros(2, 5), **{**asked, "top_k": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"rows \[2\] torch.int32 must be \[num_rows\] torch.int64"):
        sample(torch.zeros(2, 5), **asked, rows=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"temperature \[2\] torch.float32 does not fit"):
        sample(torch.zeros(2, 5), **asked, rows=torch.zeros(1, dtype=torch.int64))
    numbers, words = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"masks.rows \[1\] torch.int32 must be \[2\] torch.int32"):
        sample(torch.zeros(2, 5), **asked, masks=TokenMasks(numbers[:1], words))
    with pytest.raises(
        ValueError, match=r"masks.words \[1, 1\] torch.int32 do not fit 33 tokens.* 2\] torch"
    ):
        sample(torch.zeros(2, 33), **asked, masks=TokenMasks(numbers, words))


def _model_call(num_rows: int, vocab_size: int, *, is_masked: bool = False) -> Tensor:
    masks = TokenMasks(
        meta(num_rows, dtype=torch.int32), meta(num_rows, -(-vocab_size // 32), dtype=torch.int32)
    )
    return sample(
        meta_float32(num_rows, vocab_size),
        temperature=meta_float32(num_rows),
        top_k=meta(num_rows, dtype=torch.int32),
        top_p=meta_float32(num_rows),
        min_p=meta_float32(num_rows),
        seeds=meta_int64(num_rows),
        positions=meta_int64(num_rows),
        rows=meta_int64(num_rows) if is_masked else None,
        masks=masks if is_masked else None,
        impl="triton",
    )


MODEL_CALLS = {
    "49152": ModelCall(lambda: _model_call(1, 49152)),
    "128256": ModelCall(lambda: _model_call(256, 128256)),
    "262144": ModelCall(lambda: _model_call(64, 262144)),
    "128256 masked": ModelCall(lambda: _model_call(32, 128256, is_masked=True)),
}


def launch_small(draw: SmallOperands) -> None:
    column, number = torch.linspace(0.0, 1.0, 6, device=draw.device), torch.arange(6, device=draw.device)
    words = torch.arange(2 * -(-draw.vocab_size // 32), dtype=torch.int32, device=draw.device)
    masks = TokenMasks((number % 3 - 1).to(torch.int32), words.view(2, -1))
    filters = ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.8, 0.01))
    for (top_k, top_p, min_p), given in product(filters, ({}, {"rows": number.flip(0), "masks": masks})):
        sample(
            torch.randn(6, draw.vocab_size, device=draw.device) * 3,
            temperature=column,
            top_k=torch.full((6,), top_k, dtype=torch.int32, device=draw.device),
            top_p=torch.full((6,), top_p, device=draw.device),
            min_p=torch.full((6,), min_p, device=draw.device),
            seeds=number,
            positions=number,
            **given,
            impl="triton",
        )
