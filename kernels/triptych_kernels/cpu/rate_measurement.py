"""Measurement of the rates of this machine, and whether other processes disturbed it. Needs no torch."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from triptych_kernels.cpu.huge_pages import map_zeros
from triptych_kernels.cpu.library import (
    isa,
    load,
    processor_flags,
    raise_failure,
    threads_in_use,
    use_threads,
)
from triptych_kernels.cpu.machine import MachineRates, Rates

PRODUCTS = ("float32", "bfloat16", "int16", "int8", "tile_bfloat16", "tile_int8")
"""Fields of `Rates` in the order of `kProducts` in machine.cpp."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_ROUNDS = 10  # undisturbed ones; each takes 10 to 20 ms
_LIMIT_S = 1.0  # for one number of threads; only a loaded machine takes so long
_OWN_TIME = 0.9
"""Part of a round that its threads must have been on a core. Beside one other process on their core it is a half."""
_STEADY = 0.85
"""Part of the best rate that the median of all rounds must reach. A neighbour on the other half of the core takes a
third or more, for some rounds; the clock of a processor varies by a tenth."""
_MIB = 1 << 20
_READ_STEP = 512  # bytes: what machine.cpp reads in one turn of its loop

Pieces = Mapping[str, Callable[[], float]]


def measure_rates(num_threads: int) -> MachineRates:
    """Measure with one thread and with so many, in at most two seconds. Needs native kernels.

    Raises:
        RuntimeError: The system does not start so many threads.
        MemoryError: The system has no memory to read from.
        AttributeError: The native library is older than this file.
    """
    memory = _filled_memory(num_threads)
    with _threads(1):
        one_thread, disturbance = measure_pieces(_pieces(1, memory), 1)
    with _threads(num_threads):
        all_threads, later = measure_pieces(_pieces(num_threads, memory), num_threads)
    return MachineRates(isa(), num_threads, one_thread, all_threads, disturbance or later)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = threads_in_use()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def measure_pieces(
    pieces: Pieces,
    num_threads: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
) -> tuple[Rates, str]:
    """Measure all rates in turn, again and again; return the best of each, and what disturbed them.

    Turns are spread over the whole time, so that a disturbance of some milliseconds hits every rate alike and none
    always. A round in which another process had the cores counts only if there is no better one.

    Args:
        pieces: Field of `Rates` -> function that measures it once and returns units per second.
        clock: Seconds.
        cpu_clock: Seconds that all threads of this process have been on a core.
    """
    rounds: list[dict[str, float]] = []
    shares: list[float] = []
    started = clock()
    while sum(share >= _OWN_TIME for share in shares) < _ROUNDS:
        before_s, before_cpu_s = clock(), cpu_clock()
        if shares and before_s - started > _LIMIT_S:
            break
        rounds.append({name: piece() / 1e9 for name, piece in pieces.items()})
        shares.append((cpu_clock() - before_cpu_s) / max(clock() - before_s, 1e-9) / num_threads)
    quiet = [found for found, share in zip(rounds, shares, strict=True) if share >= _OWN_TIME]
    best = {name: max(found[name] for found in quiet or rounds) for name in pieces}
    return Rates(**best), _disturbance(quiet, best, statistics.median(shares))


def _disturbance(quiet: Sequence[Mapping[str, float]], best: Mapping[str, float], share: float) -> str:
    """Return the reason not to believe in the rates; empty if there is none."""
    if len(quiet) < _ROUNDS:
        return f"other processes had the cores for {1 - share:.0%} of the time"
    for name in (name for name in PRODUCTS if best.get(name)):
        median = statistics.median(found[name] for found in quiet)
        if median < _STEADY * best[name]:
            return f"rates change by the moment: of {name} from {median:.0f} to {best[name]:.0f}"
    return ""


def _pieces(num_threads: int, memory: ctypes.Array[ctypes.c_char]) -> Pieces:
    return {**_product_pieces(), **_read_pieces(num_threads, memory)}


def _product_pieces() -> Pieces:
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


def _read_pieces(num_threads: int, memory: ctypes.Array[ctypes.c_char]) -> Pieces:
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
                ctypes.addressof(memory), part_bytes, step_bytes, next_offsets, ctypes.addressof(rate)
            )
            raise_failure(failure, "reading memory")
            return rate.value

        return piece

    return {
        name: create_piece(size) for name, size in part_sizes(cache_sizes(), num_threads, len(memory)).items()
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


def _filled_memory(num_threads: int) -> ctypes.Array[ctypes.c_char]:
    """Return memory of four times the last cache, within bounds that a machine can spare, each page of it written.

    Pages are huge where the system grants them, as those of weights are.
    """
    wanted = min(max(4 * cache_sizes().get(3, 0), 128 * _MIB), 512 * _MIB)
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        wanted = min(wanted, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    num_bytes = math.ceil(max(wanted, num_threads * _MIB) / _MIB) * _MIB
    memory = (ctypes.c_char * num_bytes).from_buffer(map_zeros(num_bytes))
    ctypes.memset(memory, 1, num_bytes)
    return memory
