"""The tiles of the kernels of paged attention by size of head, and the number of their programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
import triton
from torch import Tensor

from triptych_kernels.triton.tuning.tunable import Tunable

MAX_HEAD_DIM = 256

_SHARED_BYTES = 227 << 10  # of a multiprocessor, at compute capability 9.0

_INTERPRETED_SMS = 2
"""Number of multiprocessors in the interpreter: few, so that programs take several items each, as on a device."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tiles of the kernel of rows with one query."""

    block_n: int
    """Keys of one step."""
    num_warps: int
    num_stages: int
    """The step that is computed, and those that load their keys and values at the same time."""
    programs_per_sm: int = 2
    """Number of programs that a multiprocessor holds at once; the grid has as many for every step."""


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tiles of the kernel of longer rows."""

    block_m: int
    """Rows of the score matrix: query tokens times the query heads that share a key head."""
    block_n: int
    """Keys of one step."""
    num_warps: int
    num_stages: int


# Where nothing is stored for a device: by the largest head_dim that an entry serves, in ascending order. Chosen from
# what the compiler says of registers and shared memory for compute capability 9.0 (64 Ki registers and 227 KiB a
# multiprocessor; none of these spills), not from measurements.

_DECODE = {  # 16 bits
    # 16 KiB of keys and 16 of values a step, three steps on their way in each of two programs: 192 KiB a
    # multiprocessor. About 30 cover the latency of memory at its full rate; the rest hides reductions between steps and
    # the start of a program's next item.
    64: DecodeTiles(block_n=128, num_warps=4, num_stages=4),
    128: DecodeTiles(block_n=64, num_warps=4, num_stages=4),
    256: DecodeTiles(block_n=32, num_warps=4, num_stages=4),
}
_DECODE_8_BIT = {
    # as many bytes, since a step's fixed cost would count twice otherwise; at 256 that would spill
    64: DecodeTiles(block_n=256, num_warps=4, num_stages=3),
    128: DecodeTiles(block_n=128, num_warps=4, num_stages=4),
    256: DecodeTiles(block_n=32, num_warps=4, num_stages=4),
}
_PREFILL = {
    # 128 rows, so that what is loaded serves enough products: at 64 the second-level cache would limit them. Eight
    # warps share them, since four would spill. At 64 dimensions two programs fit a multiprocessor, and one's softmax
    # runs beside the other's products.
    64: PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3),
    128: PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3),
    256: PrefillTiles(block_m=128, block_n=32, num_warps=8, num_stages=3),
}
# fewer keys a step, since those of 8 bits are widened in registers, where 32 would spill
_PREFILL_8_BIT = _PREFILL | {256: PrefillTiles(block_m=128, block_n=16, num_warps=8, num_stages=3)}
# Of queries or caches of float32, which are multiplied exactly and without tensor cores: for tests, not for speed, and
# spilling where heads are large.
_DECODE_FLOAT32 = DecodeTiles(block_n=32, num_warps=4, num_stages=1)
_PREFILL_FLOAT32 = PrefillTiles(block_m=32, block_n=32, num_warps=4, num_stages=1)


def _default_decode_tiles(head_dim: int, kv_dtype: torch.dtype, block_m: int) -> DecodeTiles:
    table = _DECODE_8_BIT if kv_dtype.itemsize == 1 else _DECODE
    return next(tiles for largest, tiles in table.items() if head_dim <= largest)


def _decode_candidates(head_dim: int, kv_dtype: torch.dtype, block_m: int) -> Iterator[DecodeTiles]:
    """Yield tiles with 8 to 32 KiB of keys a step that keep enough bytes in flight and fit shared memory."""
    key_bytes = triton.next_power_of_2(head_dim) * kv_dtype.itemsize
    for block_n, num_warps, num_stages, programs in product(
        (32, 64, 128, 256), (4, 8), (2, 3, 4, 5), (1, 2, 3)
    ):
        on_their_way = (num_stages - 1) * 2 * block_n * key_bytes * programs
        if 2**13 <= block_n * key_bytes <= 2**15 and 96 << 10 <= on_their_way <= _SHARED_BYTES:
            yield DecodeTiles(block_n, num_warps, num_stages, programs)


def _default_prefill_tiles(head_dim: int, kv_dtype: torch.dtype) -> PrefillTiles:
    table = _PREFILL_8_BIT if kv_dtype.itemsize == 1 else _PREFILL
    return next(tiles for largest, tiles in table.items() if head_dim <= largest)


def _prefill_candidates(head_dim: int, kv_dtype: torch.dtype) -> Iterator[PrefillTiles]:
    """Yield tiles with accumulators that fit the registers and stages that fit shared memory."""
    block_d = triton.next_power_of_2(head_dim)
    for block_m, block_n, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        # in registers of 4 bytes a thread: the sums, and the scores with the weights made of them
        registers = block_m * (block_d + 2 * block_n) // (32 * num_warps)
        shared_bytes = num_stages * 2 * block_n * block_d * kv_dtype.itemsize + 2 * block_m * block_d
        if 48 <= registers <= 192 and shared_bytes <= _SHARED_BYTES:
            yield PrefillTiles(block_m, block_n, num_warps, num_stages)


# Neither key varies with the batch: how many keys a step has decides the order in which a query's are added.
DECODE = Tunable(
    "paged_attention_decode",
    ("head_dim", "kv_dtype", "block_m"),
    default=_default_decode_tiles,
    candidates=_decode_candidates,
)
PREFILL = Tunable(
    "paged_attention_prefill",
    ("head_dim", "kv_dtype"),
    default=_default_prefill_tiles,
    candidates=_prefill_candidates,
)


def decode_tiles(query: Tensor, kv_dtype: torch.dtype, head_dim: int, block_m: int) -> DecodeTiles:
    """Return the tiles for rows with one query.

    Args:
        block_m: Rows of the score matrix: the query heads that share a key head, at least what tensor cores multiply.
    """
    if kv_dtype == torch.float32 or query.dtype == torch.float32:
        return _DECODE_FLOAT32
    return DECODE.chosen(query.device, head_dim, kv_dtype, block_m)


def prefill_tiles(query: Tensor, kv_dtype: torch.dtype, head_dim: int) -> PrefillTiles:
    """Return the tiles for rows with several queries."""
    if kv_dtype == torch.float32 or query.dtype == torch.float32:
        return _PREFILL_FLOAT32
    return PREFILL.chosen(query.device, head_dim, kv_dtype)


def rows_block(num_rows: int) -> int:
    """Return the length of a kernel's vectors over rows: one of a few lengths, since each is a compilation."""
    return 128 if num_rows <= 128 else max(triton.next_power_of_2(num_rows), 1024)


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type == "cpu":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
