"""A checkpoint as the loader sees it: named tensors, read one at a time."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import ModelError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    """As in Hugging Face: [out_features, in_features] for a linear layer."""
    type: str
    """Form of the stored elements: BF16, F32, Q4_1, …"""
    size: int
    """In bytes, as stored."""


class Checkpoint(ABC):
    """Weights under Hugging Face's names and in its layout, whatever file they stand in."""

    tensors: Mapping[str, StoredTensor]
    """Name -> what stands there, in the order of the file: the fastest to read in."""
    file_name_to_size: Mapping[str, int]
    """The weight files, in bytes."""

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, in `dtype`, on the CPU or where it was drawn or converted; KeyError if none has that name.

        It may be a view of the file, mapped privately: copy it to where it shall live, and drop it.
        """

    def read_blocks(self, name: str) -> Tensor:
        """The rows of a matrix as they are stored, [rows, bytes of a row] uint8, in Hugging Face's order; KeyError if
        there is none of that name.

        It may be a view of the file, as above.
        """
        raise NotImplementedError(f"{name}: only .gguf files hold blocks")


class MappedFile:
    """A weight file in memory, page by page as it is touched; never written to."""

    def __init__(self, path: Path, expected_size: int) -> None:
        """Raises ModelError if the file is missing or not `expected_size` bytes long."""
        try:
            found_size = path.stat().st_size
        except OSError as error:
            raise ModelError(f"{path}: weight file cannot be read: {error.strerror}") from error
        if found_size != expected_size:
            raise ModelError(
                f"{path}: weight file has {found_size} bytes, expected {expected_size}; "
                "it was cut short or replaced, fetch it again"
            )
        # Private: a stray write would change our copy of the page and never the file.
        self._bytes = torch.from_file(str(path), shared=False, size=found_size, dtype=torch.uint8)

    def read(self, offset: int, size: int) -> Tensor:
        """[size] uint8, a view of the file."""
        return self._bytes[offset : offset + size]


def fingerprint(
    checkpoint: Checkpoint, architecture: ModelArchitecture, dtype: str, quantization: str
) -> str:
    """sha256, in hex, over everything that two workers of one model must share, short of the weights' bytes:
    architecture, tensor names, shapes and types, file sizes, dtype, quantization.
    """
    facts = {
        "architecture": asdict(architecture),
        "tensors": {name: (tensor.shape, tensor.type) for name, tensor in checkpoint.tensors.items()},
        "file_sizes": dict(checkpoint.file_name_to_size),
        "dtype": dtype,
        "quantization": quantization,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
