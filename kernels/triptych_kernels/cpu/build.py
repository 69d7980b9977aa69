"""`python -m triptych_kernels.cpu.build`: compile the native kernels, unless they are up to date.

One library per instruction set from the same sources; which one is loaded is decided on the machine that runs
them. Without a compiler that can, or on another processor, nothing is built, and plain torch serves.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARIES = HERE / "lib"
DIGEST = LIBRARIES / "DIGEST"
"""What the libraries were made from; there once all of them are."""

ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
}
"""Widest first."""
# Threads are OpenMP's, and so torch's: its library is loaded first and serves both. GCC 12 takes the undefined
# upper parts in its own AVX-512 headers for uninitialized variables.
_FLAGS = (
    "-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-maybe-uninitialized",
)  # fmt: skip
_TIMEOUT_S = 300.0


def library_path(isa: str) -> Path:
    return LIBRARIES / f"libtriptych_cpu_{isa}.so"


def main() -> None:
    if platform.machine() != "x86_64":
        print(f"native kernels: none for {platform.machine()}; plain torch serves")
        return
    compiler = shutil.which("g++")
    if compiler is None:
        print("native kernels: no g++ found, so plain torch serves, slower (on Debian: apt-get install g++)")
        return
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = _digest(compiler, sources)
    if DIGEST.is_file() and DIGEST.read_text() == digest:
        return
    LIBRARIES.mkdir(exist_ok=True)
    DIGEST.unlink(missing_ok=True)
    for isa, flags in ISA_FLAGS.items():
        target = library_path(isa)
        unfinished = target.with_suffix(f".unfinished-{os.getpid()}")
        command = [compiler, *_FLAGS, *flags, *map(str, sources), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            print(f"native kernels: {' '.join(command)} failed:\n{done.stderr}", file=sys.stderr)
            print("native kernels: not built, so plain torch serves, slower", file=sys.stderr)
            return
        unfinished.replace(target)  # whoever has the old one loaded keeps it
    DIGEST.write_text(digest)
    print(f"native kernels: built for {', '.join(ISA_FLAGS)}")


def _digest(compiler: str, sources: list[Path]) -> str:
    version = subprocess.run(
        [compiler, "-dumpfullversion"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    ).stdout
    content = [version, repr(_FLAGS), repr(ISA_FLAGS)]
    content += [path.name + path.read_text() for path in (*sources, *sorted(SOURCES.glob("*.h")))]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()


if __name__ == "__main__":
    main()
