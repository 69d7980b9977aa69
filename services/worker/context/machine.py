"""Examination of this machine's processor: whether its kernels are right, what is chosen for it, and its rates.

`python -m triptych_services.worker.context.machine` measures them, unless a file has them, and prints all of it as
JSON, for `triptych env`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from triptych import host
from triptych.errors import ConfigError
from triptych.hub.cache import cache_home
from triptych_kernels.cpu.arithmetic import Arithmetic, arithmetic_of
from triptych_kernels.cpu.library import (
    isa,
    processor_flags,
    refused_isas,
    unused_isas,
    usable_isas,
    want_isa,
)
from triptych_kernels.cpu.machine import MachineRates, Rates, contradictions, keep_rates, load_rates
from triptych_kernels.cpu.machine_files import check_isas
from triptych_kernels.cpu.rate_measurement import measure_rates
from triptych_services.worker.context.attention_choice import installed_packages
from triptych_services.worker.context.resolved_config import DeviceTraits

_FAST_BFLOAT16 = frozenset({"amx_bf16", "bf16"})
"""CPU extensions that multiply bfloat16 faster than float32 wherever they are: one of x86, and one of ARM."""
_NATIVE_BFLOAT16 = _FAST_BFLOAT16 | {"avx512_bf16"}
_INTEL = "GenuineIntel"

log = logging.getLogger(__name__)

AUTO = "auto"


def machine_directory() -> Path:
    """Return the directory for what is found out about this machine: `$TRIPTYCH_MACHINE_DIR`, else in the cache.

    It must be writable, which the cache with the models need not be.
    """
    named = os.environ.get("TRIPTYCH_MACHINE_DIR")
    return Path(named) if named else cache_home() / "machine"


def examine_machine(instruction_set: str = AUTO) -> MachineRates:
    """Check the native kernels, unless a file holds the result, and read the machine's rates if a file has them.

    Afterwards `isa` and `rates` answer by them. Takes some milliseconds with the file of the check. Nothing is
    measured: `arithmetic_in_use` does not depend on it.

    Args:
        instruction_set: `worker.instruction_set`.

    Raises:
        ConfigError: It is unknown, or not usable here.
    """
    try:
        want_isa("" if instruction_set == AUTO else instruction_set)
    except ValueError:
        usable = ", ".join((AUTO, *usable_isas()))
        raise ConfigError(
            f"worker.instruction_set: {instruction_set} is not usable here; usable are {usable}; where the kernels "
            "are compiled, `python -m triptych_kernels.cpu.build --all` does it for every instruction set"
        ) from None
    directory = machine_directory()
    check_isas(directory)
    if instruction_set in refused_isas():
        raise ConfigError(
            f"worker.instruction_set: {instruction_set} is not usable here, since "
            f"{refused_isas()[instruction_set]}; set it to auto"
        )
    found = load_rates(directory)
    for contradiction in contradictions(found, arithmetic_in_use()):
        log.warning(
            "%s; model.dtype and model.activation_bits choose otherwise, and deleting %s lets `triptych env` measure "
            "again",
            contradiction,
            directory,
        )
    return found


def arithmetic_in_use() -> Arithmetic:
    """Return the arithmetic that the table has for the instruction set in use."""
    return arithmetic_of(isa(), host.cpu_vendor())


def cpu_traits(root: Path = host.ROOT) -> DeviceTraits:
    """Return the facts of this machine's CPU that decide what `auto` means; call `examine_machine` first."""
    return DeviceTraits(
        device="cpu",
        prefers_bfloat16=cpu_prefers_bfloat16(root),
        native_kernels=bool(isa()),
        byte_input_forms=arithmetic_in_use().byte_input_forms,
        attention_packages=installed_packages(),
    )


def cpu_prefers_bfloat16(root: Path = host.ROOT) -> bool:
    """Return whether the CPU multiplies bfloat16 faster than float32, rather than converting at every product.

    The table of instruction sets decides. Without native kernels, or if `root` is that of another machine, the CPU's
    flags do.
    """
    if root == host.ROOT and isa():
        return arithmetic_in_use().prefers_bfloat16
    flags = cpu_flags_of(root)
    # Intel's processors without AMX carry out its instruction at half the rate of float32's
    is_slow = _FAST_BFLOAT16.isdisjoint(flags) and host.cpu_vendor(root) == _INTEL
    return not is_slow and not _NATIVE_BFLOAT16.isdisjoint(flags)


def cpu_flags_of(root: Path) -> Collection[str]:
    """Return the instruction sets of the CPU in Linux's spelling; macOS has no /proc."""
    return processor_flags() if platform.system() == "Darwin" else host.cpu_flags(root)


def describe_arithmetic(found: MachineRates, chosen: Arithmetic) -> dict[str, str]:
    """Return form of weights, or attention -> the arithmetic that `auto` options choose for it, and its rates."""
    if not found.isa:
        return dict.fromkeys(("none", "attention"), "plain torch, since no native kernels are in use")
    one = found.one_thread
    activations = "bfloat16" if chosen.prefers_bfloat16 else "float32"
    weights = "" if chosen.prefers_bfloat16 else ", weights widened from the checkpoint's 16 bits"
    bfloat16 = _ratio(
        "products of bfloat16", one.tile_bfloat16 or one.bfloat16, "float32", one.float32, found
    )
    bytes = _ratio("those of 8 bits", one.int8, "16 bits", one.int16, found)
    return {
        "none": f"{activations}{weights}: {bfloat16}",
        **{
            form: f"exact products of integers, inputs rounded to {8 if form in chosen.byte_input_forms else 16} bits: "
            f"{bytes}"
            for form in ("q4", "q8")
        },
        "attention": f"{activations}: {bfloat16}",
    }


def _ratio(what: str, fast: float, other: str, slow: float, found: MachineRates) -> str:
    if not found.is_measured:
        return f"for {found.isa}; not measured"
    if not (fast and slow):
        return f"for {found.isa}; {what} are not measured, since it has no instruction for them"
    return f"for {found.isa}; {what} have {fast / slow:.1f} times the rate of {other}"


def describe_rates(found: MachineRates) -> str:
    """Return one line for the log."""
    if not found.is_measured:
        return f"{found.isa or 'no native kernels'}; rates are not measured yet, which `triptych env` does"
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


def measured_rates(instruction_set: str) -> MachineRates:
    """Return the rates of the file, or measure them, in up to two seconds; a quiet measurement is written.

    Args:
        instruction_set: As of `examine_machine`.
    """
    found = examine_machine(instruction_set)
    if not found.isa or found.is_measured:
        return found
    try:
        found = measure_rates(host.usable_cores())
    except (OSError, RuntimeError, MemoryError, AttributeError) as error:
        return MachineRates(found.isa, disturbance=str(error))
    keep_rates(found, machine_directory())
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instruction-set", default=AUTO)
    instruction_set = parser.parse_args().instruction_set
    found = measured_rates(instruction_set)
    is_quiet = found.is_measured and not found.disturbance
    shown = found if is_quiet else MachineRates(found.isa)  # figures that may lie are not shown
    print(
        json.dumps(
            {
                "instruction_set": isa(),
                "why_not_wider": unused_isas(),
                "threads": found.num_threads,
                "rates_of_one_thread": _measured(shown.one_thread),
                "rates_of_all_threads": _measured(shown.all_threads),
                "not_measured": "" if is_quiet else found.disturbance or "no native kernels are in use",
                "arithmetic": describe_arithmetic(shown, arithmetic_in_use()),
                "contradictions": list(contradictions(shown, arithmetic_in_use())),
                "huge_pages": host.huge_pages(),
                "memory_nodes": host.numa_nodes(),
                "kept_in": str(machine_directory()),
            }
        )
    )


def _measured(rates: Rates) -> Mapping[str, float]:
    return {name: rate for name, rate in asdict(rates).items() if rate}


if __name__ == "__main__":
    _main()
