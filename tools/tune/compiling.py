"""Compiles what launchers launch, in processes without a device, one choice ahead of the one that is timed.

    python -m tools.tune.compiling FILE …

As a program it compiles every choice of stored files for the device that they are of, and prints what is wrong with
which entry, as JSON. It must not run in a process with Triton's interpreter, which is chosen when kernels are defined.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from tools.tune.cases import NAME_TO_TUNABLE, Case, create_case
from tools.tune.search import Refusal
from tools.tune.stored import check
from tools.tune.wgmma_hazards import hazards_of_cubin
from triptych_kernels.triton.tuning.tunable import KeyValue, read_file

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
_NUM_SMS = 132  # of an H200; grids and splits depend on it, and what is compiled hardly does

_shared_bytes: list[int] = []
"""Shared memory of each launch since it was last cleared, in a process that compiles candidates."""
_hazards: list[str] = []
"""Hazards of the same launches, see `wgmma_hazards`."""


class OverwrittenOperand(Exception):
    """The compiler has made machine code that may overwrite what a tensor core still reads."""


class AheadCompiler(AbstractContextManager["AheadCompiler"]):
    """Owns the processes that compile, one per processor but one, which times."""

    def __init__(self, target: GPUTarget, num_sms: int) -> None:
        """
        Args:
            target: The device's; its compute capability decides how much shared memory a program may have.
            num_sms: The device's multiprocessors.
        """
        self._num_processes = max((os.cpu_count() or 2) - 1, 1)
        self._shared_bytes = CAPABILITY_TO_SHARED_BYTES.get(divmod(target.arch, 10))
        self._target, self._num_sms = target, num_sms
        self._pool = self.create_pool()

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def compiled(self, cases: Iterable[Case]) -> Iterator[tuple[Case, list[Refusal]]]:
        """Yield the cases in order, each when its candidates are compiled, with those that are refused."""
        ahead: list[Future[int]] = []
        for case, following in pairwise(chain([None], cases, [None])):
            futures, ahead = ahead, self._submit_all(following)
            if case is not None:
                problems = [self._problem(future) for future in futures]
                pairs = zip(case.candidates, problems, strict=True)
                yield case, [Refusal(config, problem) for config, problem in pairs if problem]

    def _submit_all(self, case: Case | None) -> list[Future[int]]:
        """Compile the candidates of a choice while those of the one before it are timed."""
        return [self._submit(case, index) for index in range(len(case.candidates))] if case else []

    def _submit(self, case: Case, index: int) -> Future[int]:
        try:
            return self._pool.submit(compile_numbered, case.tunable.name, case.key, index)
        except BrokenProcessPool:  # a compiler crashed; what was under way with it is refused
            self._pool = self.create_pool()
            return self._pool.submit(compile_numbered, case.tunable.name, case.key, index)

    def create_pool(self) -> ProcessPoolExecutor:
        target = self._target
        return ProcessPoolExecutor(
            self._num_processes,
            mp_context=multiprocessing.get_context(
                "spawn"
            ),  # a process with CUDA or threads must not be forked
            initializer=compile_only,
            initargs=((target.backend, target.arch, target.warp_size), self._num_sms),
        )

    def _problem(self, future: Future[int]) -> str | None:
        error = future.exception()
        if error is not None:
            return f"does not compile: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        limit = self._shared_bytes
        if limit is not None and future.result() > limit:
            return f"{future.result()} bytes of shared memory, more than the {limit} of a program"
        return None


def compile_numbered(name: str, key: tuple[KeyValue, ...], index: int) -> int:
    """Compile in a process of the pool, to which only names and numbers can be sent."""
    case = create_case(name, key)
    return compile_candidate(case, case.candidates[index])


class _Driver:
    """A GPU that exists only for the compiler."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # any number that other targets do not have: compiled kernels are kept by it

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend_to_be(target: GPUTarget, num_sms: int) -> None:
    """Let the compiler and the launchers take this for their device."""
    triton.runtime.driver.set_active(_Driver(target))
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment, return-value]
        multi_processor_count=num_sms
    )


def compile_only(target: tuple[str, int, int], num_sms: int) -> None:
    """From now on let this process only compile what it would launch, for such a device.

    Args:
        target: Backend, compute capability as 90, threads of a warp.
        num_sms: Multiprocessors, on which grids and splits depend.
    """
    torch.set_num_threads(1)
    pretend_to_be(GPUTarget(*target), num_sms)
    compile_and_launch = JITFunction.run

    def compile(kernel: JITFunction, *args: Any, warmup: bool, **options: Any) -> Any:
        compiled = compile_and_launch(kernel, *args, warmup=True, **options)
        _shared_bytes.append(compiled.metadata.shared)
        if "cubin" in compiled.asm:
            _hazards.extend(map(str, hazards_of_cubin(compiled.asm["cubin"])))
        return compiled

    JITFunction.run = compile


def compile_candidate(case: Case, config: Any) -> int:
    """Compile what a candidate launches on all workloads, after `compile_only`.

    Returns:
        Bytes of shared memory of the largest program; 0 also if the candidate leaves the work to torch.
    Raises:
        OverwrittenOperand: Names the instructions.
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


def problems_of_files(paths: Sequence[Path]) -> Iterator[str]:
    """Yield what does not compile, or needs more shared memory than there is; each names file and entry.

    Raises:
        ValueError: See `stored.check`.
    """
    for path in paths:
        file = read_file(path)
        check(file, NAME_TO_TUNABLE)
        capability = major, minor = file.compute_capability
        pretend_to_be(GPUTarget("cuda", 10 * major + minor, 32), _NUM_SMS)
        limit = CAPABILITY_TO_SHARED_BYTES.get(capability)
        if limit is None:
            yield f"{path}: compute_capability {major}.{minor}: its shared memory is not known here"
            continue
        for name in file.kernel_to_entries:
            for key, config in NAME_TO_TUNABLE[name].read(file).items():
                case = create_case(name, key)
                try:
                    shared_bytes = compile_candidate(case, config)
                except Exception as error:  # whatever the compiler says of it
                    yield f"{path}: {case.title}: {config}: {type(error).__name__}: {error}"
                    continue
                if shared_bytes > limit:
                    yield f"{path}: {case.title}: {config}: {shared_bytes} bytes of shared memory, not up to {limit}"


if __name__ == "__main__":
    compile_only(("cuda", 90, 32), _NUM_SMS)
    json.dump(list(problems_of_files([Path(name) for name in sys.argv[1:]])), sys.stdout)
