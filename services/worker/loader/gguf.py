"""Checkpoints in a .gguf file, found by the index that its conversion left."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from triptych.checkpoint.gguf.index import GgufIndex, GgufTensor
from triptych.errors import ModelError
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import GGUF_FORMATS, QuantizedFormat
from triptych_services.worker.context.device import STORED_DTYPES
from triptych_services.worker.layers.quantization import CodedPart
from triptych_services.worker.loader.base import (
    Checkpoint,
    MappedFile,
    StoredTensor,
    expect_pages,
    release_pages,
)
from triptych_services.worker.loader.gguf_blocks import (
    block_size,
    dequantize,
    read_codes,
    stored_size,
    supported_types,
)

_SPLIT_LATENT = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
"""Endings of the two parts of `_LATENT`."""
_LATENT = "self_attn.kv_b_proj.weight"
_OF_FLOATS = "F32"
"""Type of a tensor that is put together as it is read, and keeps no blocks."""

_UNDO: dict[str, Callable[[Tensor], Tensor]] = {
    "plus_one": lambda stored: stored - 1,
    "minus_exp": lambda stored: stored.neg().log(),
}
"""`GgufTensor.change` -> the checkpoint's numbers, in float32."""


class GgufCheckpoint(Checkpoint):
    """The tensors of one model, mapped; dequantized as they are read."""

    def __init__(self, directory: Path) -> None:
        """Read the index and check that the files are those that it was made from.

        Raises:
            ModelError: A file is missing, of another size or changed since; or a tensor has a type
                that cannot be read, or does not lie within its file; names it.
        """
        index = GgufIndex.read(directory)
        self._files = []
        self.file_name_to_size = {}
        for part in index.files:
            path = directory / part.file
            self._files.append(MappedFile(path, part.file_size))
            if part.mtime_ns is not None and path.stat().st_mtime_ns != part.mtime_ns:
                raise ModelError(
                    f"{path}: changed since it was converted; start again with the path of the .gguf file"
                )
            self.file_name_to_size[path.name] = part.file_size
        self._entries = {tensor.name: tensor for tensor in index.tensors}
        for tensor in index.tensors:
            if not 0 <= tensor.part < len(index.files):
                raise ModelError(
                    f"{directory}: {tensor.name}: is in part {tensor.part} of {len(index.files)}"
                )
            _check(directory / index.files[tensor.part].file, tensor, index.files[tensor.part].file_size)
        tensors = {
            tensor.name: StoredTensor(tensor.shape, tensor.type, tensor.size, _format_of(tensor))
            for tensor in index.tensors
            if not tensor.name.endswith(_SPLIT_LATENT)
        }
        self._latents: dict[str, tuple[GgufTensor, GgufTensor]] = {}
        """The two parts of a tensor that checkpoints have in one."""
        for name, keys in self._entries.items():
            if name.endswith(_SPLIT_LATENT[0]):
                prefix = name.removesuffix(_SPLIT_LATENT[0])
                tensors[f"{prefix}{_LATENT}"] = self._join_latent(prefix, keys)
        self.tensors = tensors

    def _join_latent(self, prefix: str, keys: GgufTensor) -> StoredTensor:
        """Note the parts of the projection of a latent to keys and values, and return it as checkpoints have it.

        A file has the keys' part transposed, [heads, rank, elements], and the values' [heads, elements, rank].
        """
        values = self._entries.get(f"{prefix}{_SPLIT_LATENT[1]}")
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise ModelError(f"{keys.gguf_name}: must be a tensor of heads beside another one, attn_v_b")
        if (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
            raise ModelError(
                f"{keys.gguf_name}: {list(keys.shape)} does not fit attn_v_b {list(values.shape)}"
            )
        shape = keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]
        self._latents[f"{prefix}{_LATENT}"] = keys, values
        return StoredTensor(shape, _OF_FLOATS, keys.size + values.size)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._latents:
            keys, values = (self._read(tensor, dtype) for tensor in self._latents[name])
            return torch.cat([keys.transpose(1, 2), values], dim=1).reshape(self.tensors[name].shape)
        return self._read(self._entries[name], dtype)

    def _read(self, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
        change = _UNDO.get(tensor.change)
        stored = _dequantize(self._stored(tensor), tensor, dtype if change is None else torch.float32)
        if _cuts_blocks(tensor):
            stored = _undo_spread(stored.view(tensor.shape[0], -1), tensor)
        return (stored if change is None else change(stored).to(dtype)).view(tensor.shape)

    def read_part(self, name: str, dtype: torch.dtype, dim: int, start: int, length: int) -> Tensor:
        tensor = self._entries.get(name)
        if (
            tensor is None
            or len(tensor.shape) < 2
            or tensor.change
            or _cuts_blocks(tensor)
            or tensor.type in STORED_DTYPES
        ):
            return self.read(name, dtype).narrow(dim, start, length)
        *others, columns = tensor.shape
        blocks = self.read_blocks(name)
        if dim == 0:
            rows = math.prod(others[1:])
            part, shape = blocks.narrow(0, start * rows, length * rows), (length, *others[1:], columns)
        else:
            row_bytes, per_block = blocks.shape[1], block_size(tensor.type)
            if dim != len(others) or start % per_block or length % per_block:  # a block would be cut
                return self.read(name, dtype).narrow(dim, start, length)
            first, num_bytes = start * row_bytes // columns, length * row_bytes // columns
            part, shape = blocks.narrow(1, first, num_bytes), (*others, length)
        return _dequantize(part.reshape(-1), tensor, dtype).view(shape)

    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        if name in self._latents:
            joined = torch.cat([self._view(tensor) for tensor in self._latents[name]])
            return joined[start : start + length].numpy().tobytes()
        return self._view(self._entries[name])[start : start + length].numpy().tobytes()

    def release(self, name: str) -> None:
        for tensor in self._latents.get(name) or (self._entries[name],):
            release_pages(self._view(tensor))

    def read_ahead(self, name: str) -> None:
        for tensor in self._latents.get(name) or (self._entries[name],):
            expect_pages(self._view(tensor))

    def read_codes(self, name: str, part: CodedPart, expert: int = 0) -> CodedRows:
        tensor = self._entries[name]
        rows, columns = tensor.shape[-2:]
        own = self.read_blocks(name).narrow(0, expert * rows + part.row, part.rows)
        per_block, block_bytes = block_size(tensor.type), own.shape[1] * block_size(tensor.type) // columns
        first, last = part.column // per_block, -(-(part.column + part.columns) // per_block)
        codes = read_codes(own[:, first * block_bytes : last * block_bytes], tensor.type)
        return codes.narrow(1, part.column - first * per_block, part.columns)

    def read_blocks(self, name: str) -> Tensor:
        tensor = self._entries[name]
        return self._stored(tensor).view(math.prod(tensor.shape[:-1]), -1)

    def _view(self, tensor: GgufTensor) -> Tensor:
        """Return [size] uint8 as mapped."""
        if tensor.number is not None:
            return torch.tensor([tensor.number], dtype=torch.float32).view(torch.uint8)
        return self._files[tensor.part].read(tensor.offset, tensor.size)

    def _stored(self, tensor: GgufTensor) -> Tensor:
        """Return [size] uint8, rows and columns in Hugging Face's order, but columns if that would cut blocks."""
        data = self._view(tensor)
        if tensor.spread_heads is not None and not _cuts_blocks(tensor):
            data = _undo_spread(data.view(tensor.shape[0], -1), tensor).view(-1)
        if tensor.permuted_heads:
            data = _undo_permutation(data, num_rows=tensor.shape[0], num_heads=tensor.permuted_heads)
        return data


def _dequantize(data: Tensor, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Convert blocks of a tensor, [n] uint8, to weights, [num_weights].

    Raises:
        ModelError: One is no number, since a scale is none; names the tensor.
    """
    weights = dequantize(data, tensor.type, dtype)
    if tensor.type not in STORED_DTYPES and len(weights):
        low, high = weights.aminmax()  # of which either is no number if a weight is none
        if not bool(low.isfinite() & high.isfinite()):
            raise ModelError(
                f"{tensor.name}: a scale of its {tensor.type} blocks is no number; the file is damaged, fetch it again"
            )
    return weights


def _undo_permutation(data: Tensor, *, num_rows: int, num_heads: int) -> Tensor:
    """Put a query or key projection's rows back in Hugging Face's order; rows are moved whole, still packed.

    Hugging Face rotates the first half of a head against the second; GGUF's llama rotates neighbours, so
    its converter stores rows [heads, 2, head_dim / 2] as [heads, head_dim / 2, 2].
    """
    rows = data.view(num_heads, num_rows // num_heads // 2, 2, -1)
    return rows.transpose(1, 2).reshape(-1)


def _cuts_blocks(tensor: GgufTensor) -> bool:
    """Return whether columns are to be moved that are not whole blocks, as those of heads of 128 in blocks of 256."""
    spread = tensor.spread_heads
    return spread is not None and _moves_columns(tensor) and spread[2] % block_size(tensor.type) > 0


def _moves_columns(tensor: GgufTensor) -> bool:
    return tensor.name.endswith("out_proj.weight")


def _undo_spread(stored: Tensor, tensor: GgufTensor) -> Tensor:
    """Put the heads of values of each head of keys together, see `GgufTensor.spread_heads`.

    Args:
        stored: [rows, n] bytes, or weights.
    """
    assert tensor.spread_heads is not None, "asked before"
    keys, values, elements = tensor.spread_heads
    if _moves_columns(tensor):
        return stored.view(len(stored), values, keys, -1).transpose(1, 2).reshape(stored.shape)
    others, moved = stored.tensor_split([len(stored) - keys * values * elements])
    moved = moved.view(values, keys, elements, -1).transpose(0, 1).reshape(moved.shape)
    return torch.cat([others, moved])


def _format_of(tensor: GgufTensor) -> QuantizedFormat | None:
    """Return the format of the codes of a linear layer's weight, or of those of all experts; None if it has none."""
    if len(tensor.shape) < 2 or tensor.change or _cuts_blocks(tensor):
        return None
    return GGUF_FORMATS.get(tensor.type)


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
