"""The kernels' threads: every index once, from several callers, at any number of threads, and no CPU when idle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from triptych_kernels.cpu.library import isa, use_threads
from triptych_kernels.ops import embedding, linear
from triptych_kernels.weights.packed import PackedWeight


@pytest.fixture(autouse=True)
def needs_library() -> Iterator[None]:
    if not isa():
        pytest.skip("no native kernels are built for this processor")
    yield
    use_threads(1)


def product() -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    weight = PackedWeight(512, 64, torch.float32)
    weight.fill_rows(0, torch.randn(512, 64, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    use_threads(1)
    return weight, x, linear(x, weight)


def test_thousands_of_short_loops_compute_every_index() -> None:
    weight, x, expected = product()
    for num_threads in (2, 4, 3):
        use_threads(num_threads)
        for _ in range(2000):
            assert torch.equal(linear(x, weight), expected)


def test_threads_take_from_the_parts_of_others() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_outputs in (32, 33, 65, 97, 1000):  # fewer panels than threads, and parts of different sizes
        weight = PackedWeight(num_outputs, 8, torch.float32)
        weight.fill_rows(0, torch.randn(num_outputs, 8, generator=generator))
        x = torch.randn(1, 8, generator=generator)
        use_threads(1)
        expected = linear(x, weight)
        for num_threads in (2, 3, 7):  # more than there are cores: some threads come late
            use_threads(num_threads)
            for _ in range(100):
                assert torch.equal(linear(x, weight), expected)


def test_more_indices_than_a_ticket_counts_are_all_computed() -> None:
    use_threads(2)
    table = torch.arange(7, dtype=torch.float32)[:, None].repeat(1, 2)
    token_ids = torch.arange(2_200_000) % 7
    assert torch.equal(embedding(token_ids, table), table[token_ids])


def test_callers_on_several_threads_take_turns() -> None:
    weight, x, expected = product()
    use_threads(3)
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(300):
            if not torch.equal(linear(x, weight), expected):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
        assert not caller.is_alive(), "a caller waits for a loop that never ends"
    assert wrong == []


def test_idle_threads_sleep() -> None:
    weight, x, _ = product()
    use_threads(2)
    linear(x, weight)
    # The first half second may have the moment for which they spin, and other threads of this process may work in some.
    assert any(cpu_s_of_half_a_second() < 0.1 for _ in range(20))


def cpu_s_of_half_a_second() -> float:
    before = os.times()
    time.sleep(0.5)
    after = os.times()
    return after.user + after.system - before.user - before.system
