"""Checkpoints in safetensors files, one or sharded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.worker.loader.base import Checkpoint, MappedFile, StoredTensor
from triptych.errors import ModelError

SINGLE_FILE = "model.safetensors"
SHARD_INDEX_FILE = "model.safetensors.index.json"

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_SIZE = 100_000_000  # the format's own limit, in bytes


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of all files, mapped: reading one touches its pages alone."""

    def __init__(self, directory: Path) -> None:
        """Read the headers and check that every file is whole.

        Raises:
            ModelError: a file is missing, cut short or no safetensors file, or a tensor of the shard
                index is missing; names the file and, for a cut one, both sizes.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self.file_name_to_size: dict[str, int] = {}
        self._places: dict[str, tuple[MappedFile, int]] = {}  # file and offset of each tensor
        expected = _expected_files(directory)
        for file_name in sorted(set(expected.values())):
            self._add_file(directory / file_name)
        for name, file_name in expected.items():
            if name and name not in self.tensors:
                raise ModelError(
                    f"{directory / file_name}: {name}: is missing, but {SHARD_INDEX_FILE} names it"
                )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor, (file, offset) = self.tensors[name], self._places[name]
        stored_dtype = _STORED_DTYPES.get(tensor.type)
        if stored_dtype is None:
            raise ModelError(f"{name}: type {tensor.type} is not supported, only {', '.join(_STORED_DTYPES)}")
        data = file.read(offset, tensor.size)
        if data.data_ptr() % stored_dtype.itemsize:  # writers align, but the format does not demand it
            data = data.clone()
        return data.view(stored_dtype).reshape(tensor.shape).to(dtype)

    def _add_file(self, path: Path) -> None:
        entries, data_start = _read_header(path)
        size = data_start + max((entry.end for entry in entries.values()), default=0)
        file = MappedFile(path, expected_size=size)
        self.file_name_to_size[path.name] = size
        for name, entry in entries.items():
            tensor = StoredTensor(entry.shape, entry.type, entry.end - entry.begin)
            dtype = _STORED_DTYPES.get(tensor.type)
            if entry.begin < 0 or (dtype and math.prod(tensor.shape) * dtype.itemsize != tensor.size):
                raise ModelError(
                    f"{path}: {name}: {tensor.size} bytes do not hold {tensor.type} {tensor.shape}"
                )
            if name in self.tensors:
                raise ModelError(f"{path}: {name}: stands in another file too")
            self.tensors[name] = tensor
            self._places[name] = file, data_start + entry.begin


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    """One tensor as the header has it; offsets in bytes from the start of the data."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _expected_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name by the shard index; without one, the only file under the empty name."""
    index = directory / SHARD_INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ModelError(
                f"{directory}: no weights: neither {SINGLE_FILE} nor {SHARD_INDEX_FILE} is there"
            )
        return {"": SINGLE_FILE}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read: {error!r}") from error


def _read_header(path: Path) -> tuple[dict[str, _HeaderEntry], int]:
    """The tensors of a file, and where the data after the header starts. Format: u64 length, JSON, data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, _MAX_HEADER_SIZE))
    except OSError as error:
        raise ModelError(f"{path}: weight file cannot be read: {error.strerror}") from error
    if len(text) != length:
        raise ModelError(
            f"{path}: weight file has {path.stat().st_size} bytes, expected {8 + length} for its header "
            "alone; it was cut short, or is no safetensors file"
        )
    try:
        entries = {}
        for name, values in json.loads(text).items():
            if name != "__metadata__":
                begin, end = map(int, values["data_offsets"])
                entries[name] = _HeaderEntry(
                    str(values["dtype"]), tuple(map(int, values["shape"])), begin, end
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path}: header cannot be read: {error!r}; no safetensors file, or damaged"
        ) from error
    return entries, 8 + length
