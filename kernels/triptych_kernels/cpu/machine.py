"""The rates at which this machine multiplies and reads, as a quiet measurement has left them in a file. Needs no torch.

Nothing is chosen by them: `arithmetic.py` has the choice, and rates that contradict it are a warning.
`rate_measurement.py` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych_kernels.cpu.arithmetic import Arithmetic
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.machine_files import Json, processor, read_found, write_found

_FILE = "rates"
_VERSION = 2
"""Version of what is measured and how; raise it when a loop of machine.cpp changes."""
_CONTRADICTION = 1.5
"""Ratio beyond which rates contradict a choice. Those that matter are 0.5, 2 or more, and those of 2 were never below
1.3 where a neighbour kept the core's other half busy."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one thread, or of several together.

    Products are in 10^9 operations per second, where a multiplication and an addition are two; reading is in 10^9 bytes
    per second. 0 means that the instruction set has no such product or the processor no such cache, or that nothing was
    measured.
    """

    float32: float = 0.0
    bfloat16: float = 0.0
    """Products of pairs of bfloat16, summed in float32, in vectors."""
    int16: float = 0.0
    """Products of pairs of 16-bit integers, summed in 32 bits."""
    int8: float = 0.0
    """Products of 8-bit integers, those of one operand without a sign."""
    tile_bfloat16: float = 0.0
    """Products of bfloat16 in the tiles of AMX."""
    tile_int8: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    l3: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates of this machine with one instruction set."""

    isa: str
    """Instruction set, as of `library.isa`; empty without native kernels."""
    num_threads: int = 1
    one_thread: Rates = Rates()
    all_threads: Rates = Rates()
    """Rates of `num_threads` threads together."""
    disturbance: str = ""
    """Reason to believe that other processes disturbed the measurement; empty if it was quiet."""

    @property
    def is_measured(self) -> bool:
        """Whether there are rates."""
        return self.one_thread.float32 > 0.0


_isa_to_rates: dict[str, MachineRates] = {}
"""Rates that this process has read or measured."""


def rates() -> MachineRates:
    """Return the rates with the instruction set in use; they are unmeasured unless `load_rates` has found some."""
    return _isa_to_rates.get(isa()) or MachineRates(isa())


def load_rates(directory: Path) -> MachineRates:
    """Read the rates from their file, if there is one, in some milliseconds. From then on `rates` returns them.

    Args:
        directory: Directory of the files. Each processor and instruction set has its own.
    """
    if isa() and (kept := read_found(directory, _FILE, _key(), _from_json)) is not None:
        _isa_to_rates[isa()] = kept
    return rates()


def keep_rates(found: MachineRates, directory: Path) -> None:
    """Let `rates` return these, and write them to their file if the measurement was quiet."""
    _isa_to_rates[found.isa] = found
    if not found.disturbance:
        write_found(directory, _FILE, _key(), asdict(found))


def contradictions(found: MachineRates, chosen: Arithmetic) -> Iterator[str]:
    """Yield what measured rates have against the arithmetic that the instruction set has by the table.

    Inputs that are not rounded to 8 bits are never a contradiction: unpacking weights can cost what those products
    save, as on AVX-512 without VNNI.
    """
    one = found.one_thread
    bfloat16 = one.tile_bfloat16 or one.bfloat16
    if bfloat16 and chosen.prefers_bfloat16 and bfloat16 * _CONTRADICTION < one.float32:
        yield _contradiction("bfloat16", "are chosen", found.isa, bfloat16 / one.float32, "float32")
    if bfloat16 and not chosen.prefers_bfloat16 and bfloat16 > one.float32 * _CONTRADICTION:
        yield _contradiction("bfloat16", "are not chosen", found.isa, bfloat16 / one.float32, "float32")
    if one.int8 and chosen.byte_input_forms and one.int8 * _CONTRADICTION < one.int16:
        yield _contradiction("8-bit inputs", "are chosen", found.isa, one.int8 / one.int16, "16-bit ones")


def _contradiction(products: str, choice: str, isa_name: str, ratio: float, others: str) -> str:
    return f"products of {products} {choice} for {isa_name}, and have {ratio:.1f} times the rate of {others} here"


def _key() -> Json:
    return {"processor": processor(), "isa": isa(), "measurement": _VERSION}


def _from_json(found: Json) -> MachineRates:
    def rates_of(name: str) -> Rates:
        values: Any = found[name]
        return Rates(**{field: float(value) for field, value in values.items()})

    return MachineRates(
        str(found["isa"]), int(str(found["num_threads"])), rates_of("one_thread"), rates_of("all_threads")
    )
