"""Checkpoints in safetensors files, one or sharded."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triptych.checkpoint.safetensors_header import (
    SHARD_INDEX_FILE,
    SINGLE_FILE,
    read_header,
    read_shard_index,
)
from triptych.errors import ModelError
from triptych_services.worker.loader.base import Checkpoint, StoredTensor, expect_pages, release_pages

_TYPES = ("F32", "F16", "BF16")
_CODE_TYPES = ("F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64", "BOOL")
"""Further types, of which quantized weights and the tables of heads that guess are made."""
_COUNTERS = ("position_ids", "token_type_ids")
"""Endings of buffers that older versions of transformers wrote beside the weights of encoders: 0, 1, 2, … or zeros."""


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of all files, which are mapped into memory."""

    def __init__(
        self, directory: Path, device: torch.device | None = None, *, has_codes: bool = False
    ) -> None:
        """Open the files, of which each is checked to be whole.

        Args:
            device: Device that converts tensors to the dtype in which they are read; None: the CPU.
            has_codes: Whether there may be tensors of integers, flags and 8-bit floats, which only `view` reads.

        Raises:
            ModelError: A file is missing, cut short, damaged or not a safetensors file. Or a tensor has a type that
                cannot be read, is in two files, or is missing though the shard index names it.
        """
        self._device = device or torch.device("cpu")
        self._types = _TYPES + _CODE_TYPES if has_codes else _TYPES
        self.tensors: dict[str, StoredTensor] = {}
        self.file_name_to_size: dict[str, int] = {}
        self._files: dict[str, safe_open] = {}  # by the name of the tensor
        self._paths: dict[str, Path] = {}
        weight_map = _read_weight_map(directory)
        for file_name in sorted(set(weight_map.values())) or [SINGLE_FILE]:
            self._add_file(directory / file_name)
        for name, file_name in weight_map.items():
            if name not in self.tensors:
                raise ModelError(
                    f"{directory / file_name}: {name}: is missing, but {SHARD_INDEX_FILE} names it"
                )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._convert(self.view(name), dtype)

    def read_part(self, name: str, dtype: torch.dtype, dim: int, start: int, length: int) -> Tensor:
        return self._convert(self.view(name).narrow(dim, start, length), dtype)

    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        return self.view(name).reshape(-1).view(torch.uint8)[start : start + length].numpy().tobytes()

    def release(self, name: str) -> None:
        release_pages(self.view(name))

    def read_ahead(self, name: str) -> None:
        expect_pages(self.view(name))

    def file_of(self, name: str) -> Path:
        """Return the file that a tensor is in."""
        return self._paths[name]

    def view(self, name: str) -> Tensor:
        """Return a tensor as it is mapped, in its own type."""
        view: Tensor = self._files[name].get_tensor(name)
        return view.reshape(self.tensors[name].shape)

    def _convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype != dtype:
            # a GPU converts faster than it receives the numbers, and bfloat16 is half as much to send as float32
            tensor = tensor.to(self._device)
        return tensor.to(dtype)

    def _add_file(self, path: Path) -> None:
        header = read_header(path)
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: weight file cannot be read: {error}") from error
        self.file_name_to_size[path.name] = header.file_size
        for name, tensor in header.tensors.items():
            if tensor.type == "I64" and name.endswith(_COUNTERS):
                continue
            if tensor.type not in self._types:
                raise ModelError(
                    f"{path}: {name}: type {tensor.type} is not supported, only {', '.join(self._types)}"
                )
            if name in self.tensors:
                raise ModelError(f"{path}: {name}: is in another file too")
            # a single number is a vector of one, so that a part of it can be read
            self.tensors[name] = StoredTensor(tensor.shape or (1,), tensor.type, tensor.size)
            self._files[name] = file
            self._paths[name] = path


def _read_weight_map(directory: Path) -> dict[str, str]:
    """Return tensor name -> name of its file; empty if all tensors are in a single file."""
    is_sharded, is_single = (directory / SHARD_INDEX_FILE).is_file(), (directory / SINGLE_FILE).is_file()
    if not is_sharded and not is_single:
        if pickled := sorted(path.name for path in directory.glob("*.bin")):
            raise ModelError(
                f"{directory}: the weights are in {pickled[0]}, which may hold code and is not read; convert them "
                "with `save_pretrained(directory, safe_serialization=True)` of transformers"
            )
        raise ModelError(f"{directory}: no weights: neither {SINGLE_FILE} nor {SHARD_INDEX_FILE} is there")
    return read_shard_index(directory)
