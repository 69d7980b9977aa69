"""Runs tests of the native kernels under GCC's address and thread sanitizers.

    python tools/sanitize_cpu.py [address] [thread] [arguments of pytest]

The kernels trust indices and lengths, which Python checks before. The address sanitizer sees an access beyond a
tensor's memory, the thread sanitizer one that no lock or order keeps apart from another thread's. Both are blind to
memory that the project maps itself (buffers of recorded programs, KV caches in huge pages).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych_kernels.cpu.compile import FLAGS_OF_MACHINE, build_sanitized

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitized"
NATIVE = "tests/kernels/cpu"
TESTS: Mapping[str, Sequence[str]] = {
    "address": (
        "tests/kernels/ops",
        f"{NATIVE}/test_attention.py",
        f"{NATIVE}/test_program.py",
        f"{NATIVE}/test_sample.py",
    ),
    "thread": (f"{NATIVE}/test_parallel.py", f"{NATIVE}/test_program.py"),
}
"""The tests that are run where none are named: those of most indices, and those of several threads. The quantized and
widened products take many minutes under a sanitizer."""
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    # libraries of others keep what they have allocated until the process ends
    "address": {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1"},
    # torch's and Python's own locks are in code that was not built for it
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:report_signal_unsafe=0"},
}
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}


def main(arguments: Sequence[str]) -> int:
    isas = list(FLAGS_OF_MACHINE.get(platform.machine(), ()))
    if shutil.which("g++") is None or not isas or platform.system() != "Linux":
        print("sanitize-cpu: needs Linux, x86-64 or 64-bit ARM, and g++", file=sys.stderr)
        return 2
    chosen = [name for name in TESTS if name in arguments] or list(TESTS)
    rest = [argument for argument in arguments if argument not in TESTS]
    statuses = [run(sanitizer, isas[-1], rest) for sanitizer in chosen]
    return max(statuses)


def run(sanitizer: str, isa: str, arguments: Sequence[str]) -> int:
    """Build the library and run the tests; return the exit status."""
    print(f"== {sanitizer} sanitizer, {isa}", flush=True)
    folder = FOLDER / sanitizer
    build_sanitized(sanitizer, isa, folder)
    # beside the runtime the library of exceptions, which it must find before Python loads an extension with its own
    preloaded = [path_of_library(name) for name in (RUNTIMES[sanitizer], "libstdc++.so.6")]
    environment = (
        os.environ
        | ENVIRONMENT[sanitizer]
        | {
            "LD_PRELOAD": " ".join(preloaded),
            "TRIPTYCH_SANITIZED_ISA": isa,
            "TRIPTYCH_SANITIZED_LIBRARY": str(folder),
        }
    )
    tests = (
        [] if any(Path(argument.partition("::")[0]).exists() for argument in arguments) else TESTS[sanitizer]
    )
    plain = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.kernels.sanitized.plugin"]
    command = [*plain, "-p", "no:cacheprovider", *tests, *arguments]
    if setarch := shutil.which("setarch"):  # GCC's thread sanitizer expects memory where it was ten years ago
        command = [setarch, platform.machine(), "--addr-no-randomize", *command]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def path_of_library(name: str) -> str:
    """Return where the compiler finds a library."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
