"""The block types of .gguf files: exact codes and scales of their weights, and the weights in floating point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from triptych.checkpoint.gguf.header import GGML_TYPES, GgmlType
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import GGUF_FORMATS
from triptych_services.worker.context.device import STORED_DTYPES

# Weights of a chunk for each thread, 512 KiB as float32: the passes over a chunk stay within the second-level cache,
# and each is worth waking the other threads for (of a fourth, two threads took twice as long as one).
_CHUNK_WEIGHTS = 1 << 17


Unpack = Callable[[Tensor, Tensor], object]
"""([n, bytes of a block] uint8, [n, weights of a block] float32 to fill)"""

_TYPES: dict[str, GgmlType] = {form.name: form for form in GGML_TYPES.values()}


def supported_types() -> tuple[str, ...]:
    return (*STORED_DTYPES, *_UNPACK, *_BY_PACKAGE)


def block_size(type: str) -> int:
    """Return the weights of a block, 1 for plain numbers."""
    return _TYPES[type].num_weights


def stored_size(type: str, num_weights: int) -> int:
    """Return the bytes that `num_weights` weights take in this form.

    Raises:
        KeyError: The form is not known.
    """
    form = _TYPES[type]
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
    form, unpack = _TYPES[type], _UNPACK.get(type) or _unpack_by_package(type)
    blocks = data.view(-1, form.num_bytes)
    weights = torch.empty(len(blocks), form.num_weights, dtype=dtype)
    step = _CHUNK_WEIGHTS * torch.get_num_threads() // form.num_weights
    scratch = torch.empty(min(step, len(blocks)), form.num_weights)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        target = weights[start : start + step]
        if dtype == torch.float32:
            unpack(chunk, target)
        else:
            unpack(chunk, scratch[: len(chunk)])
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
    out.add_(_fifth_bits(blocks[:, start : start + 4]))


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


def _split_bits(packed: Tensor, bits: int) -> Tensor:
    """Split [n, k] bytes into [n, 8 / bits, k]: first all lowest parts, then those above."""
    packed = packed.contiguous()
    parts = torch.empty(len(packed), 8 // bits, packed.shape[1], dtype=torch.uint8)
    for i in range(8 // bits):  # by a number, which takes vectors: thrice as fast as all at once
        parts[:, i] = (packed >> (i * bits)).bitwise_and_((1 << bits) - 1)
    return parts


def _halves_by_32(packed: Tensor) -> Tensor:
    """Return codes of 4 bits, of which each 32 bytes hold 32 weights in low halves, then 32 in high ones."""
    n = len(packed)
    return _split_bits(packed.reshape(-1, 32), 4).view(n, -1)


def _quarters_by_32(packed: Tensor) -> Tensor:
    """Return codes of 2 bits, of which each 32 bytes hold 4 x 32 weights."""
    n = len(packed)
    return _split_bits(packed.reshape(-1, 32), 2).view(n, -1)


def _scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return [n, 8] scales and minimums of 6 bits, from 12 bytes; see get_scale_min_k4 in llama.cpp."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    return scales, torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)


def _code_q4_0(blocks: Tensor) -> CodedRows:
    return CodedRows(GGUF_FORMATS["Q4_0"], _split_bits(blocks[:, 2:18], 4).flatten(1), _half(blocks, 0))


def _code_q4_1(blocks: Tensor) -> CodedRows:
    codes = _split_bits(blocks[:, 4:20], 4).flatten(1)
    return CodedRows(GGUF_FORMATS["Q4_1"], codes, _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return [n, 32], 16 where the weight's bit is set in 4 bytes."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(1) << 4


def _code_q5_0(blocks: Tensor) -> CodedRows:
    codes = _split_bits(blocks[:, 6:22], 4).flatten(1) | _fifth_bits(blocks[:, 2:6])
    return CodedRows(GGUF_FORMATS["Q5_0"], codes, _half(blocks, 0))


def _code_q5_1(blocks: Tensor) -> CodedRows:
    codes = _split_bits(blocks[:, 8:24], 4).flatten(1) | _fifth_bits(blocks[:, 4:8])
    return CodedRows(GGUF_FORMATS["Q5_1"], codes, _half(blocks, 0), _half(blocks, 2))


def _code_q8_0(blocks: Tensor) -> CodedRows:
    return CodedRows(GGUF_FORMATS["Q8_0"], blocks[:, 2:34] ^ 0x80, _half(blocks, 0))


def _code_q2_k(blocks: Tensor) -> CodedRows:
    packed, codes = blocks[:, :16], _quarters_by_32(blocks[:, 16:80])
    return _two_levels("Q2_K", codes, packed & 15, _half(blocks, 80), packed >> 4, _half(blocks, 82))


def _code_q3_k(blocks: Tensor) -> CodedRows:
    high = _split_bits(blocks[:, :32], 1).view(-1, 256)
    codes = _quarters_by_32(blocks[:, 32:96]) | (high << 2)
    low_bits = _split_bits(blocks[:, 96:104], 4).view(-1, 16)
    high_bits = _split_bits(blocks[:, 104:108], 2).view(-1, 16)
    scales = (low_bits | (high_bits << 4)).to(torch.int8) - 32
    return _two_levels("Q3_K", codes, scales, _half(blocks, 108))


def _code_q4_k(blocks: Tensor) -> CodedRows:
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    codes = _halves_by_32(blocks[:, 16:144])
    return _two_levels("Q4_K", codes, scales, _half(blocks, 0), minimums, _half(blocks, 2))


def _code_q5_k(blocks: Tensor) -> CodedRows:
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    fifth = _split_bits(blocks[:, 16:48], 1).view(-1, 256)
    codes = _halves_by_32(blocks[:, 48:176]) | (fifth << 4)
    return _two_levels("Q5_K", codes, scales, _half(blocks, 0), minimums, _half(blocks, 2))


def _code_q6_k(blocks: Tensor) -> CodedRows:
    n = len(blocks)
    low = _split_bits(blocks[:, 0:128].reshape(-1, 64), 4).view(n, -1)
    codes = low | (_quarters_by_32(blocks[:, 128:192]) << 4)
    return _two_levels("Q6_K", codes, blocks[:, 192:208].view(torch.int8), _half(blocks, 208))


def _code_iq4_nl(blocks: Tensor) -> CodedRows:
    codes = _split_bits(blocks[:, 2:18], 4).flatten(1)
    return CodedRows(GGUF_FORMATS["IQ4_NL"], codes, _half(blocks, 0))


def _code_iq4_xs(blocks: Tensor) -> CodedRows:
    n = len(blocks)
    high_bits = _split_bits(blocks[:, 2:4], 2).transpose(1, 2).reshape(n, 8)
    low_bits = _split_bits(blocks[:, 4:8], 4).transpose(1, 2).reshape(n, 8)
    scales = (low_bits | (high_bits << 4)).to(torch.int8) - 32
    codes = _split_bits(blocks[:, 8:136].reshape(-1, 16), 4).view(n, 256)
    return _two_levels("IQ4_XS", codes, scales, _half(blocks, 0))


def _code_mxfp4(blocks: Tensor) -> CodedRows:
    exponents = blocks[:, :1].int()
    # the power of exponent 0 is no normal number
    scales = torch.where(exponents < 1, 0x00400000, exponents << 23).view(torch.float32)
    codes = _split_bits(blocks[:, 1:17], 4).flatten(1)
    return CodedRows(GGUF_FORMATS["MXFP4"], codes, scales)


def _unpack_mxfp4(blocks: Tensor, out: Tensor) -> None:
    exponents = blocks[:, :1].int()
    # half of a power, and twice the values: the largest power is not finite; below 2, half of one is no normal number
    halves = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    out.copy_(_code_mxfp4(blocks).values()).mul_(2).mul_(halves)


def _two_levels(
    type: str,
    codes: Tensor,
    scales: Tensor,
    super_scales: Tensor,
    minimums: Tensor | None = None,
    super_minimums: Tensor | None = None,
) -> CodedRows:
    return CodedRows(
        GGUF_FORMATS[type],
        codes,
        scales,
        minimums,
        super_scales=super_scales,
        super_minimums=super_minimums,
    )


_CODED: dict[str, Callable[[Tensor], CodedRows]] = {
    "Q4_0": _code_q4_0,
    "Q4_1": _code_q4_1,
    "Q5_0": _code_q5_0,
    "Q5_1": _code_q5_1,
    "Q8_0": _code_q8_0,
    "Q2_K": _code_q2_k,
    "Q3_K": _code_q3_k,
    "Q4_K": _code_q4_k,
    "Q5_K": _code_q5_k,
    "Q6_K": _code_q6_k,
    "IQ4_NL": _code_iq4_nl,
    "IQ4_XS": _code_iq4_xs,
    "MXFP4": _code_mxfp4,
}


def read_codes(blocks: Tensor, type: str) -> CodedRows:
    """Unpack blocks into codes and scales.

    Args:
        blocks: [rows, bytes of some whole blocks] uint8.
        type: GGML's name of a form that has codes.
    """
    form = _TYPES[type]
    coded = _CODED[type](blocks.reshape(-1, form.num_bytes))

    def of_rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(len(blocks), -1)

    return replace(
        coded,
        codes=coded.unpacked().reshape(len(blocks), -1),
        scales=coded.scales.reshape(len(blocks), -1),
        offsets=of_rows(coded.offsets),
        super_scales=of_rows(coded.super_scales),
        super_minimums=of_rows(coded.super_minimums),
    )


def _unpack_coded(type: str) -> Unpack:
    code = _CODED[type]
    return lambda blocks, out: out.copy_(code(blocks).dequantize(torch.float32))


_UNPACK: dict[str, Unpack] = {type: _unpack_coded(type) for type in _CODED} | {
    # without codes in between, as these are fast to read so
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "MXFP4": _unpack_mxfp4,
}
_BY_PACKAGE = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0", "NVFP4"),
)
"""Types with tables of vectors, which the `gguf` package has and reads."""


def _unpack_by_package(type: str) -> Unpack:
    from gguf import GGMLQuantizationType  # a tenth of a second to import
    from gguf.quants import dequantize as dequantize_by_package

    kind = GGMLQuantizationType[type]
    return lambda blocks, out: out.copy_(torch.from_numpy(dequantize_by_package(blocks.numpy(), kind)))
