"""Candidates compiled in processes of their own, a few choices ahead of the one that is timed."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager

from triton.backends.compiler import GPUTarget

from benchmarks.gpu_tuning.cases import create_case
from benchmarks.gpu_tuning.compiling import compile_candidate, largest_shared_bytes, start_process
from benchmarks.gpu_tuning.tuner import Refusal
from benchmarks.gpu_tuning.workload import Case
from triptych_kernels.triton.tuning.tunable import KeyValue

_AHEAD = 4
"""Compilations under way or waiting, for each process: enough that none stands idle while a choice is timed."""


class AheadCompiler(AbstractContextManager["AheadCompiler"]):
    """Owns the processes; leaving it ends them."""

    def __init__(self, target: GPUTarget, num_sms: int, num_processes: int | None = None) -> None:
        """Start with the first choice.

        Args:
            target: of the device; its compute capability decides how much shared memory a program may have.
            num_sms: its multiprocessors.
            num_processes: None: one per processor but one, which times.
        """
        self._num_processes = num_processes or max((os.cpu_count() or 2) - 1, 1)
        self._shared_bytes = largest_shared_bytes(target.arch)
        self._target, self._num_sms = target, num_sms
        self._pool = self._create_pool()

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def compiled(self, cases: Iterable[Case]) -> Iterator[tuple[Case, list[Refusal]]]:
        """The cases in order, each when its candidates are compiled, with those that are no good."""
        left = iter(cases)
        ahead: deque[tuple[Case, list[Future[int]]]] = deque()
        while True:
            while sum(len(futures) for _, futures in ahead) < _AHEAD * self._num_processes:
                case = next(left, None)
                if case is None:
                    break
                count = len(case.tunable.candidates(*case.key))
                ahead.append((case, [self._submit(case, index) for index in range(count)]))
            if not ahead:
                return
            case, futures = ahead.popleft()
            configs = case.tunable.candidates(*case.key)
            refusals = [
                Refusal(config, problem)
                for config, future in zip(configs, futures, strict=True)
                if (problem := self._problem(future)) is not None
            ]
            yield case, refusals

    def _submit(self, case: Case, index: int) -> Future[int]:
        try:
            return self._pool.submit(_compile_numbered, case.tunable.name, case.key, index)
        except BrokenProcessPool:  # a compiler that crashed took with it what was under way, which is refused
            self._pool = self._create_pool()
            return self._pool.submit(_compile_numbered, case.tunable.name, case.key, index)

    def _create_pool(self) -> ProcessPoolExecutor:
        target = self._target
        return ProcessPoolExecutor(
            self._num_processes,
            # not forked: a process with CUDA or threads must not be
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start_process,
            initargs=((target.backend, target.arch, target.warp_size), self._num_sms),
        )

    def _problem(self, future: Future[int]) -> str | None:
        error = future.exception()
        if error is not None:
            return f"does not compile: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if self._shared_bytes is not None and future.result() > self._shared_bytes:
            return (
                f"{future.result()} bytes of shared memory, more than the {self._shared_bytes} of a program"
            )
        return None


def _compile_numbered(name: str, key: tuple[KeyValue, ...], index: int) -> int:
    """In a process of the pool, to which nothing but names and numbers can be sent."""
    case = create_case(name, key)
    return compile_candidate(case, case.tunable.candidates(*key)[index])
