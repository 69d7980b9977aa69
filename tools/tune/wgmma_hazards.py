"""Finds machine code that overwrites an operand of a tensor core product which may still be reading it.

On Hopper a `wgmma` is asynchronous: it reads its left operand from registers until something waits for it.
ptxas before 13.3 may give those registers to other values earlier (Triton issue 9433), which corrupts results now and
then. So compiled code is read before it is trusted.

    HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12], R24, gsb0    issued; reads R120..R123
    MOV R121, R7                                                   hazard
    WARPGROUP.DEPBAR.LE gsb0, 0x0                                  waited for: from here on R120..R123 are free
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_TIMEOUT_S = 60.0

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.a-z]*)\s*([^;]*);")
_REGISTER_OPERAND = re.compile(r"R(?:\d+|Z),\s*R(\d+),\s*gdesc")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_LEFT_REGISTERS = 4
"""Registers of a thread that hold the left operand of one product: 64 rows of 32 bytes, on 128 threads."""
_OLDEST = 16
"""Groups of products that are distinguished; more than are ever in flight."""

# Instructions that read their first register operand, or which have no destination but predicates.
_WRITES_NOTHING = (
    "BAR", "CALL", "DSETP", "FCHK", "FSETP", "HSETP2", "ISETP", "NANOSLEEP", "PLOP3", "R2B", "R2P", "RED", "RET",
    "ST", "WARPSYNC",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of machine code."""

    offset: int
    is_conditional: bool
    opcode: str
    operands: str

    @property
    def text(self) -> str:
        return f"{self.opcode} {self.operands}"


@dataclass(frozen=True, slots=True)
class Hazard:
    """A product and an instruction that writes registers which it may still read."""

    product: Instruction
    write: Instruction

    def __str__(self) -> str:
        return (
            f"{self.write.offset:#x} {self.write.text} writes what {self.product.offset:#x} {self.product.text} "
            "may still read"
        )


def hazards_of_cubin(cubin: bytes) -> list[Hazard]:
    """Return the hazards of a compiled kernel, whatever its architecture; none where it has no such products.

    Raises:
        subprocess.CalledProcessError: it is no cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-sass", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return find_hazards(done.stdout)


def find_hazards(sass: str) -> list[Hazard]:
    """Return the hazards of machine code as `cuobjdump -sass` prints it, along every path through every function."""
    return [
        hazard
        for function in re.split(r"^\s*Function : .*$", sass, flags=re.MULTILINE)
        for hazard in _hazards_of_function(list(_instructions(function)))
    ]


def _instructions(sass: str) -> Iterator[Instruction]:
    for line in sass.splitlines():
        found = _LINE.match(line)
        if found:
            offset, guard, opcode, operands = found.groups()
            is_conditional = guard is not None and guard.strip() not in ("@PT", "@UPT")
            yield Instruction(int(offset, 16), is_conditional, opcode, operands.strip())


def _hazards_of_function(code: list[Instruction]) -> list[Hazard]:
    """Follow which products are on their way from instruction to instruction until nothing more is learnt."""
    offset_to_index = {instruction.offset: index for index, instruction in enumerate(code)}
    index_to_left = {index: left for index, i in enumerate(code) if (left := _left_registers(i)) is not None}
    if not index_to_left:
        return []
    # Before each instruction: the products that may be on their way, each with the number of groups that were closed
    # after it, the least over all paths; -1 while its own is open.
    arriving: list[dict[int, int] | None] = [None] * len(code)
    arriving[0] = {}
    waiting = [0]
    while waiting:
        index = waiting.pop()
        leaving = _after(code[index], index, arriving[index] or {}, index in index_to_left)
        for follower in _followers(code, index, offset_to_index):
            known = arriving[follower]
            merged = dict(known or {})
            for product, age in leaving.items():
                merged[product] = min(age, merged.get(product, age))
            if known is None or merged != known:
                arriving[follower] = merged
                waiting.append(follower)
    return [
        Hazard(code[product], code[index])
        for index, products in enumerate(arriving)
        for product in sorted(products or {})
        if not _is_product(code[index]) and set(index_to_left[product]) & set(_written(code[index]))
    ]


def _after(
    instruction: Instruction, index: int, before: Mapping[int, int], reads_left: bool
) -> dict[int, int]:
    """The products on their way after an instruction."""
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        (allowed,) = re.findall(r"gsb0,\s*(0x[0-9a-f]+)", instruction.operands)
        return {product: age for product, age in before.items() if age < int(allowed, 16)}
    if not _is_product(instruction):
        return dict(before)
    after = dict(before)
    if reads_left:
        after[index] = -1
    if "gsb0" in instruction.operands:  # closes a group: of its own product and those before it
        after = {product: min(age + 1, _OLDEST) for product, age in after.items()}
    return after


def _followers(code: list[Instruction], index: int, offset_to_index: Mapping[int, int]) -> Iterator[int]:
    """The instructions that may come next.

    Raises:
        ValueError: a jump to an address in a register.
    """
    instruction = code[index]
    operation = instruction.opcode.partition(".")[0]
    target = _TARGET.search(instruction.operands)
    if operation in ("BRX", "JMX", "JMP"):
        raise ValueError(f"{instruction.offset:#x} {instruction.text}: its target is not known")
    if operation in ("BRA", "CALL") and target and int(target.group(1), 16) in offset_to_index:
        yield offset_to_index[int(target.group(1), 16)]
    # a branch may also depend on a predicate among its operands, or on threads that have diverged (BRA.DIV)
    always_jumps = instruction.opcode == "BRA" and re.fullmatch(_TARGET, instruction.operands) is not None
    is_end = always_jumps or operation in ("EXIT", "RET")
    if (instruction.is_conditional or not is_end) and index + 1 < len(code):
        yield index + 1


def _is_product(instruction: Instruction) -> bool:
    return re.match(r"[BHIQ]GMMA", instruction.opcode) is not None


def _left_registers(instruction: Instruction) -> range | None:
    """Those that a product reads its left operand from; None: it reads it from shared memory, or is no product."""
    found = _REGISTER_OPERAND.match(instruction.operands) if _is_product(instruction) else None
    return None if found is None else range(int(found.group(1)), int(found.group(1)) + _LEFT_REGISTERS)


def _written(instruction: Instruction) -> range:
    """The registers that an instruction writes; what is not known here is taken to write its first operand."""
    if instruction.opcode.startswith(_WRITES_NOTHING):
        return range(0)
    found = re.match(r"(?:U?P[T\d]+,\s*)*R(\d+)\b", instruction.operands)
    if found is None:
        return range(0)
    parts = instruction.opcode.split(".")
    if "128" in parts or parts[-1] == "4" or parts[0].endswith("MMA"):
        count = 4
    elif {"64", "WIDE", "F64"} & set(parts) or parts[-1] == "2" or parts[0] in ("DADD", "DFMA", "DMUL"):
        count = 2
    elif parts[0] == "CS2R":
        count = 1 if "32" in parts else 2
    else:
        count = 1
    return range(int(found.group(1)), int(found.group(1)) + count)
