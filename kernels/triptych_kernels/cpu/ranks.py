"""Sums and gathers over the ranks of one machine by native kernels, which can be part of a recorded program."""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from triptych_kernels.cpu.dtypes import DTYPES
from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import isa, load

MAX_RANKS = 64
"""As `kMaxRanks` in shared_memory.cpp."""


class SharedRanks:
    """The memory by which the ranks of one machine exchange tensors. All of them call the same methods in the same
    order, each from one thread."""

    def __init__(self, file: Path, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Map the memory that `create_file` has made; the file may be deleted when all ranks have.

        Args:
            timeout_s: For how long a rank waits for the others.

        Raises:
            OSError: The file is not there, or cannot be mapped.
        """
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        self._ranks = {
            "ranks_memory": ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            "ranks_rank": rank,
            "ranks_num_ranks": num_ranks,
            "ranks_timeout_ms": round(timeout_s * 1000),
        }
        self._lengths_to_starts: dict[tuple[int, ...], ctypes.Array[ctypes.c_int64]] = {}
        """Numbers of columns -> the first column of each rank, which recorded programs read as well."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x, contiguous in float32 or bfloat16, by its sum over the ranks, with the same bits on all of them.

        Raises:
            TimeoutError: Another rank has not come in time.
        """
        launch("sum_over_ranks", x, **self._ranks, dtype=DTYPES[x.dtype], x=x, size=x.shape[1:].numel())
        return x

    def all_gather(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Put the columns of all ranks side by side.

        Args:
            x: [num_rows, lengths[rank]] float32, contiguous.
            lengths: Number of columns of each rank.

        Raises:
            TimeoutError: Another rank has not come in time.
        """
        starts = self._lengths_to_starts.get(lengths)
        if starts is None:
            starts = (ctypes.c_int64 * (len(lengths) + 1))(0, *accumulate(lengths))
            self._lengths_to_starts[lengths] = starts
        out = torch.empty(len(x), sum(lengths), dtype=x.dtype, device=x.device)
        launch("gather_over_ranks", x, **self._ranks, x=x, starts=ctypes.addressof(starts), out=out)
        return out


def create_file(folder: Path, num_ranks: int) -> Path:
    """Make a file of the memory that so many ranks share, and return it.

    Raises:
        OSError: The folder has no room for it.
    """
    shared_bytes = load(isa()).triptych_shared_bytes
    shared_bytes.argtypes, shared_bytes.restype = [ctypes.c_int64], ctypes.c_int64
    file = folder / f"triptych-ranks-{os.getpid()}-{os.urandom(8).hex()}"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(
            descriptor, 0, shared_bytes(num_ranks)
        )  # a full file system says so now, not by SIGBUS
    except OSError:
        file.unlink()
        raise
    finally:
        os.close(descriptor)
    return file
