"""The native kernel at the size of real vocabularies: as plain torch, however its threads share the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.ops.test_sample import random_case
from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import sample

NUM_ROWS = 64


@pytest.fixture(
    params=usable_isas() or [pytest.param("", marks=pytest.mark.skip(reason="no native kernels"))],
    autouse=True,
)
def each_isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with forced_isa(request.param):
        yield
        use_threads(1)


@pytest.mark.parametrize("seed", range(12))
def test_samples_like_plain_torch_with_any_number_of_threads(seed: int) -> None:
    vocab_size = (129, 1000, 8195, 20_001)[seed % 4]
    logits, asked = random_case(seed, vocab_size)
    expected = sample(logits, **asked, impl="torch")
    assert len(expected.unique()) > NUM_ROWS // 4
    for num_threads in (1, 2, NUM_ROWS):  # the last: too few rows, so that segments are shared
        use_threads(num_threads)
        assert torch.equal(sample(logits, **asked), expected)


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 8192, 8193])
def test_equal_logits_are_all_kept(vocab_size: int) -> None:
    _, asked = random_case(0, vocab_size)
    logits = torch.full((NUM_ROWS, vocab_size), 3.0)
    assert torch.equal(sample(logits, **asked), sample(logits, **asked, impl="torch"))


def test_no_memory_beside_the_logits_is_read() -> None:
    logits, asked = random_case(4, 1003)
    surrounded = torch.full((NUM_ROWS, 1003 + 128), torch.inf)
    surrounded[:, 64:-64] = logits
    assert torch.equal(sample(surrounded[:, 64:-64], **asked), sample(logits, **asked))
