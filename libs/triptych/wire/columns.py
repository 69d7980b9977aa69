"""Converts vectors to little-endian bytes and back. Parsing copies nothing and yields read-only arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ProtocolViolation
from triptych.types.step import U32

_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")
DTYPES: dict[str, np.dtype] = {"u32": _U32, "u64": _U64, "f32": np.dtype("<f4")}
_EMPTY = {dtype: np.frombuffer(b"", dtype) for dtype in DTYPES.values()}


def u32_to_bytes(column: U32) -> bytes:
    return column.astype(_U32, copy=False).tobytes() if len(column) else b""


def u32_from_bytes(data: bytes) -> U32:
    """Return a read-only view of `data`, [len / 4].

    Raises:
        ProtocolViolation: the length is no multiple of 4.
    """
    return column_from_bytes(data, _U32)


def optional_u32_to_bytes(values: Sequence[int | None]) -> bytes:
    """Return a column of values plus one, with 0 for None."""
    if not values:
        return b""
    return u32_to_bytes(np.array([0 if value is None else value + 1 for value in values], np.uint32))


def optional_u32_from_bytes(data: bytes) -> tuple[int | None, ...]:
    """Return the values of such a column."""
    return tuple([value - 1 if value else None for value in u32_from_bytes(data).tolist()]) if data else ()


def check_width(name: str, value: bytes, width: int) -> bytes:
    """Return bytes of a fixed length. Raises ProtocolViolation if they have another."""
    if len(value) != width:
        raise ProtocolViolation(f"{name}: {len(value)} bytes, not {width}")
    return value


def split_bytes(name: str, column: bytes, width: int) -> tuple[bytes, ...]:
    """Return the entries of a column of bytes of one length. Raises ProtocolViolation if the last one is cut short."""
    if len(column) % width:
        raise ProtocolViolation(f"{name}: {len(column)} bytes are no multiple of {width}")
    return tuple([column[start : start + width] for start in range(0, len(column), width)])


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


def column_from_bytes(data: bytes, dtype: np.dtype) -> NDArray:
    """Return a read-only view of `data`. Raises ProtocolViolation for a length that is no multiple of an entry's."""
    if not data:  # most columns of most steps
        return _EMPTY[dtype]
    if len(data) % dtype.itemsize:
        raise ProtocolViolation(
            f"a column of {len(data)} bytes does not hold whole {dtype.itemsize}-byte values"
        )
    return np.frombuffer(data, dtype=dtype)
