"""Memory in huge pages: zeros, aligned, never shared by two tensors, given back when nobody holds it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from triptych_kernels.cpu.memory import zeros_in_huge_pages


def test_tensors_are_zero_aligned_and_apart() -> None:
    parts = [zeros_in_huge_pages((size, 3), torch.bfloat16) for size in (1, 7, 1000, 1, 20_000_000)]
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        assert not part.any()
        part.fill_(number + 1)
    for number, part in enumerate(parts):
        assert bool((part == number + 1).all())


def test_an_empty_tensor_has_its_shape() -> None:
    assert zeros_in_huge_pages((0, 5), torch.float32).shape == (0, 5)


@pytest.mark.thorough
def test_a_large_one_takes_what_is_touched_and_gives_it_back() -> None:
    gc.collect()
    before = resident_bytes()
    whole = zeros_in_huge_pages((1 << 30,), torch.uint8)
    whole[: 32 << 20] = 1
    assert (
        31 << 20 <= resident_bytes() - before < 128 << 20
    )  # the process may give back some pages of its own
    del whole
    gc.collect()
    assert resident_bytes() - before < 16 << 20


def resident_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024
