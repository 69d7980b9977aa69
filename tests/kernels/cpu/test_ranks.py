"""Sums and gathers through shared memory: the same bits on all ranks, whatever the sizes and whoever is late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import record
from triptych_kernels.cpu.ranks import SharedRanks, create_file
from triptych_kernels.cpu.recording import Recording

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

TIMEOUT_S = 60.0


def on_ranks(folder: Path, num_ranks: int, compute: Callable[[SharedRanks, int], Tensor]) -> list[Tensor]:
    """Return the result of each rank, computed on a thread of its own: kernels hold no lock of the interpreter."""
    file = create_file(folder, num_ranks)
    ranks = [
        SharedRanks(file, rank=rank, num_ranks=num_ranks, timeout_s=TIMEOUT_S) for rank in range(num_ranks)
    ]
    file.unlink()
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(compute, ranks, range(num_ranks)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (5, 65536), (200, 1001)], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_gets_the_sum_in_the_order_of_ranks(
    num_ranks: int, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(num_ranks)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    sums = on_ranks(tmp_path, num_ranks, lambda ranks, rank: ranks.all_reduce(parts[rank].clone()))
    assert all(torch.equal(total, expected.to(dtype)) for total in sums)


@pytest.mark.parametrize("lengths", [(1,), (4, 3), (16, 16, 1), (70000, 5), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_columns_of_all_ranks_are_side_by_side(
    num_rows: int, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    parts = [torch.randn(num_rows, length) for length in lengths]
    gathered = on_ranks(tmp_path, len(lengths), lambda ranks, rank: ranks.all_gather(parts[rank], lengths))
    assert all(torch.equal(whole, torch.cat(parts, dim=1)) for whole in gathered)


def test_ranks_that_are_late_by_turns_mix_nothing_up(tmp_path: Path) -> None:
    num_ranks, num_turns = 3, 60

    def compute(ranks: SharedRanks, rank: int) -> Tensor:
        totals = []
        for turn in range(num_turns):
            if turn % num_ranks == rank:
                time.sleep(0.002)
            totals.append(ranks.all_reduce(torch.full((4, 100), float(turn * 10 + rank)))[0, 0])
            ranks.all_gather(torch.full((2, 3), float(turn)), (3,) * num_ranks)
        return torch.stack(totals)

    expected = torch.tensor([num_ranks * turn * 10.0 + 3 for turn in range(num_turns)])
    assert all(torch.equal(totals, expected) for totals in on_ranks(tmp_path, num_ranks, compute))


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    file = create_file(tmp_path, 2)
    ranks = SharedRanks(file, rank=0, num_ranks=2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="sum_over_ranks: another rank has not come in time"):
        ranks.all_reduce(torch.ones(2, 2))


def test_sums_and_gathers_are_part_of_recorded_programs(tmp_path: Path) -> None:
    num_ranks, lock = 2, threading.Lock()

    def compute(ranks: SharedRanks, rank: int) -> Tensor:
        memory = torch.zeros(8, 6)

        def forward(recording: Recording) -> tuple[Tensor, ...]:
            x = recording.input(memory, count="rows")
            return (ranks.all_gather(ranks.all_reduce(x), (6, 6)),)

        with lock:  # a process records one program at a time
            program = record(forward)
        memory[:3] = float(rank + 1)
        program.run({"rows": 3})
        return program.outputs[0][:3].clone()

    assert all(torch.equal(out, torch.full((3, 12), 3.0)) for out in on_ranks(tmp_path, num_ranks, compute))
