"""The native library for this processor, loaded once. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from triptych_kernels.cpu.compile import DIGEST, FLAGS_OF_MACHINE, library_path

CPUINFO = Path("/proc/cpuinfo")
_TIMEOUT_S = 10.0
_NO_MEMORY, _RANK_GONE = 1, 3  # `Failure` in kernel.h
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16"}
_AVX2 = {"avx2", "fma", "f16c"}
_AMX = {"amx_tile", "amx_bf16", "amx_int8"}
_NEON_DOTPROD = {"asimd", "atomics", "asimddp"}
_NEEDED_FLAGS = {
    "amx": _AVX512_BF16 | _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2_vnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "neon_bf16": _NEON_DOTPROD | {"i8mm", "bf16"},
    "neon_dotprod": _NEON_DOTPROD,
    "neon": {"asimd"},
}
_FLAG_OF_FEATURE = {
    "FEAT_LSE": "atomics",
    "FEAT_DotProd": "asimddp",
    "FEAT_I8MM": "i8mm",
    "FEAT_BF16": "bf16",
}
"""Feature of a Mac with an ARM processor as sysctl names it -> Linux's flag. All have Advanced SIMD."""

_SYS_ARCH_PRCTL = 158  # on x86-64; the C library has no function for it
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_wanted: list[str] = []
_forced: list[str] = []
_refused: dict[str, str] = {}


def isa() -> str:
    """Return the instruction set in use: the widest that was built, that this machine has and that is not refused, or
    the one that is wanted.

    It is empty if there is none, and plain torch computes."""
    return _forced[-1] if _forced else _widest()


def isa_and_build() -> str:
    """Return the instruction set in use and the build of its library, by a digest of sources, flags and compiler: equal
    ones compute equal bits. It is empty if plain torch computes."""
    return f"{isa()} of build {DIGEST.read_text()[:16]}" if isa() else ""


def want_isa(isa: str) -> None:
    """Use this one of the usable instruction sets from now on, or the widest if it is empty.

    Call this before weights are packed. Where the check refuses it, none is used.

    Raises:
        ValueError: It is unknown, not built, or this processor does not have it.
    """
    if isa and isa not in usable_isas():
        raise ValueError(f"{isa} is none of {', '.join(usable_isas()) or 'none, since no kernels are built'}")
    _wanted[:] = [isa] if isa else []


@contextmanager
def forced_isa(isa: str) -> Iterator[None]:
    """Use this one of the built instruction sets, or none if it is empty, inside the context; for checks and tests.

    Weights that were packed outside must not be used inside.
    """
    _forced.append(isa)
    try:
        yield
    finally:
        _forced.pop()


@cache
def usable_isas() -> tuple[str, ...]:
    """Return the built instruction sets that processor and system let us use, widest first."""
    if not DIGEST.is_file():
        return ()
    return tuple(
        isa
        for isa in isas_of_processor()
        if library_path(isa).is_file() and not (isa == "amx" and amx_refusal())
    )


def candidate_isas() -> tuple[str, ...]:
    """Return the instruction sets of `usable_isas` that are not excluded by `want_isa`."""
    return tuple(_wanted) or usable_isas()


def isas_of_processor() -> list[str]:
    """Return the instruction sets of `FLAGS_OF_MACHINE` that this processor has, widest first."""
    flags = processor_flags()
    return [isa for isa in FLAGS_OF_MACHINE.get(platform.machine(), ()) if flags >= _NEEDED_FLAGS[isa]]


def isas_to_build() -> list[str]:
    """Return the instruction sets that this machine uses: the widest that processor and system let us use, then the
    narrowest, which serves where the check refuses the other.

    Libraries for those between would take as long to compile, for a machine that has better.
    """
    isas = [isa for isa in isas_of_processor() if not (isa == "amx" and amx_refusal())]
    return list(dict.fromkeys((*isas[:1], *isas[-1:])))


def unused_isas() -> dict[str, str]:
    """Return instruction set wider than the one in use -> why it is not used."""
    reasons: dict[str, str] = {}
    for isa_name in FLAGS_OF_MACHINE.get(platform.machine(), ()):
        needed = _NEEDED_FLAGS[isa_name]
        if isa_name == isa():
            break
        if missing := sorted(needed - processor_flags()):
            reasons[isa_name] = f"the processor has no {', '.join(missing)}"
        elif needed & _AMX and amx_refusal():
            reasons[isa_name] = f"the system keeps it from this process: {amx_refusal()}"
        elif isa_name in usable_isas() and isa_name not in candidate_isas():
            reasons[isa_name] = f"{_wanted[0]} is asked for"
        else:
            reasons[isa_name] = _refused.get(isa_name, "it is not built")
    return reasons


def missing_flags(flags: Collection[str] | None = None) -> list[str]:
    """Return what a processor lacks for the narrowest instruction set of this machine's architecture.

    Args:
        flags: The processor's instruction sets as Linux spells them; None: of this machine's processor.
    """
    isas = list(FLAGS_OF_MACHINE.get(platform.machine(), ()))
    found = processor_flags() if flags is None else flags
    return sorted(flag for isa in isas[-1:] for flag in _NEEDED_FLAGS[isa] if flag not in found)


@cache
def amx_refusal() -> str:
    """Return why this process cannot use the processor's AMX; empty if it can, or if the processor has none."""
    if not processor_flags() >= _AMX:
        return ""
    return request_permission()


def request_permission() -> str:
    """Ask Linux to let all threads of this process use AMX, present and future ones.

    Returns:
        The system's reason to refuse, or an empty string if it agrees.
    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if libc.syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def _widest() -> str:
    return next((isa for isa in candidate_isas() if isa not in _refused), "")


def refuse(isa: str, reason: str) -> None:
    """Use this instruction set no more in this process. Weights that were packed for it must not be used any more."""
    _refused[isa] = reason


def refused_isas() -> Mapping[str, str]:
    """Return refused instruction set -> the reason."""
    return _refused


@cache
def load(isa: str) -> ctypes.CDLL:
    """Load the library for one of the built instruction sets.

    Raises:
        OSError: It cannot be loaded; `python -m triptych_kernels.cpu.build` makes it anew.
    """
    return ctypes.CDLL(str(library_path(isa)))


def use_threads(count: int) -> None:
    """Compute with this many threads, including the caller's. Without a library this does nothing.

    A forked child computes with as many threads of its own.

    Raises:
        RuntimeError: The system does not start so many; the caller's thread then computes by itself.
    """
    if isa():
        function = load(isa()).triptych_set_threads
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
        raise_failure(function(count), f"{count} threads")


def threads_in_use() -> int:
    """Return the number of threads that native kernels compute with; 1 without a library."""
    if not isa():
        return 1
    function = load(isa()).triptych_num_threads
    function.argtypes, function.restype = [], ctypes.c_int64
    return int(function())


class ExpertCounts(NamedTuple):
    """Choices of experts since the process began: one for each token, layer and expert."""

    by_layer: Mapping[int, Sequence[int]]
    """Layer, up to 256 -> choices by number of the expert, up to 1,024; those of other ranks included. Layers without
    any are left out."""
    of_busiest_ranks: int
    """Sum over all calls of the choices of the rank that had most of them; 0 where ranks do not share the experts."""


def expert_counts() -> ExpertCounts:
    """Return what the native kernels have counted; nothing without a library.

    Raises:
        RuntimeError: The library is older than this file.
    """
    if not isa():
        return ExpertCounts({}, 0)
    try:
        function = load(isa()).triptych_expert_counts
    except AttributeError as error:
        raise RuntimeError(
            f"the native library for {isa()} counts no experts: it is out of date; "
            "`python -m triptych_kernels.cpu.build` builds it anew"
        ) from error
    function.argtypes, function.restype = [], ctypes.POINTER(ctypes.c_int64)
    counts = function()
    most_layers, most_experts, num_layers, of_busiest_ranks = counts[:4]
    by_layer = {}
    for layer, num_experts in enumerate(counts[4 : 4 + num_layers]):
        start = 4 + most_layers + layer * most_experts
        if any(row := counts[start : start + num_experts]):
            by_layer[layer] = row
    return ExpertCounts(by_layer, of_busiest_ranks)


def raise_failure(failure: int, what: str) -> None:
    """Raise the exception for a result of the library: `Failure` in kernel.h, 0 for none.

    Args:
        what: Subject of the message.
    """
    if failure == 0:
        return
    if failure == _NO_MEMORY:
        raise MemoryError(f"{what}: the system has no memory for what the native kernels need while they run")
    if failure == _RANK_GONE:
        raise TimeoutError(f"{what}: another rank has not come in time")
    raise RuntimeError(
        f"{what}: the system starts no further thread; look at `ulimit -u` and at the container's limit of processes"
    )


def processor_flags() -> set[str]:
    """Return the instruction sets that the processor names; empty if the system does not list them."""
    if sys.platform == "darwin":
        return _flags_of_sysctl()
    if not CPUINFO.is_file():
        return set()
    for line in CPUINFO.read_text().splitlines():
        if line.startswith(("flags", "Features")):  # of x86, of ARM
            return set(line.partition(":")[2].split())
    return set()


def _flags_of_sysctl() -> set[str]:
    """Return the flags of a Mac in Linux's spelling: macOS writes `AVX2` for `avx2`, and `FEAT_BF16` for `bf16`."""
    if platform.machine() == "arm64":
        printed = _sysctl("hw.optional.arm")  # "hw.optional.arm.FEAT_BF16: 1" and so on
        features = {line.removeprefix("hw.optional.arm.") for line in printed.splitlines()}
        return {"asimd", *(flag for name, flag in _FLAG_OF_FEATURE.items() if f"{name}: 1" in features)}
    return set(_sysctl("-n", "machdep.cpu.features", "machdep.cpu.leaf7_features").lower().split())


def _sysctl(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["sysctl", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
