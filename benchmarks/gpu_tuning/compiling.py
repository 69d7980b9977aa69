"""Compiles what launchers launch, without a device: ahead of timing it, on all processors, into Triton's cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from benchmarks.gpu_tuning.wgmma_hazards import hazards_of_cubin
from benchmarks.gpu_tuning.workload import Case

CAPABILITY_TO_SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
}
"""Compute capability -> shared memory of one program at most: CUDA C++ Programming Guide, technical specifications."""

_shared_bytes: list[int] = []
"""Of the launches since it was last cleared, in a process that compiles candidates."""

_hazards: list[str] = []
"""Hazards of the same launches, as `wgmma_hazards` finds them."""


class OverwrittenOperand(Exception):
    """The compiler has made machine code that may overwrite what a tensor core still reads."""


class _Driver:
    """Of a GPU that only the compiler believes in."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # any number that other targets do not have: compiled kernels are kept by it

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend_to_be(target: GPUTarget, num_sms: int) -> None:
    """Of which the compiler and the launchers are told."""
    triton.runtime.driver.set_active(_Driver(target))
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment, return-value]
        multi_processor_count=num_sms
    )


def start_process(target: tuple[str, int, int], num_sms: int) -> None:
    """From now on this process only compiles what it would launch, and pretends to such a device.

    Args:
        target: backend, compute capability as 90, threads of a warp.
        num_sms: multiprocessors, on which grids and splits depend.
    """
    torch.set_num_threads(1)
    pretend_to_be(GPUTarget(*target), num_sms)
    compile_and_launch = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, warmup: bool, **options: Any) -> Any:
        compiled = compile_and_launch(kernel, *args, warmup=True, **options)
        _shared_bytes.append(compiled.metadata.shared)
        if "cubin" in compiled.asm:
            _hazards.extend(map(str, hazards_of_cubin(compiled.asm["cubin"])))
        return compiled

    JITFunction.run = compile_only


def compile_candidate(case: Case, config: Any) -> int:
    """Compile what a candidate launches on all workloads, in a process that was started for that.

    Returns:
        Bytes of shared memory of the largest program; 0 also if the candidate leaves the work to torch.
    Raises:
        OverwrittenOperand: names the instructions.
    """
    meta = torch.device("meta")
    _shared_bytes.clear()
    _hazards.clear()
    with case.tunable.forced(meta, case.key, config):
        for workload in case.build(meta):
            workload.calls[0]()
    if _hazards:
        raise OverwrittenOperand("; ".join(_hazards))
    return max(_shared_bytes, default=0)


def largest_shared_bytes(arch: int) -> int | None:
    """That a program may have on a device of such a target; None: not known here."""
    return CAPABILITY_TO_SHARED_BYTES.get((arch // 10, arch % 10))
