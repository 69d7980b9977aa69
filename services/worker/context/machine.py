"""Examination of this machine's processor: whether its kernels are right, its rates, and what is chosen by them.

`python -m triptych_services.worker.context.machine` prints it as JSON, for `triptych env`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from triptych.hub.cache import cache_home
from triptych_kernels.cpu.library import isa, unused_isas
from triptych_kernels.cpu.machine import MachineRates, load_rates, rates
from triptych_kernels.cpu.self_check import check_isas
from triptych_services.worker.context import host


def machine_directory() -> Path:
    """Return the directory for what is found out about this machine: `$TRIPTYCH_MACHINE_DIR`, else in the cache.

    It must be writable, which the cache with the models need not be.
    """
    named = os.environ.get("TRIPTYCH_MACHINE_DIR")
    return Path(named) if named else cache_home() / "machine"


def examine_machine(num_threads: int) -> MachineRates:
    """Check the native kernels and measure the machine, unless files in the cache hold the results.

    Afterwards `isa` and `rates` answer by them. Takes about half a second, or some milliseconds with the files.

    Args:
        num_threads: Number of threads that will compute; 0 means one per core.
    """
    directory = machine_directory()
    check_isas(directory)
    return load_rates(num_threads or host.usable_cores(), directory)


def describe_arithmetic(found: MachineRates) -> dict[str, str]:
    """Return form of weights, or attention -> the arithmetic that `auto` options choose for it, and why."""
    if not found.isa:
        return dict.fromkeys(("none", "attention"), "plain torch, since no native kernels are in use")
    one = found.one_thread
    fast = one.tile_bfloat16 or one.bfloat16
    if not found.is_measured:
        why = "by the instruction set, since nothing was measured"
    elif fast == 0.0:
        why = f"{found.isa} has no product of bfloat16"
    else:
        why = f"products of bfloat16 have {fast / one.float32:.1f} times the rate of float32"
    activations = "bfloat16" if found.prefers_bfloat16 else "float32"
    weights = "" if found.prefers_bfloat16 else ", weights widened from the checkpoint's 16 bits"
    bits = f"exact products of integers, inputs rounded to {8 if found.prefers_8_bit_inputs else 16} bits"
    if one.int16 and not one.int8:
        bits += f": {found.isa} has no product of 8 bits in one instruction, so its rate was not measured"
    elif one.int16:
        bits += f": those of 8 bits have {one.int8 / one.int16:.1f} times the rate of 16 bits"
    return {
        "none": f"{activations}{weights}: {why}",
        "q4": bits,
        "q8": bits,
        "attention": f"{activations}: {why}",
    }


def describe_rates(found: MachineRates) -> str:
    """Return one line for the log."""
    if not found.is_measured:
        return f"{found.isa or 'no native kernels'}, not measured"
    one, together = found.one_thread, found.all_threads
    products = {
        "float32": one.float32,
        "bfloat16": one.tile_bfloat16 or one.bfloat16,
        "16-bit integers": one.int16,
        "8-bit integers": one.int8,
    }
    listed = ", ".join(f"{rate:.0f} in {name}" for name, rate in products.items() if rate)
    return (
        f"{found.isa}: 10^9 operations per second and thread: {listed}; {together.memory:.0f} GB/s from memory with "
        f"{found.num_threads} threads"
    )


def _main() -> None:
    found = examine_machine(0)
    print(
        json.dumps(
            {
                "instruction_set": isa(),
                "why_not_wider": unused_isas(),
                "threads": found.num_threads,
                "rates_of_one_thread": asdict(rates().one_thread),
                "rates_of_all_threads": asdict(rates().all_threads),
                "arithmetic": describe_arithmetic(found),
                "huge_pages": host.huge_pages(),
                "memory_nodes": host.numa_nodes(),
                "kept_in": str(machine_directory()),
            }
        )
    )


if __name__ == "__main__":
    _main()
