"""The header of a .gguf file: its metadata, and the name, type, shape and place of each tensor.

    magic, version, counts | key, type, value … | name, shape, type, offset … | padding | tensors, each aligned

Every count is compared with the bytes that are left before anything is made for it, so that no header takes more memory
than a few times its own length. Source: ggml's description of the format.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from triptych.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_NUMBERS = "BbHhIif?"
"""struct's letter of the value types 0 to 7; 10 to 12 are `_WIDE`."""
_WIDE = {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, type and offset
_MIN_PAIR_BYTES = 8 + 4 + 1

Metadata = dict[str, Any]
"""GGUF key -> value: int, float, bool, str or a list of them."""


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A form of stored numbers."""

    name: str
    num_weights: int = 1
    """Weights of a block; 1 for plain numbers."""
    num_bytes: int = 0
    """Bytes of a block."""


GGML_TYPES = {
    number: GgmlType(name, num_weights, num_bytes)
    for number, name, num_weights, num_bytes in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8)),
        *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8)),
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
        *((8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (20, "IQ4_NL", 32, 18), (39, "MXFP4", 32, 17)),
        *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176)),
        *((14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74)),
        *((18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
        *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
        (40, "NVFP4", 64, 36),
    )
}
"""Number in a file -> type. Numbers without an entry were withdrawn, or are newer than this table."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    """[rows, columns]: blocks run along the last axis. The file has the axes the other way round."""
    offset: int
    """In bytes from the start of the file."""
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything of a file but the numbers of its tensors."""

    path: Path
    file_size: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a .gguf file.

    Raises:
        ModelError: It is not such a file, of another byte order, cut short or contradicts itself; names what.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not size:
                raise ModelError(f"{path}: not a GGUF file, or cut short: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


class _Reader:
    """A position in a file's header."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = 0

    def read(self) -> GgufHeader:
        if self._data[: len(_MAGIC)] != _MAGIC:
            self._fail("it does not begin with GGUF")
        self._at = len(_MAGIC)
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ModelError(f"{self._path}: byte order: big-endian GGUF is not supported")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version} is not supported, only 2 and 3")
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_pairs = self._count("metadata keys", _MIN_PAIR_BYTES)
        metadata: Metadata = {}
        for _ in range(num_pairs):
            key = self._text("a key")
            if key in metadata:
                self._fail(f"{key} is there twice")
            metadata[key] = self._value(key, self._number("I"))
        tensors = self._tensors(num_tensors, metadata)
        return GgufHeader(self._path, self._size, metadata, tensors)

    def _tensors(self, count: int, metadata: Metadata) -> dict[str, TensorInfo]:
        found = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._fail(f"general.alignment {alignment!r} is no power of two up to {_MAX_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = start
        for name, kind, shape, offset in sorted(found, key=lambda tensor: tensor[3]):
            size = math.prod(shape) // kind.num_weights * kind.num_bytes
            if name in tensors:
                self._fail(f"tensor {name!r} is there twice")
            if offset % alignment:
                self._fail(f"tensor {name!r} begins at {offset}, no multiple of {alignment}")
            if start + offset < end:
                self._fail(f"tensor {name!r} overlaps the one before it")
            end = start + offset + size
            if end > self._size:
                self._fail(f"tensor {name!r} ends at {end} of {self._size} bytes")
            tensors[name] = TensorInfo(name, kind, shape, start + offset, size)
        return {name: tensors[name] for name, *_ in found}

    def _tensor(self) -> tuple[str, GgmlType, tuple[int, ...], int]:
        name = self._text("a tensor's name")
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._fail(f"tensor {name!r} has {num_dimensions} dimensions, must have 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number = self._number("I")
        if (kind := GGML_TYPES.get(number)) is None:
            raise ModelError(f"{self._path}: {name}: GGML type {number} is not known")
        if min(shape) < 1 or math.prod(shape) > self._size * 256:
            self._fail(f"tensor {name!r} has the shape {list(shape)}")
        if shape[-1] % kind.num_weights:
            self._fail(
                f"tensor {name!r} has rows of {shape[-1]}, no multiple of {kind.num_weights} ({kind.name})"
            )
        return name, kind, shape, self._number("Q")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            return self._number(self._letter(key, kind))
        item = self._number("I")
        if item == _STRING:
            return self._each(key, 8, lambda: self._text(key))
        if item == _ARRAY:
            self._fail(f"{key} is a list of lists")
        letter = self._letter(key, item)
        count = self._count(key, struct.calcsize(letter))
        values = struct.unpack_from(f"<{count}{letter}", self._data, self._at)
        self._at += count * struct.calcsize(letter)
        return list(values)

    def _each(self, what: str, min_bytes: int, read: Callable[[], Any]) -> list[Any]:
        return [read() for _ in range(self._count(what, min_bytes))]

    def _letter(self, key: str, kind: int) -> str:
        if kind < len(_NUMBERS):
            return _NUMBERS[kind]
        if kind not in _WIDE:
            self._fail(f"{key} has the value type {kind}, which is not known")
        return _WIDE[kind]

    def _count(self, what: str, min_bytes: int) -> int:
        """Read a number of things, each of which takes so many bytes at least."""
        count = int(self._number("Q"))
        if count * min_bytes > self._size - self._at:
            self._fail(f"{what}: {count} of them do not fit into {self._size} bytes")
        return count

    def _number(self, letter: str) -> Any:
        size = struct.calcsize(letter)
        if self._at + size > self._size:
            self._fail("it ends within the header")
        (value,) = struct.unpack_from(f"<{letter}", self._data, self._at)
        self._at += size
        return value

    def _text(self, what: str) -> str:
        length = self._count(what, 1)
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} is no UTF-8: {error}")

    def _fail(self, why: str) -> NoReturn:
        raise ModelError(f"{self._path}: not a GGUF file, or cut short: {' '.join(why.split())[:300]}")
