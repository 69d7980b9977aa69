"""The Triton sample: the reference's tokens, and thresholds that keep exactly what the filters say."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.test_native_sample import random_case
from tests.kernels.test_sample import RESTRICTIONS, columns, pick, random_logits
from tests.kernels.triton.poison import poisoned_allocations
from triptych_kernels.ops import sample
from triptych_kernels.reference.sampling import gumbel, token_word
from triptych_kernels.triton.sampling import philox


def draw(logits: Tensor, asked: dict[str, Tensor], device: torch.device) -> Tensor:
    """Return the tokens that the kernels choose, on the host."""
    with poisoned_allocations():
        on_device = {name: column.to(device) for name, column in asked.items()}
        return sample(logits.to(device), **on_device, impl="triton").cpu()


@pytest.mark.parametrize("vocab_size", [1, 7, 130, 1000])
def test_samples_like_the_reference(vocab_size: int, device: torch.device) -> None:
    logits, asked = random_logits(10, vocab_size), columns(10, RESTRICTIONS)
    assert torch.equal(draw(logits, asked, device), sample(logits, **asked, impl="reference"))


@pytest.mark.parametrize(("seed", "num_rows", "vocab_size"), [(0, 3, 32_003), (1, 5, 9001), (2, 7, 9001)])
def test_samples_like_plain_torch_from_a_large_vocabulary(
    seed: int, num_rows: int, vocab_size: int, device: torch.device
) -> None:
    # random; many equals; half of them masked
    logits, asked = random_case(seed, vocab_size)
    rows = slice(9 * seed, 9 * seed + num_rows)
    logits, asked = logits[rows], pick(asked, rows)
    assert torch.equal(draw(logits, asked, device), sample(logits, **asked, impl="torch"))


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6, 1e38])
def test_extreme_temperatures_draw_like_the_reference(temperature: float, device: torch.device) -> None:
    asked = columns(
        4, [{"temperature": temperature, **filters} for filters in ({}, {"top_k": 9}, {"top_p": 0.5})]
    )
    logits = random_logits(4, 60)
    assert torch.equal(draw(logits, asked, device), sample(logits, **asked, impl="reference"))


def test_no_row_gives_no_token(device: torch.device) -> None:
    assert draw(random_logits(0, 7), columns(0, [{}]), device).shape == (0,)


def test_greedy_finds_the_first_of_the_largest_wherever_it_stands(device: torch.device) -> None:
    places = [0, 4095, 4096, 9000]
    logits = random_logits(len(places) + 1, 9001)
    for row, place in enumerate(places):
        logits[row, [place, 9000]] = 50.0
    logits[-1] = 0.0
    logits[-1, 3:7] = -0.0  # equal to 0
    assert draw(logits, columns(5, [{"temperature": 0.0}]), device).tolist() == [*places, 0]


def test_rows_without_usable_logits_get_none_and_disturb_no_other(device: torch.device) -> None:
    logits, asked = (
        random_logits(12, 5000),
        columns(12, [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.7}]),
    )
    expected = draw(logits, asked, device)
    for row, bad in zip(
        (1, 3, 5, 6, 8), (torch.nan, torch.nan, torch.inf, torch.inf, -torch.nan), strict=True
    ):
        logits[row, 4500] = bad
        expected[row] = -1
    logits[9:] = -torch.inf
    expected[9:] = -1
    assert torch.equal(draw(logits, asked, device), expected)


def test_a_row_keeps_its_token_in_any_company(device: torch.device) -> None:
    logits, asked = random_logits(8, 5001), columns(8, RESTRICTIONS)
    together = draw(logits, asked, device)
    for row in (0, 7):
        alone = slice(row, row + 1)
        assert torch.equal(draw(logits[alone], pick(asked, alone), device), together[alone])


def test_logits_may_be_a_part_of_a_wider_tensor(device: torch.device) -> None:
    wide, asked = random_logits(4, 300), columns(4, RESTRICTIONS[4:])
    for part in (wide[:, 7:290], wide[:, ::2]):
        assert torch.equal(draw(part, asked, device), draw(part.contiguous(), asked, device))


def test_the_noise_of_a_token_decides_within_its_digits(device: torch.device) -> None:
    # of two tokens the first wins as soon as its logit makes up for the difference of their noise
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab_size = 10, 5000
    asked = columns(num_rows, [{}, {"min_p": 1e-12}])
    asked["seeds"] = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    asked["positions"] = torch.randint(0, 2**40, (num_rows,), generator=generator)
    pairs = [torch.randperm(vocab_size, generator=generator)[:2].tolist() for _ in range(num_rows)]
    for margin, winner in ((1e-6, 0), (-1e-6, 1)):
        logits = torch.full((num_rows, vocab_size), -torch.inf)
        for row, pair in enumerate(pairs):
            noise = [gumbel(int(asked["seeds"][row]), int(asked["positions"][row]), t) for t in pair]
            logits[row, pair] = torch.tensor([noise[1] - noise[0] + margin, 0.0])
        assert draw(logits, asked, device).tolist() == [pair[winner] for pair in pairs]


@triton.jit
def _store_words(out, seed, position, first_quad):
    seed, position = tl.load(seed), tl.load(position)
    quads = first_quad + tl.arange(0, 8)
    token = tl.arange(0, 32)
    words = tl.reshape(philox.words_of_quads(seed, position, quads), (32,))
    tl.store(out + token, words.to(tl.int64))


@triton.jit
def _store_exponentials(out, words):
    index = tl.arange(0, 8)
    word = tl.load(words + index).to(tl.uint32)
    tl.store(out + index, philox.exponential(word))


@pytest.mark.parametrize(("seed", "position"), [(2**62 + 12345, 2**33 + 5), (-(2**63) + 17, 1), (-1, 2**40)])
def test_words_are_those_of_the_reference(seed: int, position: int, device: torch.device) -> None:
    words = torch.empty(32, dtype=torch.int64, device=device)
    columns = (torch.tensor([column], device=device) for column in (seed, position))
    _store_words[(1,)](words, *columns, 25)
    assert words.tolist() == [token_word(seed, position, token_id) for token_id in range(100, 132)]


def test_clocks_are_exact_at_both_ends(device: torch.device) -> None:
    words = torch.tensor([0, 1, 2**31, 0xFDFFFFFF, 0xFE000000, 0xFFFF0000, 2**32 - 2, 2**32 - 1])
    clocks = torch.empty(8, device=device)
    _store_exponentials[(1,)](clocks, words.to(device))
    expected = -((words.double() + 0.5) * 2.0**-32).log()
    torch.testing.assert_close(clocks.cpu().double(), expected, rtol=1e-5, atol=0)
