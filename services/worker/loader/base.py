"""The interface of a checkpoint: named tensors, read one at a time."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import ModelError
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_services.worker.layers.quantization import CodedPart

_MIN_PLACES = 64  # at which the weights of a checkpoint are sampled
_PLACE_BYTES = 4096  # at each of them; a page is read from the disk in any case


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The properties of a tensor that are known without reading it."""

    shape: tuple[int, ...]
    """Shape as in Hugging Face: [out_features, in_features] for a linear layer."""
    type: str
    """Form of the stored elements: BF16, F32, Q4_1, …"""
    size: int
    """Size in bytes, as stored."""
    format: QuantizedFormat | None = None
    """Format of quantized weights that `read_codes` reads; None: they are floating point, or blocks."""


class Checkpoint(ABC):
    """Weights under Hugging Face's names and in its layout, whatever the format of their files."""

    tensors: Mapping[str, StoredTensor]
    """Name -> properties, in the order of the file, which is the fastest to read in."""
    file_name_to_size: Mapping[str, int]
    """Name of each weight file -> its size in bytes."""

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor, in `dtype`, on the CPU or on the device that drew or converted it.

        It may be a view of the file, mapped privately: copy it to its place, and drop it.

        Raises:
            KeyError: There is no tensor of that name.
        """

    def read_part(self, name: str, dtype: torch.dtype, dim: int, start: int, length: int) -> Tensor:
        """Read a part of one tensor; otherwise as `read`.

        Args:
            dim, start, length: As of `Tensor.narrow`.
        """
        return self.read(name, dtype).narrow(dim, start, length)

    @abstractmethod
    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        """Read a part of one tensor as it is stored; what is not stored, as that from which it is drawn.

        Args:
            start, length: In bytes.

        Raises:
            KeyError: There is no tensor of that name.
        """

    def release(self, name: str) -> None:
        """Note that this tensor has been copied: what of its file is mapped takes no memory of this process."""
        return

    def read_ahead(self, name: str) -> None:
        """Note that this tensor is read next: what of it is on a disk may be fetched meanwhile."""
        return

    def read_blocks(self, name: str) -> Tensor:
        """Read the rows of a matrix as they are stored, [rows, bytes of a row] uint8, in Hugging Face's order.

        It may be a view of the file, as above.

        Raises:
            KeyError: There is no tensor of that name.
        """
        raise NotImplementedError(f"{name}: only .gguf files hold blocks")

    def read_codes(self, name: str, part: CodedPart, expert: int = 0) -> CodedRows:
        """Read a part of a matrix of quantized weights, or of that of one expert.

        Raises:
            ModelError: A value is no number, or out of range; names it.
        """
        raise NotImplementedError(f"{name}: is not quantized")


class MappedFile:
    """A weight file that is mapped into memory and never written to."""

    def __init__(self, path: Path, expected_size: int) -> None:
        """Map the file.

        Raises:
            ModelError: The file is missing, or not `expected_size` bytes long.
        """
        try:
            found_size = path.stat().st_size
        except OSError as error:
            raise ModelError(f"{path}: weight file cannot be read: {error.strerror}") from error
        if found_size != expected_size:
            raise ModelError(
                f"{path}: weight file has {found_size} bytes, expected {expected_size}; "
                "it was cut short or replaced, fetch it again"
            )
        # Private: an accidental write would change our copy of the page and never the file.
        self._bytes = torch.from_file(str(path), shared=False, size=found_size, dtype=torch.uint8)

    def read(self, offset: int, size: int) -> Tensor:
        """Return [size] uint8, a view of the file."""
        return self._bytes[offset : offset + size]


def release_pages(view: Tensor) -> None:
    """Give back the memory behind a view of a mapped file, which has not been written to. It can be read again."""
    first = -(-view.data_ptr() // mmap.PAGESIZE)
    last = (view.data_ptr() + view.nbytes) // mmap.PAGESIZE  # pages that it shares with others stay
    _advise(first, last, "MADV_DONTNEED")


def expect_pages(view: Tensor) -> None:
    """Let the system read what is behind a view of a mapped file, while this process goes on.

    It goes to the page cache, and takes no memory of this process until it is used.
    """
    first, last = view.data_ptr() // mmap.PAGESIZE, -(-(view.data_ptr() + view.nbytes) // mmap.PAGESIZE)
    _advise(first, last, "MADV_WILLNEED")


def _advise(first: int, last: int, advice: str) -> None:
    """Tell the system about pages `first` to `last - 1` of the address space; it may do nothing."""
    if sys.platform == "linux" and first < last:
        start, length = (
            ctypes.c_void_p(first * mmap.PAGESIZE),
            ctypes.c_size_t((last - first) * mmap.PAGESIZE),
        )
        ctypes.CDLL(None).madvise(start, length, getattr(mmap, advice))


def digest_weights(checkpoint: Checkpoint) -> str:
    """Return the sha256, in hex, of samples of the weights' bytes: 4 KiB at 64 places or more, some of each tensor.

    It distinguishes a model from one that was trained further, which changes whole matrices, and takes milliseconds.
    Single numbers that were changed by hand may lie between the samples.
    """
    digest = hashlib.sha256()
    num_places = -(-_MIN_PLACES // max(len(checkpoint.tensors), 1))
    for name in sorted(checkpoint.tensors):
        size = checkpoint.tensors[name].size
        length = min(size, _PLACE_BYTES)
        digest.update(name.encode())
        for place in range(num_places if size > length else 1):
            drawn = int.from_bytes(hashlib.sha256(f"{place}/{name}".encode()).digest()[:8], "little")
            digest.update(checkpoint.read_bytes(name, drawn % (size - length + 1), length))
    return digest.hexdigest()


def fingerprint(
    checkpoint: Checkpoint,
    architecture: ModelArchitecture,
    *,
    dtype: str,
    weight_dtype: str,
    quantization: str,
    activation_bits: int,
    kv_dtype: str,
) -> str:
    """Return the sha256, in hex, of everything that two workers of one model must share but the weights themselves.

    That is architecture, tensor names, shapes and types, file sizes, precisions and quantization. What the architecture
    has in common with most is left out, so that a release that can describe more models names this one as before.
    """
    facts = {
        "architecture": _without_defaults(architecture),
        "tensors": {name: (tensor.shape, tensor.type) for name, tensor in checkpoint.tensors.items()},
        "file_sizes": dict(checkpoint.file_name_to_size),
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "quantization": quantization,
        "activation_bits": activation_bits,
        "kv_dtype": kv_dtype,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _without_defaults(value: Any) -> Any:
    """Return a description as JSON has it, by types and by the fields that differ from their defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value)}
        for each in fields(value):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if own[each.name] == default:
                del own[each.name]
        return type(value).__name__, {name: _without_defaults(each) for name, each in own.items()}
    if isinstance(value, Mapping):
        return {name: _without_defaults(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_without_defaults(each) for each in value]
    return value
