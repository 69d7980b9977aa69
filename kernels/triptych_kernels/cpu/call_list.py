"""Calls of native kernels with all addresses filled in, run with one call. Needs no torch."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych_kernels.cpu.library import isa, load, raise_failure

ADDRESS_BYTES = 8


class _CallStruct(ctypes.Structure):
    """`Call` in run.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("count_index", ctypes.c_int64),
        ("ahead", ctypes.c_void_p),
        ("num_panels", ctypes.c_int64),
        ("panel_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class PackedStage:
    """A call that another one makes row by row, `Stage` in stages.h."""

    kernel: str
    struct: bytes
    count: str
    """Name of its number of rows, the same for all stages of a call."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The weight that the next product reads."""

    address: int
    num_panels: int
    panel_bytes: int


@dataclass(frozen=True, slots=True)
class PackedCall:
    """One call."""

    kernel: str
    struct: bytes
    """The struct that the kernel reads; zeros where the address of the stages goes."""
    count: str
    """Name of its number of rows."""
    stages: tuple[PackedStage, ...] = ()
    stages_place: int = 0
    """Place of their address in the struct."""
    ahead: Ahead | None = None


class CallList:
    """Calls in the form that run.cpp takes, for the instruction set in use. Owned by one thread."""

    def __init__(self, calls: Sequence[PackedCall]) -> None:
        """
        Args:
            calls: The memory at their addresses is kept by the caller.
        Raises:
            AttributeError: The native library has no such kernel.
        """
        self._library = load(isa())
        counts = (count for call in calls for count in (call.count, *(stage.count for stage in call.stages)))
        self._count_names = tuple(dict.fromkeys(counts))
        self._counts = (ctypes.c_int64 * len(self._count_names))()
        self._structs = (_CallStruct * len(calls))()
        self._kept: list[Any] = []
        for struct, call in zip(self._structs, calls, strict=True):
            content = bytearray(call.struct)
            if call.stages:
                stages = self._pack_stages(call.stages)
                content[call.stages_place : call.stages_place + ADDRESS_BYTES] = stages.to_bytes(8, "little")
            struct.kernel = self._function(call.kernel)
            struct.arguments = self._keep(ctypes.create_string_buffer(bytes(content)))
            struct.count_index = self._count_names.index(call.count)
            if call.ahead is not None:
                struct.ahead, struct.num_panels = call.ahead.address, call.ahead.num_panels
                struct.panel_bytes = call.ahead.panel_bytes
        self._run = self._library.triptych_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._run.restype = ctypes.c_int64

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._structs)

    def _pack_stages(self, stages: Sequence[PackedStage]) -> int:
        """Return the address of a `Stages` in stages.h, which is kept."""
        size = ctypes.sizeof(ctypes.c_int64)
        packed = (ctypes.c_int64 * (3 + 2 * len(stages)))()
        packed[:3] = [
            ctypes.addressof(self._counts) + size * self._count_names.index(stages[0].count),
            len(stages),
            ctypes.addressof(packed) + 3 * size,
        ]
        for number, stage in enumerate(stages):
            packed[3 + 2 * number] = self._function(f"{stage.kernel}_rows")
            packed[4 + 2 * number] = self._keep(ctypes.create_string_buffer(stage.struct))
        return self._keep(packed)

    def _function(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, f"triptych_{name}"), ctypes.c_void_p).value or 0

    def _keep(self, memory: Any) -> int:
        self._kept.append(memory)
        return ctypes.addressof(memory)

    def run(self, counts: Mapping[str, int], first: int = 0, end: int | None = None) -> None:
        """Run the calls from `first` up to `end`, all of them by default.

        Args:
            counts: Name of each number of rows -> its value.
        Raises:
            MemoryError: The system has no memory for what a kernel needs while it runs; the outputs are undefined.
        """
        self._set(counts)
        num_calls = (len(self) if end is None else end) - first
        at = ctypes.addressof(self._structs) + first * ctypes.sizeof(_CallStruct)
        raise_failure(self._run(at, num_calls, self._counts), "a recorded step")

    def run_in_child(self, counts: Mapping[str, int]) -> str:
        """Run the calls in a child process, lose what they write, and return how it ended; empty if it ended well.

        The native kernels must have one thread.
        """
        self._set(counts)
        run = self._library.triptych_run_in_child
        run.argtypes, run.restype = self._run.argtypes, self._run.restype
        ending = int(run(self._structs, len(self._structs), self._counts))
        if ending > 0:
            return f"dies by {signal.Signals(ending).name}"
        return {0: "", -1: "has no child process to run in"}.get(ending, "does not end")

    def _set(self, counts: Mapping[str, int]) -> None:
        for i, name in enumerate(self._count_names):
            self._counts[i] = counts[name]
