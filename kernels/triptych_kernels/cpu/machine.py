"""The rates at which this machine multiplies and reads, measured once per kind of machine and kept in a file."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from triptych_kernels.cpu.library import (
    isa,
    load,
    processor_flags,
    raise_failure,
    threads_in_use,
    use_threads,
)
from triptych_kernels.cpu.machine_files import Json, machine_key, read_or_make
from triptych_kernels.cpu.memory import zeros_in_huge_pages

log = logging.getLogger(__name__)

PRODUCTS = ("float32", "bfloat16", "int16", "int8", "tile_bfloat16", "tile_int8")
"""Fields of `Rates` in the order of `kProducts` in machine.cpp."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_MIN_ROUNDS = 6
_SETTLED_ROUNDS = 4  # so many rounds without a better figure end the measurement
_BETTER = 1.01
_LIMIT_S = 0.7  # for one number of threads; only a loaded machine takes so long
_WIDE_MARGIN = 1.2
_MIB = 1 << 20
_READ_STEP = 512  # bytes: what machine.cpp reads in one turn of its loop

_WITH_BFLOAT16 = ("amx", "avx512_bf16", "neon_bf16")
_WITH_BYTE_PRODUCTS = ("amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "neon_bf16")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one thread, or of several together.

    Products are in 10^9 operations per second, where a multiplication and an addition are two; reading is in 10^9 bytes
    per second. 0 means that the instruction set has no such product or the processor no such cache, or that nothing was
    measured.
    """

    float32: float = 0.0
    bfloat16: float = 0.0
    """Products of pairs of bfloat16, summed in float32, in vectors."""
    int16: float = 0.0
    """Products of pairs of 16-bit integers, summed in 32 bits."""
    int8: float = 0.0
    """Products of 8-bit integers, those of one operand without a sign, summed in 32 bits by one instruction."""
    tile_bfloat16: float = 0.0
    """Products of bfloat16 in the tiles of AMX."""
    tile_int8: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    l3: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates of this machine with one instruction set, and the arithmetic that is the faster one by them.

    Arithmetic is chosen by one thread's rates, which other processes disturb least, and by a wide margin, so that equal
    machines choose alike: ratios are 0.5, 2 or more, and those of 2 were never below 1.3 where a neighbour kept the
    core's other half busy.
    """

    isa: str
    """Instruction set, as of `library.isa`; empty without native kernels."""
    num_threads: int
    one_thread: Rates
    all_threads: Rates
    """Rates of `num_threads` threads together."""

    @property
    def is_measured(self) -> bool:
        """Whether there are rates; if not, the instruction set decides which arithmetic is preferred."""
        return self.one_thread.float32 > 0.0

    @property
    def prefers_bfloat16(self) -> bool:
        """Whether products of bfloat16 are faster than those of float32."""
        if not self.is_measured:
            return self.isa in _WITH_BFLOAT16
        rates = self.one_thread
        return (rates.tile_bfloat16 or rates.bfloat16) >= _WIDE_MARGIN * rates.float32

    @property
    def prefers_8_bit_inputs(self) -> bool:
        """Whether products of 8-bit integers are faster than those of 16-bit integers."""
        if not self.is_measured:
            return self.isa in _WITH_BYTE_PRODUCTS
        return self.one_thread.int8 >= _WIDE_MARGIN * self.one_thread.int16


_isa_to_rates: dict[str, MachineRates] = {}
"""Rates that `load_rates` has read or measured in this process."""


def rates() -> MachineRates:
    """Return the rates with the instruction set in use; they are unmeasured unless `load_rates` was called before."""
    return _isa_to_rates.get(isa()) or MachineRates(isa(), 1, Rates(), Rates())


def load_rates(num_threads: int, directory: Path) -> MachineRates:
    """Read the rates from their file, or measure them and write it. From then on `rates` returns them.

    A failure to measure is a warning, and leaves the rates unmeasured.

    Args:
        num_threads: Number of threads that will compute.
        directory: Directory of the files. Each processor, instruction set, number of threads and content of the native
            library has its own.
    """
    if isa():
        try:
            _isa_to_rates[isa()] = read_or_make(
                directory,
                "rates",
                {**machine_key(isa()), "num_threads": num_threads},
                lambda: asdict(measure_rates(num_threads)),
                _from_json,
            )
        except (OSError, RuntimeError, MemoryError, AttributeError) as error:
            log.warning("the machine's rates cannot be measured (%s), so the instruction set decides", error)
    return rates()


def measure_rates(num_threads: int) -> MachineRates:
    """Measure with one thread and with so many, in at most two seconds. Needs native kernels.

    Raises:
        RuntimeError: The system does not start so many threads.
        MemoryError: The system has no memory to read from.
        AttributeError: The native library is older than this file.
    """
    memory = _filled_memory(num_threads)
    with _threads(1):
        one_thread = _measure(1, memory)
    with _threads(num_threads):
        return MachineRates(isa(), num_threads, one_thread, _measure(num_threads, memory))


def _from_json(found: Json) -> MachineRates:
    def rates_of(name: str) -> Rates:
        values: Any = found[name]
        return Rates(**{field: float(value) for field, value in values.items()})

    return MachineRates(
        str(found["isa"]), int(str(found["num_threads"])), rates_of("one_thread"), rates_of("all_threads")
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = threads_in_use()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def _measure(num_threads: int, memory: torch.Tensor) -> Rates:
    """Measure all rates in turn, again and again, and keep the best of each.

    Turns are spread over the whole time, so that a disturbance of some milliseconds hits every rate alike and none
    always.
    """
    pieces = {**_product_pieces(), **_read_pieces(num_threads, memory)}
    best = dict.fromkeys(pieces, 0.0)
    started, settled_rounds, num_rounds = time.perf_counter(), 0, 0
    while num_rounds < _MIN_ROUNDS or settled_rounds < _SETTLED_ROUNDS:
        if time.perf_counter() - started > _LIMIT_S:
            break
        found = {name: piece() / 1e9 for name, piece in pieces.items()}
        is_settled = all(found[name] <= _BETTER * best[name] for name in pieces)
        settled_rounds = settled_rounds + 1 if is_settled else 0
        best = {name: max(best[name], found[name]) for name in pieces}
        num_rounds += 1
    return Rates(**best)


def _product_pieces() -> dict[str, Callable[[], float]]:
    """Return a function for each kind of product that measures it once and returns operations per second."""
    function = load(isa()).triptych_product_rate
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64

    def piece(kind: int) -> float:
        rate = ctypes.c_double()
        raise_failure(function(kind, ctypes.addressof(rate)), "products in registers")
        return rate.value

    # the library for AMX uses tiles of bfloat16 only, so those of bytes may be missing where it runs
    kinds = [kind for kind in PRODUCTS if kind != "tile_int8" or "amx_int8" in processor_flags()]
    return {kind: partial(piece, PRODUCTS.index(kind)) for kind in kinds}


def _read_pieces(num_threads: int, memory: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Return a function for each place to read from that measures it once and returns bytes per second."""
    function = load(isa()).triptych_read_rate
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int64

    def create_piece(part_bytes: int) -> Callable[[], float]:
        next_offsets = (ctypes.c_int64 * num_threads)()
        step_bytes = min(part_bytes, _MIB)
        part_bytes = part_bytes // step_bytes * step_bytes

        def piece() -> float:
            rate = ctypes.c_double()
            failure = function(
                memory.data_ptr(), part_bytes, step_bytes, next_offsets, ctypes.addressof(rate)
            )
            raise_failure(failure, "reading memory")
            return rate.value

        return piece

    return {
        name: create_piece(size)
        for name, size in part_sizes(cache_sizes(), num_threads, memory.nbytes).items()
    }


def part_sizes(sizes: dict[int, int], num_threads: int, memory_bytes: int) -> dict[str, int]:
    """Return the bytes that each thread reads again and again to measure a cache or memory.

    A cache is read by half. The third one is shared by the threads; where its parts are no larger than a thread's
    second cache, there is no entry.

    Args:
        sizes: As of `cache_sizes`.
        memory_bytes: Bytes of memory to read from, several times the last cache.
    """
    parts = {"l1": sizes.get(1, 32 << 10) // 2, "l2": sizes.get(2, 512 << 10) // 2}
    third = min(4 * sizes.get(2, 512 << 10), sizes.get(3, 0) // 2 // num_threads)
    if third > sizes.get(2, 512 << 10):
        parts["l3"] = third
    parts["memory"] = memory_bytes // num_threads
    return {name: size // _READ_STEP * _READ_STEP for name, size in parts.items()}


def cache_sizes(caches: Path = CACHES) -> dict[int, int]:
    """Return level -> bytes of the first processor's data caches; empty where the system does not list them."""
    sizes: dict[int, int] = {}
    for index in sorted(caches.glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            kilobytes = (index / "size").read_text().strip().removesuffix("K")
            sizes[int((index / "level").read_text())] = int(kilobytes) << 10
    return sizes


def _filled_memory(num_threads: int) -> torch.Tensor:
    """Return memory of four times the last cache, within bounds that a machine can spare, each page of it written."""
    wanted = min(max(4 * cache_sizes().get(3, 0), 128 * _MIB), 512 * _MIB)
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        wanted = min(wanted, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    return zeros_in_huge_pages((max(wanted, num_threads * _MIB),), torch.uint8).fill_(1)
