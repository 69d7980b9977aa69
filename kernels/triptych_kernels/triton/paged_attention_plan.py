"""How the kernels of paged attention are cut: the tiles for a size of head, and how many programs there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

MAX_HEAD_DIM = 256

_INTERPRETED_SMS = 2
"""Multiprocessors where kernels are interpreted: few, so that programs take several items each, as on a device."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one kernel is cut, at one size of head."""

    block_n: int
    """Keys of one step."""
    num_warps: int
    num_stages: int
    """One step that is computed on, and those whose keys and values are on their way meanwhile."""
    block_m: int = 16
    """Rows of the score matrix: query tokens times the query heads that share a key head. Only prefills ask; decodes
    have one token and take what their heads need, at least 16, the least that tensor cores multiply."""
    programs_per_sm: int = 2
    """How many a multiprocessor holds at once. Only decodes ask: their grid is that large, whatever the step."""


# By the largest head_dim that an entry serves, in ascending order. Chosen from what the compiler says of registers and
# shared memory for compute capability 9.0 (64 Ki registers and 227 KiB a multiprocessor; none of these spills), not yet
# from measurements.

_DECODE = {  # 16 bits
    # 16 KiB of keys and 16 of values a step, three steps on their way in each of two programs: 192 KiB a
    # multiprocessor. About 30 cover the latency of memory at its full rate; the rest hides reductions between steps and
    # the start of a program's next item.
    64: Tiles(block_n=128, num_warps=4, num_stages=4),
    128: Tiles(block_n=64, num_warps=4, num_stages=4),
    256: Tiles(block_n=32, num_warps=4, num_stages=4),
}
_DECODE_8_BIT = {
    # as many bytes, since a step's fixed cost would count twice otherwise; at 256 that would spill
    64: Tiles(block_n=256, num_warps=4, num_stages=3),
    128: Tiles(block_n=128, num_warps=4, num_stages=4),
    256: Tiles(block_n=32, num_warps=4, num_stages=4),
}
_PREFILL = {
    # 128 rows, so that what is loaded serves enough products: at 64 the second-level cache would limit them. Eight
    # warps share them, since four would spill. At 64 dimensions two programs fit a multiprocessor, and one's softmax
    # runs beside the other's products.
    64: Tiles(block_n=64, num_warps=8, num_stages=3, block_m=128),
    128: Tiles(block_n=64, num_warps=8, num_stages=3, block_m=128),
    256: Tiles(block_n=32, num_warps=8, num_stages=3, block_m=128),
}
_FLOAT32 = Tiles(block_n=32, num_warps=4, num_stages=1, block_m=32)
"""Of queries or caches of float32, which are multiplied exactly and without tensor cores: for tests, not for speed, and
spilling where heads are large."""


def decode_tiles(query: Tensor, kv_cache: Tensor) -> Tiles:
    """Of rows with one query."""
    return _tiles(_DECODE_8_BIT if kv_cache.itemsize == 1 else _DECODE, query, kv_cache)


def prefill_tiles(query: Tensor, kv_cache: Tensor) -> Tiles:
    """Of rows with more."""
    return _tiles(_PREFILL, query, kv_cache)


def _tiles(table: dict[int, Tiles], query: Tensor, kv_cache: Tensor) -> Tiles:
    if torch.float32 in (query.dtype, kv_cache.dtype):
        return _FLOAT32
    return next(tiles for head_dim, tiles in table.items() if query.shape[2] <= head_dim)


def rows_block(num_rows: int) -> int:
    """Length of the vectors over rows in a kernel: few different ones, since each is a compilation."""
    return 128 if num_rows <= 128 else max(triton.next_power_of_2(num_rows), 1024)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type == "cpu":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
