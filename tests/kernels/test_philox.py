"""Philox4x32-10: published vectors, bit by bit, in the reference and in every implementation."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.reference import sampling as reference
from triptych_kernels.torch.sampling import philox4x32 as torch_philox4x32

ONES = 0xFFFFFFFF

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_reference_gives_the_published_words(
    counter: reference.Words4, key: tuple[int, int], expected: reference.Words4
) -> None:
    assert reference.philox4x32(counter, key) == expected


def test_torch_gives_the_published_words_for_all_vectors_at_once() -> None:
    counters, keys, expected = (torch.tensor(column) for column in zip(*KNOWN_ANSWERS, strict=True))
    words = torch_philox4x32(counters.unbind(1), keys.unbind(1))
    assert torch.equal(torch.stack(words, dim=1), expected)


def test_torch_broadcasts_counter_and_key_like_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    position, key = (torch.randint(0, ONES, (5, 1, 2), generator=generator) for _ in range(2))
    quads = torch.randint(0, ONES, (1, 7), generator=generator)
    stream = torch.zeros_like(quads)
    words = torch_philox4x32((position[..., 0], position[..., 1], quads, stream), (key[..., 0], key[..., 1]))
    for row in range(5):
        for column in range(7):
            counter = (*position[row, 0].tolist(), int(quads[0, column]), 0)
            expected = reference.philox4x32(counter, tuple(key[row, 0].tolist()))
            assert tuple(int(word[row, column]) for word in words) == expected


def test_a_token_owns_one_lane_of_its_counter() -> None:
    seed, position = 0x299F31D0A4093822, 5
    words = reference.philox4x32((5, 0, 3, 0), (0xA4093822, 0x299F31D0))
    assert [reference.token_word(seed, position, token_id) for token_id in (12, 13, 14, 15)] == list(words)


def test_positions_and_seeds_use_all_their_bits() -> None:
    words = {
        reference.token_word(seed, position, 0)
        for seed in (1, 1 + (1 << 32))
        for position in (1, 1 + (1 << 32))
    }
    assert len(words) == 4
    assert reference.token_word(-1, 0, 0) == reference.token_word((1 << 64) - 1, 0, 0)
