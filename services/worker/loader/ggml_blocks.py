"""GGML's stored forms -> floating point, vectorised over blocks.

A quantized row is a run of blocks; a block is a few scales and the packed integers of 32 or 256 weights.
Layouts: ggml-common.h of llama.cpp. d and m are float16; nibbles are packed low half first:

    Q4_0  d | 16 bytes of nibbles                 w = d * (q - 8)
    Q4_1  d | m | 16 bytes of nibbles             w = d * q + m
    Q5_0  d | 32 high bits | 16 bytes of nibbles  w = d * (q - 16)
    Q5_1  d | m | 32 high bits | 16 of nibbles    w = d * q + m
    Q8_0  d | 32 signed bytes                     w = d * q
    Q4_K  d | m | 8 x (6-bit scale, 6-bit min) in 12 bytes | 128 bytes of nibbles
    Q6_K  128 bytes of low nibbles | 64 bytes of high bit pairs | 16 signed scales | d
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_WEIGHTS = 1 << 16  # 256 KiB as float32: the passes over a chunk stay within the second-level cache

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    return (*_PLAIN_DTYPES, *_BLOCK_FORMATS)


def stored_size(type: str, num_weights: int) -> int:
    """Return the bytes that `num_weights` weights take in this form.

    Raises:
        KeyError: The form is not known.
    """
    if type in _PLAIN_DTYPES:
        return num_weights * _PLAIN_DTYPES[type].itemsize
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
    if type in _PLAIN_DTYPES:
        return data.view(_PLAIN_DTYPES[type]).to(dtype)
    form = _BLOCK_FORMATS[type]
    blocks = data.view(-1, form.num_bytes)
    weights = torch.empty(len(blocks), form.num_weights, dtype=dtype)
    step = _CHUNK_WEIGHTS // form.num_weights
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
