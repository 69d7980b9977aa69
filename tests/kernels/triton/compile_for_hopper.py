"""Compiles what `calls.CALLS` launch to machine code for an H200, with the wheel's ptxas and without a GPU.

A program, as `TRITON_INTERPRET` is read when kernels are defined. Prints JSON: for each call its launches, see
`Launch`, or its error.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.runtime import JITFunction

from tests.kernels.triton.calls import CALLS
from tests.kernels.triton.hopper import believe_in_hopper
from tools.tune.wgmma_hazards import hazards_of_cubin
from triptych_kernels.triton.tuning.compile_ahead import noted_launches

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel as compiled for one launch."""

    kernel: str
    """Module and name, as `silu_and_mul._silu_and_mul`."""
    grid: tuple[int, ...]
    num_warps: int
    num_registers: int
    """Registers of a thread."""
    stack_bytes: int
    """Stack of a thread: spilled registers."""
    shared_bytes: int
    """Shared memory of a program."""
    widest_access: int
    """Bytes of the widest load, store or asynchronous copy of global memory by one thread."""
    hazards: tuple[str, ...]
    """Writes to what a tensor core may still read, see `wgmma_hazards`."""


def compile_calls() -> dict[str, list[Launch] | str]:
    """The launches of each call, or what it raised."""
    believe_in_hopper()
    _compile_side_by_side()
    launches: list[Launch] = []
    compile_and_launch = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = compile_and_launch(kernel, *args, grid=grid, warmup=True, **options)
        if callable(grid):
            bound = kernel.signature.bind(
                *args, **{k: v for k, v in options.items() if k in kernel.arg_names}
            )
            grid = grid(bound.arguments)
        launches.append(_describe(kernel, tuple(grid), compiled))
        return compiled

    JITFunction.run = compile_only
    outcome: dict[str, list[Launch] | str] = {}
    for name, call in CALLS.items():
        launches.clear()
        try:
            call.launch()
            outcome[name] = list(launches)
        except Exception as error:
            outcome[name] = f"{type(error).__name__}: {error}"
    return outcome


def _compile_side_by_side() -> None:
    """Compile on several threads. A failure is repeated where its result is requested."""
    with noted_launches() as noted:
        for call in CALLS.values():
            with suppress(Exception):
                call.launch()
    with ThreadPoolExecutor() as threads:
        for launch in noted:
            threads.submit(launch.compile)


def _describe(kernel: JITFunction, grid: tuple[int, ...], compiled: Any) -> Launch:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (num_registers,), (stack_bytes,) = re.findall(r"REG:(\d+)", usage), re.findall(r"STACK:(\d+)", usage)
    return Launch(
        kernel=f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}",
        grid=grid,
        num_warps=compiled.metadata.num_warps,
        num_registers=int(num_registers),
        stack_bytes=int(stack_bytes),
        shared_bytes=compiled.metadata.shared,
        widest_access=_widest_access(compiled.asm["ptx"]),
        # taking machine code apart costs most of the time here
        hazards=_hazards(compiled.asm["cubin"]) if "wgmma" in compiled.asm["ptx"] else (),
    )


@cache
def _hazards(cubin: bytes) -> tuple[str, ...]:
    return tuple(map(str, hazards_of_cubin(cubin)))


def _widest_access(ptx: str) -> int:
    accesses = re.findall(r"\b(?:ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    widths = [int(count or 1) * int(bits) // 8 for count, bits in accesses]
    return max((*widths, *(int(width, base=0) for width in copies)), default=0)


if __name__ == "__main__":
    outcome = compile_calls()
    plain = {n: o if isinstance(o, str) else [asdict(launch) for launch in o] for n, o in outcome.items()}
    json.dump(plain, sys.stdout)
