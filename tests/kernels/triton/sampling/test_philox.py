"""The noise of the Triton kernels against the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from triptych_kernels.reference.sampling import token_word
from triptych_kernels.triton.sampling import race as philox


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
