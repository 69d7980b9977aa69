"""Weights that keep codes and scales of files: their values, and products with them, beside float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from torch.nn.functional import silu

from tests.kernels.weights.coded_rows import FORMATS, meaning, random_rows
from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.ops import embedding, gated_linear, linear
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import (
    GGUF_FORMATS,
    PANEL_FORMATS,
    TABLES,
    QuantizedFormat,
    common_format,
)
from triptych_kernels.weights.quantized import QuantizedWeight, can_hold

QUICK = ("Q4_K", "Q6_K", "GPTQ", "MXFP4", "nf4", "fp8")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in FORMATS]
IN_FEATURES = 512


@pytest.fixture(
    params=usable_isas() or [pytest.param("", marks=pytest.mark.skip(reason="no native kernels"))]
)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


def filled(rows: CodedRows, format: QuantizedFormat | None = None, **options: bool) -> CodedWeight:
    weight = CodedWeight(*rows.shape, torch.float32, format or rows.format, **options)
    weight.data.random_(0, 120)  # whatever is not filled would show
    weight.fill_codes(0, rows)
    return weight


def every_row(weight: CodedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    return embedding(torch.arange(weight.out_features), weight, out_dtype=dtype)


def inputs(num_rows: int, size: int = IN_FEATURES, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, size, generator=random)
    return values * 4 ** torch.randn(num_rows, size // 32, generator=random).repeat_interleave(32, 1)


def allowed_error(x: Tensor, rows: CodedRows, input_bits: int) -> Tensor:
    """Return half a step of each input's integer, and the rounding of float32 sums."""
    sizes = meaning(rows).abs()
    if rows.offsets is not None:  # of values that a minimum makes small again
        sizes = sizes + rows.group_minimums().double().abs().amax(1, keepdim=True)
    steps = 2.0**-19 * x.double().abs()  # of chains of 512 sums
    groups = x.double().unflatten(1, (-1, 32))
    if input_bits == 16:
        steps = steps + 0.501 * 2 * groups.abs().amax(-1).repeat_interleave(32, 1) / 65534
    else:
        ranges = groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)
        # a zero point is rounded, too
        steps = steps + 1.002 * ranges.repeat_interleave(32, 1) / 254
    return steps @ sizes.T


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [1, 45])
def test_weights_are_those_of_the_file(isa: str, name: str, num_rows: int) -> None:
    rows = random_rows(FORMATS[name], num_rows, IN_FEATURES)
    weight = filled(rows)
    assert can_hold(rows.format, IN_FEATURES, torch.float32)
    assert torch.equal(every_row(weight), rows.dequantize(torch.float32))
    torch.testing.assert_close(every_row(weight).double(), meaning(rows), rtol=3e-7, atol=1e-5)
    assert torch.equal(every_row(weight, torch.bfloat16), rows.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("input_bits", [8, 16])
def test_products_are_as_exact_as_their_inputs(isa: str, name: str, input_bits: Literal[8, 16]) -> None:
    rows = random_rows(FORMATS[name], 71, IN_FEATURES)
    weight, exact_weight = filled(rows, bias=True), meaning(rows)
    weight.fill_bias(0, torch.arange(71.0))
    weight.input_bits = input_bits
    for num_rows in (1, 2, 3, 5, 7, 8, 9, 13, 31, 40, 67):
        for dtype in (torch.float32, torch.bfloat16):
            x = inputs(num_rows, seed=num_rows).to(dtype)
            error = linear(x, weight, out_dtype=torch.float32) - x.double() @ exact_weight.T
            assert ((error - torch.arange(71)).abs() <= allowed_error(x, rows, input_bits) + 1e-5).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arithmetic", ["8 bits", "16 bits", "wide"])
def test_a_rows_result_does_not_depend_on_its_batch_or_threads(isa: str, name: str, arithmetic: str) -> None:
    weight = filled(random_rows(FORMATS[name], 50, IN_FEATURES))
    weight.input_bits = 8 if arithmetic == "8 bits" else 16
    if arithmetic == "wide":
        weight.wide_rows = 1
    x = inputs(120)
    together = linear(x, weight)
    try:
        for num_threads in (1, 2, 3):
            use_threads(num_threads)
            assert torch.equal(linear(x, weight), together)
            for first, last in ((0, 1), (5, 13), (7, 23), (60, 107)):
                assert torch.equal(linear(x[first:last], weight), together[first:last])
    finally:
        use_threads(1)
    for size in range(1, 41):
        assert torch.equal(linear(x[:size], weight), together[:size])


@pytest.mark.parametrize("name", ["GPTQ", "GPTQ of rows", "MXFP4", "NVFP4", "nf4", "fp8"])
def test_inputs_of_an_odd_number_of_groups(isa: str, name: str) -> None:
    rows = random_rows(FORMATS[name], 50, 352)
    weight, exact_weight = filled(rows), meaning(rows)
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs(27, 352).to(dtype)
        together = linear(x, weight, out_dtype=torch.float32)
        assert ((together - x.double() @ exact_weight.T).abs() <= allowed_error(x, rows, 16) + 1e-5).all()
        for first, end in ((0, 1), (1, 5), (5, 14), (14, 27)):
            assert torch.equal(linear(x[first:end], weight, out_dtype=torch.float32), together[first:end])


@pytest.mark.parametrize(
    ("name", "code_of_zero"), [("symmetric", 8), ("Q6_K", 32), ("MXFP4", 0), ("NVFP4", 0), ("fp8", 0)]
)
def test_bfloat16_inputs_are_not_rounded_in_pairs(name: str, code_of_zero: int) -> None:
    """A large input meets weights of zero; as integers of 16 bits inputs of 1 would be 0 beside it."""
    if "avx512_bf16" not in usable_isas():
        pytest.skip("this processor multiplies no pairs of bfloat16 in vectors")
    rows = random_rows(FORMATS[name], 50, IN_FEATURES)
    rows.codes[:, ::32] = code_of_zero
    x = torch.ones(13, IN_FEATURES, dtype=torch.bfloat16)
    x[:, ::32] = 2.0**20
    exact_weight = meaning(rows)
    with forced_isa("avx512_bf16"):
        weight = filled(rows)
        for num_rows in (1, 13):
            error = linear(x[:num_rows], weight, out_dtype=torch.float32) - exact_weight.sum(1)
            assert (error.abs() <= 2.0**-18 * exact_weight.abs().sum(1)).all()


@pytest.mark.parametrize("name", ["Q4_K", "NVFP4", "nf4"])
def test_wide_products_are_those_of_bfloat16(isa: str, name: str) -> None:
    rows = random_rows(FORMATS[name], 75, IN_FEATURES)
    weight = filled(rows)
    weight.wide_rows = 10
    x = inputs(14)
    exact = x.bfloat16().double() @ rows.dequantize(torch.bfloat16).double().T
    assert (linear(x, weight) - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (
        (linear(x[:9], weight) - x[:9].double() @ meaning(rows).T).abs() <= allowed_error(x[:9], rows, 16)
    ).all()


@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "GPTQ"])
def test_gate_and_up_are_multiplied(isa: str, name: str, input_bits: Literal[8, 16]) -> None:
    format, bias = FORMATS[name], torch.randn(74)
    halves = {half: random_rows(format, 37, IN_FEATURES, seed) for seed, half in enumerate(("gate", "up"))}
    weight = CodedWeight(74, IN_FEATURES, torch.float32, format, gated=True, bias=True)
    weight.input_bits = input_bits
    for half, start in (("gate", 0), ("up", 37)):
        weight.fill_codes(0, halves[half], half=half)  # type: ignore[arg-type]
        weight.fill_bias(0, bias[start : start + 37], half=half)  # type: ignore[arg-type]
    for num_rows in (1, 7):
        x = torch.randn(num_rows, IN_FEATURES) / 100
        gate, up = (
            x.double() @ meaning(rows).T + bias[start : start + 37]
            for start, rows in zip((0, 37), halves.values(), strict=True)
        )
        gate_error, up_error = (allowed_error(x, rows, input_bits) + 1e-5 for rows in halves.values())
        # silu is nowhere steeper than 1.1
        allowed = 1.1 * gate_error * (up.abs() + up_error) + silu(gate).abs() * up_error
        assert ((gated_linear(x, weight, activation="silu") - silu(gate) * up).abs() <= allowed).all()


@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_sums_are_exact(isa: str, name: str, input_bits: Literal[8, 16]) -> None:
    """All products of a group have one sign and the largest magnitude, where sums of 16 bits would saturate."""
    rows = random_rows(FORMATS[name], 48, IN_FEATURES)
    if rows.format.table == "e4m3":
        rows.codes[:] = torch.where(torch.arange(48) % 2 == 0, 0x7E, 0xFE).byte()[:, None]  # 448 and -448
    else:
        extremes = torch.tensor([0, 2**rows.format.bits - 1, 7, 8]).clamp_max(2**rows.format.bits - 1)
        rows.codes[:] = extremes[torch.arange(48) % 4].byte()[:, None]
    weight = filled(rows)
    weight.input_bits = input_bits
    x = torch.full((9, IN_FEATURES), 127.0) * torch.tensor([1.0, -1.0, 0.5])[torch.arange(9) % 3, None]
    exact = x.double() @ meaning(rows).T
    allowed = 2e-5 * (x.double().abs() @ (meaning(rows).abs() + rows.group_scales().abs().max() * 256).T)
    assert ((linear(x, weight) - exact).abs() <= allowed).all()


def test_pieces_of_two_formats_share_a_weight(isa: str) -> None:
    for names in (
        ("Q4_K", "Q6_K"),
        ("Q5_1", "GPTQ of 3 bits"),
        ("Q3_K", "Q4_K"),
        ("Q4_K", "IQ4_XS"),
        ("GPTQ", "symmetric"),
    ):
        pieces = [random_rows(FORMATS[name], 21, IN_FEATURES, seed) for seed, name in enumerate(names)]
        format = common_format(rows.format for rows in pieces)
        assert format not in PANEL_FORMATS
        weight = CodedWeight(42, IN_FEATURES, torch.float32, format)
        for i, rows in enumerate(pieces):
            weight.fill_codes(21 * i, rows)
        meant = torch.cat([meaning(rows) for rows in pieces])
        torch.testing.assert_close(every_row(weight).double(), meant, rtol=1e-6, atol=1e-4)
        for bits, rtol in ((16, 1e-4), (8, 0.02)):
            weight.input_bits = 8 if bits == 8 else 16
            x = torch.randn(5, IN_FEATURES)
            exact = x.double() @ meant.T
            assert (linear(x, weight) - exact).norm() <= rtol * exact.norm()


def test_what_does_not_fit_is_refused(isa: str) -> None:
    mxfp4, gptq = FORMATS["MXFP4"], FORMATS["GPTQ"]
    weight = CodedWeight(8, 256, torch.float32, mxfp4)
    with pytest.raises(ValueError, match="a scale is no power of two"):
        weight.fill_codes(0, CodedRows(mxfp4, torch.zeros(8, 256).byte(), torch.full((8, 8), 3.0)))
    with pytest.raises(ValueError, match="without loss"):
        weight.fill_codes(0, random_rows(gptq, 8, 256))
    with pytest.raises(ValueError, match="rows of a file only"):
        weight.fill_rows(0, torch.zeros(8, 256))
    with pytest.raises(ValueError, match="Q4_0 blocks do not fit"):
        weight.fill_blocks(0, "Q4_0", torch.zeros(8, 144).byte())
    with pytest.raises(ValueError, match="a zero point does not fit 8 bits"):
        CodedWeight(8, 256, torch.float32, gptq).fill_codes(
            0, CodedRows(gptq, torch.zeros(8, 256).byte(), torch.ones(8, 2), torch.full((8, 2), 0.5))
        )
    with pytest.raises(ValueError, match="a scale does not fit"):
        CodedWeight(8, 256, torch.float32, gptq).fill_codes(
            0, CodedRows(gptq, torch.zeros(8, 256).byte(), torch.full((8, 2), 1 / 3), torch.ones(8, 2))
        )
    for format, size in ((FORMATS["Q4_K"], 288), (gptq, 40), (QuantizedFormat(4, "zero", 48), 96)):
        assert not can_hold(format, size, torch.float32)
        with pytest.raises(ValueError, match="cannot be held"):
            CodedWeight(8, size, torch.float32, format)


def test_bytes_per_weight_are_those_that_the_module_says(isa: str) -> None:
    bits = {"Q4_K": 4.625, "Q6_K": 6.5625, "GPTQ": 4.1875, "MXFP4": 4.25, "nf4": 4.5, "fp8": 8.25}
    for name, expected in bits.items():
        weight = CodedWeight(64, 4096, torch.float32, FORMATS[name])
        assert weight.num_bytes * 8 == expected * 64 * 4096, name


SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}
"""Bytes of a block at which there is a float16; of others the first."""


def blocks_of(
    type: str, num_rows: int, in_features: int = IN_FEATURES, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return random blocks for each row, and the weights that the `gguf` package reads."""
    form = GGMLQuantizationType[type]
    per_block, num_bytes = GGML_QUANT_SIZES[form]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows, in_features // per_block, num_bytes), np.uint8)
    if type == "MXFP4":
        blocks[..., 0] = random.integers(
            2, 253, blocks.shape[:2]
        )  # with which all products are normal numbers
    else:
        for at in SCALES.get(type, (0,)):
            scales = random.normal(0, 0.1, (*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., at : at + 2] = scales.view(np.uint8)
    data = blocks.reshape(num_rows, -1)
    return torch.from_numpy(data), torch.from_numpy(dequantize(data, form).copy())


def weight_of(
    format: QuantizedFormat, out_features: int, in_features: int, *, gated: bool = False
) -> QuantizedWeight:
    create = QuantizedWeight if format in PANEL_FORMATS else CodedWeight
    return create(out_features, in_features, torch.float32, format, gated=gated)


KEPT = [
    (type, format)
    for type, format in GGUF_FORMATS.items()
    for format in dict.fromkeys(
        (
            format,
            *(common_format((format, GGUF_FORMATS[other])) for other in ("Q8_0", "Q6_K", "Q2_K", "Q5_1")),
        )
    )
    if format.scale == GGUF_FORMATS[type].scale and format.table == GGUF_FORMATS[type].table
]
"""Types, and formats of a weight that are their own, or that they share with another type."""


@pytest.mark.parametrize(("type", "format"), KEPT, ids=str)
def test_blocks_are_packed_as_their_file_has_them(isa: str, type: str, format: QuantizedFormat) -> None:
    weight = weight_of(format, 100, IN_FEATURES)
    assert weight.keeps_blocks(type)
    blocks, expected = blocks_of(type, 100)
    weight.data.random_(0, 120)
    for first, end in ((0, 37), (37, 38), (38, 100)):
        weight.fill_blocks(first, type, blocks[first:end])
    assert torch.equal(every_row(weight), expected)


@pytest.mark.parametrize("type", GGUF_FORMATS)
def test_blocks_with_scales_that_are_no_numbers_are_refused(isa: str, type: str) -> None:
    data, _ = blocks_of(type, 3)
    weight = weight_of(GGUF_FORMATS[type], 3, IN_FEATURES)
    weight.fill_blocks(0, type, data)
    at = (0, 255) if type == "MXFP4" else (SCALES.get(type, (0,))[-1] + 1, 0x7C)  # infinite
    data[1, at[0]] = at[1]
    with pytest.raises(ValueError, match="is no number"):
        weight.fill_blocks(0, type, data)


def test_powers_that_make_codes_no_numbers_are_refused() -> None:
    data = torch.zeros(1, 17, dtype=torch.uint8)
    weight = weight_of(GGUF_FORMATS["MXFP4"], 1, 32)
    for exponent, code, is_finite in (
        (252, 7, True),
        (253, 5, True),
        (253, 6, False),
        (254, 3, True),
        (254, 4, False),
    ):
        data[0, 0], data[0, 9] = exponent, code << 4
        if is_finite:
            weight.fill_blocks(0, "MXFP4", data)
            assert float(every_row(weight)[0, 24]) == 2.0 ** (exponent - 127) * TABLES["fp4"][code]
        else:
            with pytest.raises(ValueError, match="is no number"):
                weight.fill_blocks(0, "MXFP4", data)
