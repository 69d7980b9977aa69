"""Checkpoints in a .gguf file, found by the index that its conversion left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.checkpoint.gguf.index import GgufIndex, GgufTensor
from triptych.errors import ModelError
from triptych_services.worker.context.device import STORED_DTYPES
from triptych_services.worker.loader.base import Checkpoint, MappedFile, StoredTensor, release_pages


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

    def read_part(self, name: str, dtype: torch.dtype, dim: int, start: int, length: int) -> Tensor:
        tensor = self._entries[name]
        if len(tensor.shape) != 2 or tensor.type in STORED_DTYPES:
            return self.read(name, dtype).narrow(dim, start, length)
        rows, columns = tensor.shape
        blocks = self.read_blocks(name)
        if dim == 0:
            part, shape = blocks.narrow(0, start, length), (length, columns)
        else:
            row_bytes, per_block = blocks.shape[1], _BLOCK_FORMATS[tensor.type].num_weights
            if start % per_block or length % per_block:  # a block would be cut
                return self.read(name, dtype).narrow(dim, start, length)
            first, num_bytes = start * row_bytes // columns, length * row_bytes // columns
            part, shape = blocks.narrow(1, first, num_bytes), (rows, length)
        return dequantize(part.reshape(-1), tensor.type, dtype).view(shape)

    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        return self._file.read(self._entries[name].offset + start, length).numpy().tobytes()

    def release(self, name: str) -> None:
        tensor = self._entries[name]
        release_pages(self._file.read(tensor.offset, tensor.size))

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


# Weights of a chunk for each thread, 512 KiB as float32: the passes over a chunk stay within the second-level cache,
# and each is worth waking the other threads for (of a fourth, two threads took twice as long as one).
_CHUNK_WEIGHTS = 1 << 17


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One quantized form."""

    num_weights: int
    """Weights per block."""
    num_bytes: int
    """Bytes per block."""
    unpack: Callable[[Tensor, Tensor], None]
    """([n, num_bytes] uint8, [n, num_weights] float32 to fill)"""


def supported_types() -> tuple[str, ...]:
    return (*STORED_DTYPES, *_BLOCK_FORMATS)


def stored_size(type: str, num_weights: int) -> int:
    """Return the bytes that `num_weights` weights take in this form.

    Raises:
        KeyError: The form is not known.
    """
    if type in STORED_DTYPES:
        return num_weights * STORED_DTYPES[type].itemsize
    form = _BLOCK_FORMATS[type]
    return num_weights // form.num_weights * form.num_bytes


def dequantize(data: Tensor, type: str, dtype: torch.dtype) -> Tensor:
    """Convert blocks to weights in `dtype`, computed in float32 and rounded once.

    Args:
        data: [n] uint8 as stored, contiguous; whole blocks.
        type: GGML's name of the form.
    Returns:
        [num_weights], on the CPU; a view of `data` where the stored form is `dtype` already.
    Raises:
        KeyError: The form is not known.
    """
    if type in STORED_DTYPES:
        return data.view(STORED_DTYPES[type]).to(dtype)
    form = _BLOCK_FORMATS[type]
    blocks = data.view(-1, form.num_bytes)
    weights = torch.empty(len(blocks), form.num_weights, dtype=dtype)
    step = _CHUNK_WEIGHTS * torch.get_num_threads() // form.num_weights
    scratch = torch.empty(min(step, len(blocks)), form.num_weights)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        target = weights[start : start + step]
        if dtype == torch.float32:
            form.unpack(chunk, target)
        else:
            form.unpack(chunk, scratch[: len(chunk)])
            target.copy_(scratch[: len(chunk)])
    return weights.view(-1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return [n, 1] float32: the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Split [n, k] bytes into [n, 2k]: all low halves, then all high ones."""
    k = packed.shape[1]
    out[:, :k] = packed & 15
    out[:, k:] = packed >> 4


def _add_fifth_bit(blocks: Tensor, start: int, out: Tensor) -> None:
    """Add 16 where the weight's bit is set in the 32 bits at byte `start` of each block."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, start : start + 4, None] >> shifts) & 1  # [n, 4, 8]
    out.add_(bits.view(-1, 32), alpha=16)


def _unpack_q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:18], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _unpack_q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:20], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:22], out)
    _add_fifth_bit(blocks, 2, out)
    out.sub_(16).mul_(_half(blocks, 0))


def _unpack_q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:24], out)
    _add_fifth_bit(blocks, 4, out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:34].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _unpack_q4_k(blocks: Tensor, out: Tensor) -> None:
    """Unpack 256 weights as 8 groups of 32; group pairs share 32 bytes, even groups in the low halves."""
    packed = blocks[:, 4:16]  # [n, 12]: the 6-bit scales and minima, see get_scale_min_k4 in llama.cpp
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)  # [n, 8]
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)  # [n, 8]
    groups = out.view(-1, 4, 2, 32)
    nibbles = blocks[:, 16:144].view(-1, 4, 32)
    groups[:, :, 0] = nibbles & 15
    groups[:, :, 1] = nibbles >> 4
    by_group = out.view(-1, 8, 32)
    by_group.mul_((_half(blocks, 0) * scales)[:, :, None])
    by_group.sub_((_half(blocks, 2) * minima)[:, :, None])


def _unpack_q6_k(blocks: Tensor, out: Tensor) -> None:
    """Unpack 256 weights as two halves of 4 x 32; each half has 64 bytes of low nibbles and 32 of high bit pairs."""
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], 2).view(-1, 2, 4, 32)
    high = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)) & 3  # [n, 2, 4, 32]
    out.view(-1, 2, 4, 32).copy_(low | (high << 4))
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)  # [n, 16]
    out.sub_(32)
    out.view(-1, 16, 16).mul_(scales[:, :, None])


_BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, _unpack_q4_0),
    "Q4_1": BlockFormat(32, 20, _unpack_q4_1),
    "Q5_0": BlockFormat(32, 22, _unpack_q5_0),
    "Q5_1": BlockFormat(32, 24, _unpack_q5_1),
    "Q8_0": BlockFormat(32, 34, _unpack_q8_0),
    "Q4_K": BlockFormat(256, 144, _unpack_q4_k),
    "Q6_K": BlockFormat(256, 210, _unpack_q6_k),
}
