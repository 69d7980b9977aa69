"""Compiles the native kernels: one library per instruction set, all from the same sources.

The machine that runs them chooses one when it loads it. As a script it builds for every instruction set, for an image
or a wheel that runs on other machines; it imports nothing but the standard library, since wheels are built without
torch. `triptych_kernels.cpu.build` builds for this processor.

x86-64 and 64-bit ARM have instruction sets here, on Linux and macOS.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARIES = HERE / "lib"
DIGEST = LIBRARIES / "DIGEST"
"""File with the digest of the libraries' sources and flags, written when those that are there are complete."""

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_X86_FLAGS = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2_vnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
}
ARM_FLAGS = {
    "neon_bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon": ("-march=armv8-a",),
}
"""Instruction set of 64-bit ARM -> flags of the compiler, widest first."""
FLAGS_OF_MACHINE: Mapping[str, Mapping[str, Sequence[str]]] = {
    "x86_64": _X86_FLAGS,
    "aarch64": ARM_FLAGS,
    "arm64": ARM_FLAGS,
}
"""`platform.machine()` -> its instruction sets, widest first. Those that a compiler does not know are left out."""
ISA_FLAGS = _X86_FLAGS | ARM_FLAGS
"""Instruction set -> flags of the compiler."""
# GCC 12 takes the undefined upper parts in its own AVX-512 headers for uninitialized variables; Clang does not know all
# of GCC's warnings.
_WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-unknown-warning-option",
)
_COMPILERS = ("g++", "clang++")
_FLAGS = ("-std=c++20", "-O3", "-fPIC", *_WARNINGS)
_TIMEOUT_S = 1800.0
"""The longest that one file may take: with a sanitizer, beside others on a busy machine, some take over 5 minutes."""
NO_COMPILER = (
    "neither g++ nor clang++ is found (on Debian: apt-get install g++; on macOS: xcode-select --install)"
)
PLAIN = "plain torch serves, slower, without 4- and 8-bit weights, int8 caches, recorded steps and batch invariance"
NOT_WRITTEN = (
    f"native kernels: none, since they are written for x86-64 and 64-bit ARM and this is {{}}; {PLAIN}"
)

AMX_EMULATED = "amx_emulated"
"""Instruction set for tests, used by `forced_isa`: products as on AMX, with tile instructions emulated in C++ on any
processor with AVX-512."""
_EMULATED_SOURCES = (
    "parallel.cpp",
    "run.cpp",
    *(f"linear/{name}.cpp" for name in ("linear", "widened_linear", "quantized_linear", "quantized_weight")),
    *(f"linear/{name}.cpp" for name in ("coded_linear", "coded_weight", "pack_blocks")),
)
_EMULATED_FLAGS = (*_AVX512, "-DTRIPTYCH_AMX_EMULATED", "-O1")  # it compiles in half the time


def library_path(isa: str, folder: Path = LIBRARIES) -> Path:
    return folder / f"libtriptych_cpu_{isa}.so"


def build_all() -> None:
    """Build for every instruction set of this architecture, and end the process if there is none.

    Where the libraries are to run there is no compiler.
    """
    machine = platform.machine()
    if machine not in FLAGS_OF_MACHINE:
        print(NOT_WRITTEN.format(machine))
        return
    compiler = find_compiler()
    if compiler is None:
        sys.exit(f"native kernels: none, since {NO_COMPILER}")
    isas = list(FLAGS_OF_MACHINE[machine])
    if not build_for(compiler, isas):
        sys.exit(f"native kernels: none, since {compiler} does not compile them")
    print(f"native kernels: built for {', '.join(isa for isa in isas if library_path(isa).is_file())}")


def find_compiler() -> str | None:
    """Return the C++ compiler's path, or None if none works: macOS has stand-ins that only ask to install one."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None and _knows(path, ()):
            return path
    return None


def build_for(compiler: str, wanted: Sequence[str]) -> bool:
    """Build the libraries for these instruction sets that are missing or stale, and return whether there are any."""
    sources = sorted(SOURCES.rglob("*.cpp"))
    all_flags = FLAGS_OF_MACHINE[platform.machine()]
    digest = _digest(compiler, sources, all_flags)
    if not DIGEST.is_file() or DIGEST.read_text() != digest:
        DIGEST.unlink(missing_ok=True)
        for isa in all_flags:
            library_path(isa).unlink(missing_ok=True)
    missing = [isa for isa in wanted if not library_path(isa).is_file()]
    isas = {isa: all_flags[isa] for isa in missing if _knows(compiler, all_flags[isa])}
    if isas:
        print(f"native kernels: compiling {len(sources)} files for {', '.join(isas)} …", flush=True)
        for isa in missing:
            if isa not in isas:
                print(f"native kernels: not for {isa}, which this compiler does not know")
        LIBRARIES.mkdir(exist_ok=True)
        try:
            _build(compiler, sources, isas)
        except subprocess.CalledProcessError as error:
            print(f"native kernels: {' '.join(error.cmd)} failed:\n{error.stderr}", file=sys.stderr)
            return False
        DIGEST.write_text(digest)
    return any(library_path(isa).is_file() for isa in wanted)


def check(compiler: str, isas: Sequence[str]) -> None:
    """Compile every source for these instruction sets, unoptimized and for no library, which takes half the time.

    Raises:
        subprocess.CalledProcessError: The compiler fails.
    """
    all_flags = FLAGS_OF_MACHINE[platform.machine()]
    known = [isa for isa in isas if _knows(compiler, all_flags[isa])]
    commands = [
        [compiler, *_FLAGS, "-O0", *all_flags[isa], f"-I{SOURCES}", "-S", str(source), "-o", os.devnull]
        for isa in known
        for source in sorted(SOURCES.rglob("*.cpp"))
    ]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        list(compilers.map(_run, commands))


def build_emulated() -> None:
    """Build the library of `AMX_EMULATED`, unless it is up to date.

    It has only products, quantized weights and recorded calls.

    Raises:
        FileNotFoundError: There is no g++.
        subprocess.CalledProcessError: The compiler fails.
    """
    sources = [SOURCES / name for name in _EMULATED_SOURCES]
    _build_unless_there("g++", sources, {AMX_EMULATED: _EMULATED_FLAGS}, LIBRARIES, f"DIGEST_{AMX_EMULATED}")


def build_for_arm(compiler: str, folder: Path) -> None:
    """Build the libraries of `ARM_FLAGS` by a cross compiler, unless they are up to date; for tests.

    Raises:
        FileNotFoundError: There is no such compiler.
        subprocess.CalledProcessError: The compiler fails.
    """
    _build_unless_there(compiler, sorted(SOURCES.rglob("*.cpp")), ARM_FLAGS, folder, "DIGEST")


def build_sanitized(sanitizer: str, isa: str, folder: Path) -> None:
    """Build the library for one instruction set with a sanitizer of GCC, unless it is up to date; for tests.

    Args:
        sanitizer: `address` or `thread`.

    Raises:
        FileNotFoundError: There is no g++.
        subprocess.CalledProcessError: The compiler fails.
    """
    flags = (*ISA_FLAGS[isa], "-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}")
    _build_unless_there("g++", sorted(SOURCES.rglob("*.cpp")), {isa: flags}, folder, "DIGEST")


def _build_unless_there(
    compiler: str,
    sources: Sequence[Path],
    libraries: Mapping[str, Sequence[str]],
    folder: Path,
    stamp_name: str,
) -> None:
    digest = _digest(compiler, sources, libraries)
    stamp = folder / stamp_name
    if stamp.is_file() and stamp.read_text() == digest:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _build(compiler, sources, libraries, folder)
    stamp.write_text(digest)


def _build(
    compiler: str,
    sources: Sequence[Path],
    libraries: Mapping[str, Sequence[str]],
    folder: Path = LIBRARIES,
) -> None:
    """Compile every source for every library, as many at a time as there are cores, then link.

    Args:
        libraries: Instruction set -> flags of the compiler.
        folder: Where the libraries go.
    Raises:
        subprocess.CalledProcessError: The compiler fails.
    """
    with TemporaryDirectory(dir=folder) as scratch:
        objects = {
            (isa, source): Path(scratch, f"{source.stem}-{isa}.o") for isa in libraries for source in sources
        }
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            commands = [
                [compiler, *_FLAGS, *libraries[isa], f"-I{SOURCES}", "-c", str(source), "-o", str(target)]
                for (isa, source), target in objects.items()
            ]
            list(compilers.map(_run, commands))  # the list raises a compiler's failure
        for isa in libraries:
            unfinished = Path(scratch, f"{isa}.so")
            parts = [str(objects[isa, source]) for source in sources]
            _run([compiler, "-shared", "-pthread", *parts, "-o", str(unfinished)])
            unfinished.replace(library_path(isa, folder))  # processes that have loaded the old one keep it


def _knows(compiler: str, flags: Sequence[str]) -> bool:
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S).returncode == 0


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)


def _digest(compiler: str, sources: Sequence[Path], libraries: Mapping[str, Sequence[str]]) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    ).stdout
    content = [version, repr(_FLAGS), repr(libraries)]
    paths = (*sources, *sorted(SOURCES.rglob("*.h")))
    content += [str(path.relative_to(SOURCES)) + path.read_text() for path in paths]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()


if __name__ == "__main__":
    build_all()
