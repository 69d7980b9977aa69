"""The command line of `tools/tune_gpu.py`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

import triptych_kernels.triton.tuning.tunable as tuning
from benchmarks.gpu_figures.timing import release_memory, time_calls
from benchmarks.gpu_tuning.ahead import AheadCompiler
from benchmarks.gpu_tuning.cases import NAME_TO_TUNABLE, all_cases
from benchmarks.gpu_tuning.stored import open_file, with_outcome, write
from benchmarks.gpu_tuning.tuner import Outcome, tune
from benchmarks.gpu_tuning.workload import Case, Workload
from triptych_kernels.triton.tuning.tunable import TunedFile

BUDGET_S = 240.0
_HOPPER = (9, 0)  # whose choices are listed where there is no device


@dataclass(frozen=True, slots=True)
class Device:
    """What the compilers' processes, which have none, are told of it, and the file."""

    device: torch.device
    name: str
    compute_capability: tuple[int, int]
    target: GPUTarget
    num_sms: int


def main(argv: Sequence[str], description: str) -> int:
    """0: all that there was time for is measured; 1: something failed; 2: nothing to measure on, or no such kernel."""
    arguments = _parse(argv, description)
    device = find_device()
    capability = _HOPPER if device is None else device.compute_capability
    cases = [c for c in all_cases(capability) if _is_asked(c, arguments.only)]
    if not cases:
        print(f"tune-gpu: --only {' '.join(arguments.only)}: no choice's title holds that", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{len(c.tunable.candidates(*c.key)):3} candidates  {c.title}" for c in cases))
        return 0
    if device is None:
        print(f"tune-gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device", file=sys.stderr)
        return 2
    path = tuning.file_path(device.name, arguments.out)
    try:
        file = open_file(path, device.name, capability, NAME_TO_TUNABLE, lambda line: print(line, flush=True))
    except ValueError as error:
        print(f"tune-gpu: {error}; move it away", file=sys.stderr)
        return 2
    return _tune_all(cases, device, file, arguments)


def find_device() -> Device | None:
    """The current CUDA device; None: torch sees none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return Device(
        device,
        tuning.device_name(device),
        torch.cuda.get_device_capability(device),
        triton.runtime.driver.active.get_current_target(),
        torch.cuda.get_device_properties(device).multi_processor_count,
    )


def _tune_all(cases: Sequence[Case], device: Device, file: TunedFile, arguments: argparse.Namespace) -> int:
    measured = f"{date.today()}, torch {torch.__version__}, triton {triton.__version__}"
    clock = Clock(device.device)
    started = time.monotonic()
    num_done = num_failed = 0
    print(
        f"{device.name}, {measured}; {len(cases)} choices, {arguments.budget_s:g} s; {file.path}", flush=True
    )
    with AheadCompiler(device.target, device.num_sms, arguments.processes) as compiler:
        for case, refusals in compiler.compiled(cases):
            if time.monotonic() - started > arguments.budget_s:
                break
            try:
                outcome = tune(case, device.device, clock, refusals)
            except (ValueError, torch.OutOfMemoryError) as error:
                num_failed += 1
                print(f"{case.title:90} FAILED: {error}", flush=True)
                continue
            finally:
                release_memory()
            num_done += 1
            file = with_outcome(file, case, outcome, measured)
            write(file)
            print(_line(case, outcome), flush=True)
            for refusal in outcome.refusals if arguments.verbose else ():
                print(f"    refused {tuning.as_plain(refusal.config)}: {refusal.reason}", flush=True)
    num_left = len(cases) - num_done - num_failed
    print(
        f"{num_done} measured, {num_failed} failed, {num_left} left for want of time; {file.path}", flush=True
    )
    return 1 if num_failed else 0


class Clock:
    """Graph replays between events, over cold operands."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_warm = False

    def __call__(self, workload: Workload, round_s: float) -> float:
        warm_up_s = 0.002 if self._is_warm else 0.5
        self._is_warm = True
        timing = time_calls(workload.calls, self._device, round_s=round_s, warm_up_s=warm_up_s)
        if timing.note:  # the host's time, which says nothing of tiles
            raise ValueError(f"{workload.name}: {timing.note}")
        return timing.median


def _is_asked(case: Case, only: Sequence[str] | None) -> bool:
    return any(part in case.title for part in only or [""])


def _line(case: Case, outcome: Outcome) -> str:
    times = (
        f"{outcome.default_seconds * 1e6:10.1f} -> {outcome.seconds * 1e6:10.1f} us, {outcome.speed_up:5.2f}x"
    )
    counts = f"{outcome.num_timed} timed, {len(outcome.refusals)} refused"
    config = ", ".join(f"{name}={value}" for name, value in tuning.as_plain(outcome.config).items())
    return f"{case.title:90} {times}   {counts}   {config if outcome.speed_up != 1 else 'the default'}"


def _parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/tune_gpu.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="choices whose title holds one of these; default: all"
    )
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S",
        help="after as many seconds no further choice is begun (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=tuning.FOLDER, metavar="DIR",
        help="where the device's file stands or shall stand; choices that are not measured anew stay in it "
        "(default: where it is shipped, %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, metavar="N", help="that compile (default: one per processor, less one)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the choices, most valuable first; no timing"
    )
    parser.add_argument("--verbose", action="store_true", help="say why candidates were refused")
    return parser.parse_args(argv)
