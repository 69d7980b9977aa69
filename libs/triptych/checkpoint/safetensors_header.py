"""The header of a .safetensors file, and the index of a checkpoint of several such files; without torch.

    length of the header, 8 bytes | header, JSON | numbers of all tensors, one after the other without gaps
    header    {"__metadata__": {key: text}, name: {"dtype": "BF16", "shape": [3, 5], "data_offsets": [start, end]}, …}

No more of a file than its header is read, and nothing is made for a length before it was compared with the file's
size. Source: the description of the format by Hugging Face, and the checks of its library.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from triptych.checkpoint.config_file import check_inside
from triptych.errors import ModelError

SINGLE_FILE = "model.safetensors"
SHARD_INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_METADATA = "__metadata__"
_TYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Type -> bits of an element."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file."""

    type: str
    """As the format names it: F32, BF16, I8, …"""
    shape: tuple[int, ...]
    start: int
    """Its first byte among those after the header."""
    size: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All of a file but the numbers of its tensors."""

    file_size: int
    """In bytes."""
    tensors: dict[str, FileTensor]
    """By name, in the order of their bytes."""
    metadata: dict[str, str]
    """The texts that its writer added."""


def read_header(path: Path, max_bytes: int = _MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Read the header of a .safetensors file.

    Args:
        max_bytes: Size of the largest header that is read.

    Raises:
        ModelError: The file is missing, cut short, damaged or contradicts itself; names file, tensor, what was found
            and what was expected.
    """
    try:
        with path.open("rb") as file:
            file_size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            largest = max(min(max_bytes, file_size - 8), 0)
            if not 2 <= length <= largest:
                raise _damaged(path, file_size, f"its header has {length} bytes; expected 2 to {largest}")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: weight file cannot be read: {error.strerror or error}") from error
    try:
        values = json.loads(text, object_pairs_hook=_without_repetition)
        tensors, metadata = _parse(values)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, file_size, str(error)) from error
    size, following = sum(tensor.size for tensor in tensors.values()), file_size - 8 - length
    if size != following:
        why = f"its header describes {size} bytes of tensors; expected {following}, which follow it"
        raise _damaged(path, file_size, why)
    return SafetensorsHeader(file_size, tensors, metadata)


def read_shard_index(directory: Path) -> dict[str, str]:
    """Return tensor name -> name of its file; empty if there is no index, since all tensors are in a single file.

    Raises:
        ModelError: The index cannot be read, or names a file outside of the directory.
    """
    path = directory / SHARD_INDEX_FILE
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        name_to_file = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error!r}") from error
    for file_name in sorted(set(name_to_file.values())):
        check_inside(path, file_name)
    return name_to_file


def _damaged(path: Path, file_size: int, why: str) -> ModelError:
    return ModelError(
        f"{path}: weight file of {file_size} bytes cannot be read: {' '.join(why.split())[:400]}; it was cut short or "
        "damaged, fetch it again"
    )


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header has {repeated!r} twice; expected it once")
    return values


def _parse(values: object) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors in the order of their bytes, and the metadata.

    Raises:
        ValueError: Something is of another form than the format has, or tensors overlap or leave a gap.
    """
    if not isinstance(values, dict):
        raise ValueError(f"its header is {_shown(values)}; expected an object")
    metadata = values.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{_METADATA}: is {_shown(metadata)}; expected an object of texts")
    found = {name: _tensor(name, entry) for name, entry in values.items()}
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].size)))
    end = 0
    for name, tensor in tensors.items():
        if tensor.start != end:
            raise ValueError(
                f"{name}: begins at byte {tensor.start}; expected {end}, where the one before it ends"
            )
        end += tensor.size
    return tensors, metadata


def _tensor(name: str, entry: object) -> FileTensor:
    """Return one tensor.

    Raises:
        ValueError: A key is missing or odd, or its bytes are not as many as its shape has.
    """
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    type_, shape, place = values.get("dtype"), values.get("shape"), values.get("data_offsets")
    if not isinstance(type_, str) or type_ not in _TYPE_BITS:
        raise ValueError(f"{name}: dtype is {_shown(type_)}; expected one of {', '.join(_TYPE_BITS)}")
    if not _are_sizes(shape):
        raise ValueError(f"{name}: shape is {_shown(shape)}; expected a list of sizes")
    if not _are_sizes(place) or len(place) != 2:
        raise ValueError(
            f"{name}: data_offsets are {_shown(place)}; expected the first byte and that after the last"
        )
    size, bits = place[1] - place[0], _TYPE_BITS[type_]
    if size * 8 != math.prod(shape) * bits:
        raise ValueError(
            f"{name}: has {size} bytes; expected {math.prod(shape)} times {bits} bits, of {shape}"
        )
    return FileTensor(type_, tuple(shape), place[0], size)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _shown(value: object) -> str:
    return repr(value)[:100]
