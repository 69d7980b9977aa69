"""Quantized weights as files mean them: values, parts, and what a weight keeps of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.weights.coded_rows import FORMATS, meaning, random_rows
from triptych_kernels.ops import embedding
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import QuantizedFormat, common_format
from triptych_kernels.weights.quantized import QuantizedWeight, can_hold

Q4_K, Q6_K = FORMATS["Q4_K"], FORMATS["Q6_K"]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_rows_mean_what_their_format_says(format: QuantizedFormat) -> None:
    rows = random_rows(format, 3, 512)
    torch.testing.assert_close(rows.dequantize(torch.float64), meaning(rows), rtol=1e-6, atol=1e-6)
    assert torch.equal(rows.dequantize(torch.bfloat16), rows.dequantize(torch.float32).bfloat16())


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_parts_mean_the_same(format: QuantizedFormat) -> None:
    rows = random_rows(format, 5, 512)
    whole = rows.dequantize(torch.float32)
    assert torch.equal(rows.narrow(0, 1, 3).dequantize(torch.float32), whole[1:4])
    assert torch.equal(rows.narrow(1, 256, 256).dequantize(torch.float32), whole[:, 256:])
    assert rows.narrow(1, 256, 256).shape == (5, 256)


def test_the_last_group_may_be_smaller() -> None:
    rows = random_rows(QuantizedFormat(8, "none", 128, "e4m3", "float32"), 2, 200)
    torch.testing.assert_close(rows.dequantize(torch.float64), meaning(rows), rtol=1e-6, atol=1e-6)
    part = rows.narrow(1, 128, 72)
    assert torch.equal(part.dequantize(torch.float32), rows.dequantize(torch.float32)[:, 128:])


@pytest.mark.parametrize(("format", "whole"), [(QuantizedFormat(4, "zero", 64), 64), (Q4_K, 256)], ids=str)
def test_parts_that_cut_a_group_are_refused(format: QuantizedFormat, whole: int) -> None:
    with pytest.raises(ValueError, match=f"inputs 32 to 256 of 512 cut a group of {whole}"):
        random_rows(format, 2, 512).narrow(1, 32, 224)


def test_products_of_finite_scales_and_codes_may_be_no_numbers() -> None:
    rows = random_rows(FORMATS["NVFP4"], 3, 64)
    assert rows.is_finite()
    rows = replace(rows, scales=torch.full_like(rows.scales, 448.0), codes=torch.full_like(rows.codes, 2))
    assert replace(rows, factor=7e35).is_finite()  # 3.1e38, since the codes are 1.0
    assert not replace(rows, factor=8e35).is_finite()
    minimums = random_rows(Q4_K, 3, 256)
    assert minimums.is_finite()
    infinite = replace(minimums, super_minimums=torch.full((3, 1), torch.inf))
    assert not infinite.is_finite()


@pytest.mark.parametrize(
    "format", [QuantizedFormat(4), QuantizedFormat(4, "minimum"), QuantizedFormat(8)], ids=str
)
def test_weights_keep_codes(format: QuantizedFormat) -> None:
    if not can_hold(format, 96, torch.float32):
        pytest.skip("no native kernels")
    rows = random_rows(format, 40, 96)
    weight = QuantizedWeight(40, 96, torch.float32, format)
    weight.fill_codes(0, rows)
    held = embedding(torch.arange(40), weight, out_dtype=torch.float32)
    assert torch.equal(held, rows.dequantize(torch.float32))


def test_formats_that_a_weight_cannot_hold_are_refused() -> None:
    q8 = QuantizedFormat(8)
    if not can_hold(q8, 64, torch.float32):
        pytest.skip("no native kernels")
    weight = QuantizedWeight(32, 64, torch.float32, q8)
    with pytest.raises(ValueError, match="Q4_1 blocks do not fit"):
        weight.fill_codes(0, random_rows(QuantizedFormat(4, "minimum"), 32, 64))
    with pytest.raises(ValueError, match="does not fit float16"):
        weight.fill_codes(0, CodedRows(q8, torch.zeros(32, 64).byte(), torch.full((32, 2), 1 / 3)))


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (QuantizedFormat(4), QuantizedFormat(4, "minimum"), QuantizedFormat(4, "minimum")),
        (QuantizedFormat(4, "minimum"), QuantizedFormat(8), QuantizedFormat(8, "minimum")),
        (Q4_K, Q6_K, QuantizedFormat(6, "minimum", 16, scale="k")),
        (QuantizedFormat(4, "none", 128), QuantizedFormat(4, "zero", 64), QuantizedFormat(4, "zero", 64)),
        (Q4_K, QuantizedFormat(8), QuantizedFormat(8, "minimum", 32, scale="float32")),
        (
            QuantizedFormat(4, "none", 32, "iq4_nl"),
            QuantizedFormat(5),
            QuantizedFormat(8, "none", 32, "", "float32"),
        ),
    ],
    ids=str,
)
def test_a_common_format_holds_both(
    one: QuantizedFormat, other: QuantizedFormat, common: QuantizedFormat
) -> None:
    assert common_format([one, other]) == common_format([other, one]) == common
    assert common.holds(one)
    assert common.holds(other)
    assert not one.holds(other) or one == common


def test_formats_with_nothing_in_common_are_refused() -> None:
    nf4, q8 = QuantizedFormat(4, "none", 64, "nf4", "float32"), QuantizedFormat(8)
    with pytest.raises(ValueError, match="no format holds both"):
        common_format([nf4, q8])
    assert not q8.holds(nf4)
