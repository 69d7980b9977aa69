"""The arithmetic of layers by instruction set, where the config leaves it open. Needs no torch.

It is a table and no measurement, so that equal machines choose alike: it decides the bits of results, and with them
between which workers a request may move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ROUNDED = ("q4", "q8")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic that is the faster one with an instruction set."""

    prefers_bfloat16: bool = False
    """Whether products of bfloat16 are taken rather than those of float32."""
    byte_input_forms: tuple[str, ...] = ()
    """Forms of quantized weights of which inputs are rounded to 8 bits rather than to 16."""


ARITHMETIC: Mapping[str, Arithmetic] = {
    "amx": Arithmetic(prefers_bfloat16=True, byte_input_forms=_ROUNDED),
    # vdpbf16ps has twice the rate of float32 on AMD's processors: 235 beside 117 GFLOP/s of a core
    "avx512_bf16": Arithmetic(prefers_bfloat16=True, byte_input_forms=_ROUNDED),
    "avx512_vnni": Arithmetic(byte_input_forms=_ROUNDED),
    # the products of avx2, below, are no faster than those of 16-bit inputs here, and half as fast for one row
    "avx512": Arithmetic(),
    "avx2_vnni": Arithmetic(byte_input_forms=_ROUNDED),
    # Sums of 32 products of bytes and 4 bits fit 16 bits: in a prefill 1.8 times the rate of 16-bit inputs, 1.5 at 32
    # rows, 0.9 at one. Those of whole bytes do not, and are widened after each instruction.
    "avx2": Arithmetic(byte_input_forms=("q4",)),
    "neon_bf16": Arithmetic(prefers_bfloat16=True, byte_input_forms=_ROUNDED),
    "neon_dotprod": Arithmetic(),
    "neon": Arithmetic(),
}
"""Instruction set, as of `library.isa` -> its arithmetic."""

_INTEL_BFLOAT16 = Arithmetic(byte_input_forms=_ROUNDED)
"""That of Intel's processors without AMX, which multiply bfloat16 in vectors at half the rate of float32."""


def arithmetic_of(isa: str, vendor: str) -> Arithmetic:
    """Return the arithmetic for an instruction set; plain torch's float32 if it is empty or for tests.

    Args:
        vendor: Maker of the processor, as /proc/cpuinfo names it.
    """
    if isa == "avx512_bf16" and vendor == "GenuineIntel":
        return _INTEL_BFLOAT16
    return ARITHMETIC.get(isa, Arithmetic())
