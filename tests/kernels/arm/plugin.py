"""Runs the tests of native kernels with those for ARM, under QEMU; `make test-arm` loads this plugin of pytest.

The tests are those that run everywhere, with their oracles. The plugin lets `library` and `launch` find the instruction
sets of ARM, compiled by Debian's cross compiler, each on an emulated processor that has it and nothing newer. A call
sends its operands to `server.cpp`, which runs under QEMU, and takes back what the kernel has written.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from triptych_kernels.cpu import compile, library

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "arm"
SERVER = FOLDER / "server"

_COMPILER = "aarch64-linux-gnu-g++"
_EMULATOR = "qemu-aarch64"
_PACKAGE_OF_PROGRAM = {_COMPILER: "g++-aarch64-linux-gnu", _EMULATOR: "qemu-user"}
_SYSTEM_LIBRARIES = "/usr/aarch64-linux-gnu"
_PROCESSOR_OF_ISA = {"neon_bf16": "max", "neon_dotprod": "neoverse-n1", "neon": "cortex-a53"}
"""Instruction set -> processor that QEMU emulates. It knows no processor with bfloat16 that has a name."""

_LIST_FIELDS, _CALL_PLAIN, _CALL_KERNEL = range(3)  # `Kind` in server.cpp
_SYMBOL_BYTES = 64


class Server:
    """A library for ARM in an emulated process, with the part of `ctypes.CDLL` that is used."""

    def __init__(self, isa: str) -> None:
        emulator = [_EMULATOR, "-cpu", _PROCESSOR_OF_ISA[isa], "-L", _SYSTEM_LIBRARIES]
        self._process = subprocess.Popen(
            [*emulator, str(SERVER), str(compile.library_path(isa, FOLDER))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __getattr__(self, symbol: str) -> PlainFunction:
        return PlainFunction(self, symbol)

    def send(self, symbol: str, kind: int, *parts: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.writelines([symbol.encode().ljust(_SYMBOL_BYTES, b"\0"), _ints(kind), *parts])
        self._process.stdin.flush()

    def receive(self, num_bytes: int) -> bytes:
        assert self._process.stdout is not None
        received = self._process.stdout.read(num_bytes)
        if len(received) < num_bytes:
            pytest.exit(f"the emulated process ended with status {self._process.wait()}", returncode=1)
        return received

    def receive_int(self) -> int:
        return int(struct.unpack("q", self.receive(8))[0])


class PlainFunction:
    """A function of at most one number. Like those of `ctypes` it may be told its types."""

    def __init__(self, server: Server, symbol: str) -> None:
        self._server, self._symbol = server, symbol

    def __call__(self, argument: int = 0) -> int:
        self._server.send(self._symbol, _CALL_PLAIN, _ints(argument))
        return self._server.receive_int()


class Kernel:
    """A kernel, with the part of `launch.Kernel` that `launch` uses."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._symbol = server, f"triptych_{name}"
        server.send(f"{self._symbol}_fields", _LIST_FIELDS)
        listed = server.receive(server.receive_int()).decode()
        self._kind_of_field = dict(line.replace(".", "_").split() for line in listed.splitlines())

    def pack(self, operands: Mapping[str, Tensor | float | None]) -> Mapping[str, Tensor | float | None]:
        if operands.keys() != self._kind_of_field.keys():
            raise TypeError(f"{self._symbol}: the operands {operands.keys()} are not its fields")
        return operands

    def function(self, operands: Mapping[str, Tensor | float | None], rows: int) -> int:
        """Run the kernel on copies of the operands' storages and copy them back."""
        sizes: dict[int, int] = {}  # address of a storage -> its bytes
        addresses: list[int] = []
        values: list[float] = []
        for index, field in enumerate(self._kind_of_field):
            operand = operands[field]
            if isinstance(operand, Tensor):
                storage = operand.untyped_storage()
                sizes.setdefault(storage.data_ptr(), storage.nbytes())
                region = list(sizes).index(storage.data_ptr())
                addresses += (8 * index, region, operand.data_ptr() - storage.data_ptr())
                operand = 0
            values.append(operand or 0)
        packed = struct.pack("".join(self._kind_of_field.values()), *values)
        self._server.send(
            self._symbol,
            _CALL_KERNEL,
            _ints(rows, len(packed), len(sizes), len(addresses) // 3),
            packed,
            _ints(*sizes.values()),
            _ints(*addresses),
            *(ctypes.string_at(start, size) for start, size in sizes.items()),
        )
        result = self._server.receive_int()
        for start, size in sizes.items():
            ctypes.memmove(start, self._server.receive(size), size)
        return result


def _ints(*values: int) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


def _build() -> None:
    """Compile the libraries and the server, unless they are up to date.

    Raises:
        pytest.UsageError: The compiler or the emulator is not installed; names its package.
    """
    packages = [package for program, package in _PACKAGE_OF_PROGRAM.items() if not shutil.which(program)]
    if packages:
        raise pytest.UsageError(f"on Debian: apt-get install {' '.join(packages)}")
    compile.build_for_arm(_COMPILER, FOLDER)
    source = Path(__file__).with_name("server.cpp")
    command = [_COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", f"-I{compile.SOURCES}", str(source)]
    subprocess.run([*command, "-o", str(SERVER)], check=True)


load = cache(Server)


@cache
def find_kernel(isa: str, name: str) -> Kernel:
    return Kernel(load(isa), name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests of ARM's instruction sets, which name them."""
    chosen = [item for item in items if any(isa in item.name for isa in compile.ARM_FLAGS)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


_build()
library.usable_isas = cache(lambda: tuple(compile.ARM_FLAGS))
library.load = load
from triptych_kernels.cpu import launch, program  # noqa: E402  they take their names from `library`


def _skip(_: object) -> None:
    pytest.skip("a recorded program calls kernels by their addresses in this process")


launch.find_kernel = find_kernel
program.record = _skip
