"""A recorded program without the process that recorded it: its calls, with places for addresses. Needs no torch.

    call            a kernel's name, its struct with zeros for addresses, and for each of these a region and an offset
    region          memory that the calls read or write: constants, inputs, caches, and the program's own buffers

`BoundProgram` is such a program with the addresses of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triptych_kernels.cpu.call_list import ADDRESS_BYTES, Ahead, CallList, PackedCall, PackedStage


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of memory that a program uses."""

    name: str
    num_bytes: int
    """Bytes that it has at least."""


@dataclass(frozen=True, slots=True)
class StoredStruct:
    """The struct that a kernel reads."""

    kernel: str
    struct: str
    """The struct in hex, with zeros for addresses."""
    addresses: Sequence[Sequence[int]]
    """(place in the struct, number of the region, offset in it) of each."""

    def fill(self, starts: Sequence[int]) -> bytes:
        """Return the struct with addresses.

        Args:
            starts: Address of each region.
        """
        content = bytearray.fromhex(self.struct)
        for place, region, offset in self.addresses:
            content[place : place + ADDRESS_BYTES] = (starts[region] + offset).to_bytes(8, "little")
        return bytes(content)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """One call."""

    own: StoredStruct
    count: str
    """Name of its number of rows."""
    stages: Sequence[StoredStruct]
    stages_count: str
    """Name of their number of rows."""
    stages_place: int
    """As of `PackedCall`."""
    ahead: Sequence[int]
    """(number of the region, offset in it, panels, bytes of a panel) of the weight that is read next; or empty."""

    def fill(self, starts: Sequence[int]) -> PackedCall:
        """Return the call with addresses."""
        ahead = None
        if self.ahead:
            region, offset, num_panels, panel_bytes = self.ahead
            ahead = Ahead(starts[region] + offset, num_panels, panel_bytes)
        stages = tuple(
            PackedStage(stage.kernel, stage.fill(starts), self.stages_count) for stage in self.stages
        )
        return PackedCall(
            self.own.kernel, self.own.fill(starts), self.count, stages, self.stages_place, ahead
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StoredCall:
        """Read what `asdict` gives; raises as `StoredProgram.from_json`."""
        stages = [StoredStruct(**stage) for stage in values["stages"]]
        return cls(**{**values, "own": StoredStruct(**values["own"]), "stages": stages})


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """The place of an output; a run fills its first rows."""

    region: int
    offset: int
    shape: Sequence[int]
    dtype: str
    """Name of numpy's, or bfloat16."""


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """All calls in their order."""

    regions: Sequence[Region]
    calls: Sequence[StoredCall]
    outputs: Sequence[StoredOutput]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StoredProgram:
        """Read what `to_json` gives.

        Raises:
            KeyError, TypeError, ValueError: It is something else, or an address lies outside of its region.
        """
        regions = [Region(**region) for region in values["regions"]]
        calls = [StoredCall.from_json(call) for call in values["calls"]]
        outputs = [StoredOutput(**output) for output in values["outputs"]]
        for call in calls:
            for struct in (call.own, *call.stages):
                _check_struct(regions, struct)
            if call.stages:
                _check_place(call.own, call.stages_place)
            if call.ahead:
                region, offset, num_panels, panel_bytes = call.ahead
                _check_offset(regions, region, offset)
                _check_offset(regions, region, offset + num_panels * panel_bytes)
        for output in outputs:
            _check_offset(regions, output.region, output.offset)
        return cls(regions, calls, outputs)


def _check_struct(regions: Sequence[Region], struct: StoredStruct) -> None:
    for place, region, offset in struct.addresses:
        _check_place(struct, place)
        _check_offset(regions, region, offset)


def _check_place(struct: StoredStruct, place: int) -> None:
    if not 0 <= place <= len(bytes.fromhex(struct.struct)) - ADDRESS_BYTES:
        raise ValueError(f"{struct.kernel}: no address is at {place}")


def _check_offset(regions: Sequence[Region], region: int, offset: int) -> None:
    if not (0 <= region < len(regions) and 0 <= offset <= regions[region].num_bytes):
        raise ValueError(f"offset {offset} is outside of region {region}")


class BoundProgram:
    """A stored program with all addresses filled in, for the instruction set in use. Owned by one thread."""

    def __init__(self, program: StoredProgram, addresses: Mapping[str, int]) -> None:
        """
        Args:
            addresses: Name of each region -> its start. The caller keeps the memory.
        Raises:
            AttributeError: The native library has no such kernel.
            KeyError: A region has no address.
        """
        self._starts = [addresses[region.name] for region in program.regions]
        self._list = CallList([call.fill(self._starts) for call in program.calls])

    def address(self, output: StoredOutput) -> int:
        """Return the address of an output."""
        return self._starts[output.region] + output.offset

    def run(self, counts: Mapping[str, int]) -> None:
        """Compute from the content of the inputs, as `Program.run` does.

        Raises:
            MemoryError: The system has no memory for what a kernel needs while it runs.
        """
        self._list.run(counts)
