"""Measures the tiles of the Triton kernels on this machine's GPU and stores the fastest, so that no start-up tunes.

    make tune-gpu                                         the most valuable choices, within 4 minutes
    make tune-gpu ARGS="--budget-s 1500"                  all of them
    make tune-gpu ARGS="--only paged_attention_decode"    some
    make tune-gpu ARGS="--list"                           which there are, and what each depends on

Each choice is a kernel at a key: sizes and dtypes of a layer, and if the kernel allows it a bucket of rows. All
candidates that the kernel declares are compiled on all processors, and run at the shapes of Llama-3.1-8B, Qwen3-0.6B,
SmolLM2-135M and Mixtral-8x7B. One with machine code that may overwrite what a tensor core still reads is not run,
whatever its speed (tools/tune/wgmma_hazards.py). One with another result than the default's is refused: by more
than rounding explains, or by a bit, if rows must have the same bits in any batch. The others are timed as replays of a
CUDA graph over operands that no cache holds, the three fastest again and for longer, beside the default, which stays
unless it is beaten by 2 %.

The file, kernels/triptych_kernels/triton/tuned/<device>.json, is written after every choice and keeps what was measured
before. Workers on devices of exactly that name take their tiles from it; a kernel at a key that it does not have, or on
another device, takes the default in its source. To ship it: `make test-gpu` on that device, then commit the file;
tests check that it fits the kernels and that all of it compiles.

Needs torch, triton and numpy; no installed Triptych and no network.
"""

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

from benchmarks.gpu.timing import release_memory, time_calls
from tools.tune.cases import NAME_TO_TUNABLE, Case, all_cases
from tools.tune.compiling import AheadCompiler
from tools.tune.search import Outcome, tune
from tools.tune.stored import open_file, with_outcome, write
from tools.tune.workloads import Workload
from triptych_kernels.triton.tuning import tunable as tuning
from triptych_kernels.triton.tuning.tunable import TunedFile

BUDGET_S = 240.0
_HOPPER = (9, 0)  # its choices are listed if there is no device


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device, described for the file and for the compilers' processes, which have none."""

    device: torch.device
    name: str
    compute_capability: tuple[int, int]
    target: GPUTarget
    num_sms: int


class GraphClock:
    """Times graph replays between events, over cold operands."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all that there was time for is measured, 1 if something failed, 2 if there is nothing to measure."""
    arguments = _parse(argv)
    device = find_device()
    capability = _HOPPER if device is None else device.compute_capability
    parts = arguments.only or [""]
    cases = [case for case in all_cases(capability) if any(part in case.title for part in parts)]
    if arguments.list:
        print("\n".join(f"{len(case.candidates):3} candidates  {case.title}" for case in cases))
        return 0
    try:
        if not cases:
            raise ValueError(f"--only {' '.join(parts)}: no choice's title holds that")
        if device is None:
            raise ValueError(f"torch {torch.__version__} of {sys.executable} sees no CUDA device")
        path = tuning.file_path(device.name, arguments.out)
        file = open_file(path, device.name, capability, NAME_TO_TUNABLE, print)
    except ValueError as error:
        print(f"tune-gpu: {error}", file=sys.stderr)
        return 2
    return tune_all(cases, device, file, arguments.budget_s, is_verbose=arguments.verbose)


def find_device() -> Device | None:
    """Return the current CUDA device, or None if torch sees none."""
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


def tune_all(
    cases: Sequence[Case], device: Device, file: TunedFile, budget_s: float, *, is_verbose: bool
) -> int:
    """Measure the cases until the budget is spent, and write the file after each; return the exit status."""
    measured = f"{date.today()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device.name}, {measured}; {len(cases)} choices, {budget_s:g} s; {file.path}", flush=True)
    clock = GraphClock(device.device)
    started_s = time.monotonic()
    num_done = num_failed = 0
    with AheadCompiler(device.target, device.num_sms) as compiler:
        for case, refusals in compiler.compiled(cases):
            if time.monotonic() - started_s > budget_s:
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
            for refusal in outcome.refusals if is_verbose else ():
                print(f"    refused {tuning.as_plain(refusal.config)}: {refusal.reason}", flush=True)
    num_left = len(cases) - num_done - num_failed
    print(f"{num_done} measured, {num_failed} failed, {num_left} left for want of time; {file.path}")
    return 1 if num_failed else 0


def _line(case: Case, outcome: Outcome) -> str:
    default_us, best_us = 1e6 * outcome.default_seconds, 1e6 * outcome.seconds
    counts = f"{outcome.num_timed} timed, {len(outcome.refusals)} refused"
    named = ", ".join(f"{name}={value}" for name, value in tuning.as_plain(outcome.config).items())
    config = named if outcome.speed_up != 1 else "the default"
    return f"{case.title:90} {default_us:10.1f} -> {best_us:10.1f} us, {outcome.speed_up:5.2f}x   {counts}   {config}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="choices with one of these in their title; default: all"
    )
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S",
        help="seconds after which no further choice is measured (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=tuning.FOLDER, metavar="DIR",
        help="folder of the device's file; choices that are not measured anew stay in it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--list", action="store_true", help="print the choices, most valuable first; no timing"
    )
    parser.add_argument("--verbose", action="store_true", help="say why candidates were refused")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
