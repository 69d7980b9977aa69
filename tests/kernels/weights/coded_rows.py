"""Random rows of quantized weights, and what they mean in float64, computed apart from the code under test."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import QuantizedFormat

FORMATS = {
    "Q2_K": QuantizedFormat(2, "minimum", 16, scale="k"),
    "Q3_K": QuantizedFormat(3, "none", 16, scale="k"),
    "Q4_K": QuantizedFormat(4, "minimum", 32, scale="k"),
    "Q5_K": QuantizedFormat(5, "minimum", 32, scale="k"),
    "Q6_K": QuantizedFormat(6, "none", 16, scale="k"),
    "IQ4_XS": QuantizedFormat(4, "none", 32, "iq4_nl", "k"),
    "IQ4_NL": QuantizedFormat(4, "none", 32, "iq4_nl"),
    "Q5_0": QuantizedFormat(5),
    "Q5_1": QuantizedFormat(5, "minimum"),
    "GPTQ": QuantizedFormat(4, "zero", 128),
    "GPTQ of rows": QuantizedFormat(4, "zero", 0),
    "GPTQ of 2 bits": QuantizedFormat(2, "zero", 64),
    "GPTQ of 3 bits": QuantizedFormat(3, "zero", 32),
    "GPTQ of 8 bits": QuantizedFormat(8, "zero", 128),
    "symmetric": QuantizedFormat(4, "none", 128, scale="bfloat16"),
    "8 bits of rows": QuantizedFormat(8, "none", 0, scale="float32"),
    "MXFP4": QuantizedFormat(4, "none", 32, "fp4", "e8m0"),
    "NVFP4": QuantizedFormat(4, "none", 16, "fp4", "e4m3"),
    "nf4": QuantizedFormat(4, "none", 64, "nf4", "float32"),
    "fp4": QuantizedFormat(4, "none", 64, "bnb_fp4", "float32"),
    "fp8": QuantizedFormat(8, "none", 128, "e4m3", "float32"),
    "fp8 of rows": QuantizedFormat(8, "none", 0, "e4m3", "float32"),
}
"""Formats of published checkpoints."""

_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
_FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
_VALUES = {
    "fp4": _E2M1 + [-value for value in _E2M1],
    "bnb_fp4": _FP4 + [-value for value in _FP4],
    "iq4_nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    "nf4": [
        -1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0,
    ],
}  # fmt: skip


def random_rows(format: QuantizedFormat, num_rows: int, in_features: int, seed: int = 0) -> CodedRows:
    random = torch.Generator().manual_seed(seed)
    num_groups = -(-in_features // format.group) if format.group else 1
    shape = (num_rows, num_groups)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    codes = integers(0, 2**format.bits, num_rows, in_features).byte()
    if format.table == "e4m3":
        floats = torch.randn(codes.shape, generator=random) * 4 ** torch.randn(codes.shape, generator=random)
        codes = floats.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    offsets = None
    if format.scale == "k":
        supers = torch.rand(2, num_rows, in_features // 256, generator=random).half()
        if format.is_affine:
            offsets = integers(0, 64, *shape)
        scales = integers(0, 64, *shape) - (0 if format.is_affine else 32)
        return CodedRows(
            format, codes, scales, offsets, 1.0, supers[0], supers[1] if format.is_affine else None
        )
    if format.offset == "zero":
        offsets = integers(0, 2**format.bits + (format.bits < 8), *shape)  # GPTQ's may be 16
    elif format.is_affine:
        offsets = torch.randn(shape, generator=random).half()
    create: dict[str, Callable[[], Tensor]] = {
        "float16": lambda: torch.randn(shape, generator=random).half(),
        "bfloat16": lambda: torch.randn(shape, generator=random).bfloat16(),
        "float32": lambda: torch.randn(shape, generator=random),
        "e8m0": lambda: 2.0 ** integers(-9, 9, *shape),
        "e4m3": lambda: (40 * torch.randn(shape, generator=random)).to(torch.float8_e4m3fn),
    }
    scales = create[format.scale]()
    scales[0, 0] = 1 if format.scale == "e8m0" else 0
    return CodedRows(format, codes, scales, offsets, 0.37 if format.scale == "e4m3" else 1.0)


def meaning(rows: CodedRows) -> Tensor:
    """Return the weights in float64."""
    format, size = rows.format, rows.codes.shape[1]

    def of_inputs(values: Tensor, group: int) -> Tensor:
        return values.double()[:, torch.arange(size) // (group or size)]

    scales = of_inputs(rows.scales, format.group) * rows.factor
    if format.table == "e4m3":
        values = rows.codes.view(torch.float8_e4m3fn).double()
    elif format.table:
        values = torch.tensor(_VALUES[format.table], dtype=torch.float64)[rows.codes.long()]
    else:
        values = rows.codes.double() - (2 ** (format.bits - 1) if format.offset == "none" else 0)
    if rows.super_scales is not None:
        scales *= of_inputs(rows.super_scales, 256)
    weights = scales * values
    if rows.offsets is None:
        return weights
    offsets = of_inputs(rows.offsets, format.group)
    if rows.super_minimums is not None:
        return weights - offsets * of_inputs(rows.super_minimums, 256)
    return weights - scales * offsets if format.offset == "zero" else weights + offsets * rows.factor
