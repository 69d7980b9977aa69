"""Checkpoints in a .gguf file, found by the index that its conversion left."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from services.worker.loader.base import Checkpoint, MappedFile, StoredTensor
from services.worker.loader.ggml_blocks import dequantize, stored_size, supported_types
from triptych.checkpoint.gguf.index import GgufIndex, GgufTensor
from triptych.errors import ModelError


class GgufCheckpoint(Checkpoint):
    """The tensors of one file, mapped; dequantized as they are read."""

    def __init__(self, directory: Path) -> None:
        """Read the index and check that the file is the one it was made from.

        Raises:
            ModelError: the file is missing, of another size or changed since; or a tensor has a type
                that cannot be read, or does not lie within the file; names it.
        """
        index = GgufIndex.read(directory)
        path = directory / index.file
        self._file = MappedFile(path, index.file_size)
        if index.mtime_ns is not None and path.stat().st_mtime_ns != index.mtime_ns:
            raise ModelError(
                f"{path}: changed since it was converted; start again with the path of the .gguf file"
            )
        self._entries = {tensor.name: tensor for tensor in index.tensors}
        for tensor in index.tensors:
            _check(path, tensor, index.file_size)
        self.tensors = {
            tensor.name: StoredTensor(tensor.shape, tensor.type, tensor.size) for tensor in index.tensors
        }
        self.file_name_to_size = {path.name: index.file_size}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._entries[name]
        return dequantize(self._stored(tensor), tensor.type, dtype).view(tensor.shape)

    def read_blocks(self, name: str) -> Tensor:
        tensor = self._entries[name]
        return self._stored(tensor).view(tensor.shape[0], -1)

    def _stored(self, tensor: GgufTensor) -> Tensor:
        """Return [size] uint8, rows in Hugging Face's order."""
        data = self._file.read(tensor.offset, tensor.size)
        if tensor.permuted_heads:
            data = _undo_permutation(data, num_rows=tensor.shape[0], num_heads=tensor.permuted_heads)
        return data


def _undo_permutation(data: Tensor, *, num_rows: int, num_heads: int) -> Tensor:
    """Put a query or key projection's rows back in Hugging Face's order; rows are moved whole, still packed.

    Hugging Face rotates the first half of a head against the second; GGUF's llama rotates neighbours, so
    its converter stores rows [heads, 2, head_dim / 2] as [heads, head_dim / 2, 2].
    """
    rows = data.view(num_heads, num_rows // num_heads // 2, 2, -1)
    return rows.transpose(1, 2).reshape(-1)


def _check(path: Path, tensor: GgufTensor, file_size: int) -> None:
    if tensor.type not in supported_types():
        raise ModelError(
            f"{path}: {tensor.gguf_name}: type {tensor.type} is not supported, only "
            f"{', '.join(supported_types())}"
        )
    expected = stored_size(tensor.type, math.prod(tensor.shape))
    if tensor.size != expected or tensor.offset + tensor.size > file_size:
        raise ModelError(
            f"{path}: {tensor.gguf_name}: {tensor.size} bytes at {tensor.offset} of {file_size}, "
            f"expected {expected} for {tensor.type} {tensor.shape}"
        )
