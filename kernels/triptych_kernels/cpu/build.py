"""Compiles the native kernels, unless they are up to date: `python -m triptych_kernels.cpu.build`.

There is one library per instruction set, all from the same sources. The machine that runs them chooses one when it
loads it. Without a suitable compiler or processor nothing is built, and plain torch computes. The last line printed
says what this machine gets.
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
"""File with the digest of the libraries' sources and flags, written when all libraries are complete."""

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
ISA_FLAGS = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Instruction set -> flags of the compiler, widest first. Sets whose flags a compiler does not know are left out."""
# GCC 12 takes the undefined upper parts in its own AVX-512 headers for uninitialized variables.
_WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
_FLAGS = ("-std=c++20", "-O3", "-fPIC", *_WARNINGS)
_TIMEOUT_S = 300.0
_PLAIN = "plain torch serves, slower, without 4- and 8-bit weights, int8 caches, recorded steps and batch invariance"

AMX_EMULATED = "amx_emulated"
"""Instruction set for tests, used by `forced_isa`: products as on AMX, with tile instructions emulated in C++ on any
processor with AVX-512."""
_EMULATED_SOURCES = (
    "parallel.cpp",
    *(f"linear/{name}.cpp" for name in ("linear", "quantized_linear", "quantized_weight")),
)
_EMULATED_FLAGS = (*_AVX512, "-DTRIPTYCH_AMX_EMULATED", "-O1")  # it compiles in half the time


def library_path(isa: str) -> Path:
    return LIBRARIES / f"libtriptych_cpu_{isa}.so"


def main() -> None:
    if platform.machine() != "x86_64":
        print(
            f"native kernels: none, since they are written for x86-64 and this is {platform.machine()}; {_PLAIN}"
        )
        return
    compiler = shutil.which("g++")
    if compiler is None:
        print(f"native kernels: none, since no g++ is found (on Debian: apt-get install g++); {_PLAIN}")
        return
    if not _build_all(compiler):
        print(f"native kernels: none, since they do not compile; {_PLAIN}")
        return
    from triptych_kernels.cpu.library import usable_isas  # which imports this module

    if usable_isas():
        print(f"native kernels: built; this machine uses {usable_isas()[0]}")
    else:
        print(f"native kernels: built, but this processor lacks AVX2, FMA or F16C; {_PLAIN}")


def _build_all(compiler: str) -> bool:
    """Build a library for each instruction set, unless they are up to date, and return whether there are any."""
    sources = sorted(SOURCES.rglob("*.cpp"))
    digest = _digest(compiler, sources, ISA_FLAGS)
    if DIGEST.is_file() and DIGEST.read_text() == digest:
        return True
    isas = {isa: flags for isa, flags in ISA_FLAGS.items() if _knows(compiler, flags)}
    print(f"native kernels: compiling {len(sources)} files for {', '.join(isas)} …", flush=True)
    LIBRARIES.mkdir(exist_ok=True)
    DIGEST.unlink(missing_ok=True)
    for isa in ISA_FLAGS.keys() - isas.keys():
        print(f"native kernels: not for {isa}, which this g++ does not know")
        library_path(isa).unlink(missing_ok=True)
    try:
        _build(compiler, sources, isas)
    except subprocess.CalledProcessError as error:
        print(f"native kernels: {' '.join(error.cmd)} failed:\n{error.stderr}", file=sys.stderr)
        return False
    DIGEST.write_text(digest)
    return True


def build_emulated() -> None:
    """Build the library of `AMX_EMULATED`, unless it is up to date. It has only products and quantized weights.

    Raises:
        FileNotFoundError: There is no g++.
        subprocess.CalledProcessError: The compiler fails.
    """
    sources = [SOURCES / name for name in _EMULATED_SOURCES]
    libraries = {AMX_EMULATED: _EMULATED_FLAGS}
    digest = _digest("g++", sources, libraries)
    stamp = LIBRARIES / f"DIGEST_{AMX_EMULATED}"
    if stamp.is_file() and stamp.read_text() == digest:
        return
    LIBRARIES.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    _build("g++", sources, libraries)
    stamp.write_text(digest)


def _build(compiler: str, sources: Sequence[Path], libraries: Mapping[str, Sequence[str]]) -> None:
    """Compile every source for every library, as many at a time as there are cores, then link.

    Args:
        libraries: Instruction set -> flags of the compiler.
    Raises:
        subprocess.CalledProcessError: The compiler fails.
    """
    with TemporaryDirectory(dir=LIBRARIES) as scratch:
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
            unfinished.replace(library_path(isa))  # processes that have loaded the old one keep it


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
    main()
