"""Converts vectors to little-endian bytes and back. Parsing copies nothing and yields read-only arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.types.step import F32, U32, U64

_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")
_U64 = np.dtype("<u8")
_EMPTY = {dtype: np.frombuffer(b"", dtype) for dtype in (_U32, _F32, _U64)}


def u32_to_bytes(column: U32) -> bytes:
    return column.astype(_U32, copy=False).tobytes() if len(column) else b""


def u32_from_bytes(data: bytes) -> U32:
    """Return a read-only view of `data`, [len / 4].

    Raises:
        ProtocolViolation: the length is no multiple of 4.
    """
    return _from_bytes(data, _U32)


def f32_to_bytes(column: F32) -> bytes:
    return column.astype(_F32, copy=False).tobytes()


def f32_from_bytes(data: bytes) -> F32:
    return _from_bytes(data, _F32)


def u64_to_bytes(values: Sequence[int] | U64) -> bytes:
    return np.asarray(values, dtype=_U64).tobytes()


def u64_from_bytes(data: bytes) -> U64:
    return _from_bytes(data, _U64)


def check_equal_lengths(**columns: NDArray[np.generic]) -> None:
    """Raise ProtocolViolation, naming each length, unless all columns of a table are equally long."""
    if len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise ProtocolViolation(f"columns of one table differ in length: {lengths}")


def check_offsets(offsets: U32, num_entries: int) -> None:
    """Raise ProtocolViolation unless `offsets` rise from 0 to `num_entries`."""
    if (
        not len(offsets)
        or offsets[0] != 0
        or offsets[-1] != num_entries
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise ProtocolViolation(f"offsets must rise from 0 to {num_entries}: {offsets.tolist()}")


def _from_bytes(data: bytes, dtype: np.dtype) -> NDArray:
    if not data:  # most columns of most steps
        return _EMPTY[dtype]
    if len(data) % dtype.itemsize:
        raise ProtocolViolation(
            f"a column of {len(data)} bytes does not hold whole {dtype.itemsize}-byte values"
        )
    return np.frombuffer(data, dtype=dtype)
