"""Triton's products in 8 bits: rows and weights rounded once, by the rule of the caches, then multiplied exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_kernels.ops import embedding, gated_linear, linear
from triptych_kernels.reference.linear import gated_linear as reference_gated_linear
from triptych_kernels.triton.linear import quantize_rows as quantize_rows_module
from triptych_kernels.triton.linear import w8a8_linear
from triptych_kernels.triton.linear.quantize_rows import quantize_rows
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight

ELEMENTS = list(LARGEST_ELEMENT)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are summed in several splits as well."""
    monkeypatch.setattr(w8a8_linear, "MIN_SPLIT_INPUTS", 64)


def rounded(rows: Tensor, element: torch.dtype) -> Tensor:
    """The elements of each row by the rule of `kv_scales`, on the CPU."""
    scales = scales_of(rows, element)[:, None]
    quotients = rows.cpu().float() / torch.where(scales > 0, scales, 1.0)
    return (quotients.round() if element == torch.int8 else quotients).to(element)


def scales_of(rows: Tensor, element: torch.dtype) -> Tensor:
    """Likewise; on the CPU, as torch divides by a number on GPUs by multiplying with its reciprocal."""
    return rows.cpu().float().abs().amax(1) / LARGEST_ELEMENT[element]


def meant_by(elements: Tensor, scales: Tensor) -> Tensor:
    return elements.double() * scales.double()[:, None]


def filled(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    element: torch.dtype,
    device: torch.device,
    **options: bool,
) -> tuple[ChannelQuantizedWeight, Tensor]:
    torch.manual_seed(out_features)
    rows = torch.randn(out_features, in_features, device=device) * torch.rand(out_features, 1, device=device)
    weight = ChannelQuantizedWeight(out_features, in_features, dtype, element, device=device, **options)
    weight.fill_rows(2, rows[2:])
    weight.fill_rows(0, rows[:2])
    return weight, meant_by(weight.elements, weight.scales)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("longest", [64, 1024])
@pytest.mark.parametrize("length", [1, 40, 200])
def test_rows_are_rounded_with_a_scale_each(
    length: int,
    longest: int,
    element: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantize_rows_module, "LONGEST_WHOLE_ROW", longest)
    torch.manual_seed(length)
    x = (torch.randn(5, length + 3, device=device) * 10).to(dtype)[:, :length]
    x[1] = 0.0
    with poisoned_allocations():
        elements, scales = quantize_rows(x, element)
    assert elements.dtype == element
    assert torch.equal(scales.cpu(), scales_of(x, element))
    elements, expected = elements.cpu(), rounded(x, element)
    if element == torch.int8 or device.type == "cuda":
        assert torch.equal(elements.view(torch.uint8), expected.view(torch.uint8))
        return
    # the interpreter rounds to 8-bit floats in ways of its own, and its carry into the exponent is lost: there all but
    # powers of two are within one step
    compared = (expected.view(torch.uint8) & 0b111 != 0) | (expected.float() == 0.0)
    torch.testing.assert_close(elements.float()[compared], expected.float()[compared], rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_what_is_no_number_stays_in_its_row(
    element: torch.dtype, poison: float, device: torch.device
) -> None:
    weight, _ = filled(20, 64, torch.float32, element, device)
    x = torch.ones(3, 64, device=device)
    x[1, 7] = poison
    out = linear(x, weight)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"), [(1, 130, 150), (5, 7, 40), (65, 20, 150)]
)
def test_products_are_those_of_what_was_rounded(
    num_rows: int,
    out_features: int,
    in_features: int,
    element: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weight, meant = filled(out_features, in_features, dtype, element, device, bias=True)
    bias = torch.randn(out_features)
    weight.fill_bias(0, bias)
    x = torch.randn(num_rows, in_features).to(device, dtype)
    with poisoned_allocations():
        out = linear(x, weight, out_dtype=torch.float32)
    x_meant = meant_by(*quantize_rows(x, element))
    exact = x_meant @ meant.T + bias.double().to(device)
    # float8 sums of 128 inputs have about 14 bits on the device
    unit = 2**-12 if element != torch.int8 and device.type == "cuda" else 2**-21
    assert ((out - exact).abs() <= unit * (x_meant.abs() @ meant.abs().T + 1)).all()
    assert torch.equal(linear(x, weight), out.to(dtype))


@pytest.mark.parametrize("num_rows", [3, 130])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_gate_and_up_are_multiplied(element: torch.dtype, num_rows: int, device: torch.device) -> None:
    weight = ChannelQuantizedWeight(50, 64, torch.float32, element, device=device, gated=True, bias=True)
    torch.manual_seed(0)
    rows, bias = torch.randn(50, 64, device=device) / 8, torch.randn(50, device=device)
    for half, part in (("up", slice(25, 50)), ("gate", slice(0, 25))):
        weight.fill_rows(0, rows[part], half=half)
        weight.fill_bias(0, bias[part], half=half)
    x = torch.randn(num_rows, 64, device=device)
    with poisoned_allocations():
        out = gated_linear(x, weight)
    assert torch.equal(gated_linear(x[-3:], weight), out[-3:]), "by the other way"
    x_meant, meant = (meant_by(*quantize_rows(part, element)) for part in (x, rows))
    expected = reference_gated_linear(x_meant, meant, bias, "silu")
    torch.testing.assert_close(
        out.double(), expected, rtol=1e-3, atol=1e-3 if device.type == "cuda" else 1e-5
    )


@pytest.mark.thorough
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_outputs_are_activated(element: torch.dtype, device: torch.device) -> None:
    for in_features in (150, 1100):  # one split, and two
        weight, _ = filled(20, in_features, torch.float32, element, device)
        for num_rows in (1, 130):
            x = torch.randn(num_rows, in_features, device=device)
            out = linear(x, weight, activation="relu2")
            assert torch.equal(out, linear(x, weight).relu().square())


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_a_rows_result_does_not_depend_on_its_batch(element: torch.dtype, device: torch.device) -> None:
    weight, _ = filled(20, 150, torch.float32, element, device)
    if element == torch.int8 or device.type == "cuda":
        x = torch.randn(200, 150, device=device)  # more than a tile has: its program takes all splits
    else:  # the interpreter's tiles are numpy's products, whose order depends on their size: sums that are exact in any
        x = torch.randint(-1, 2, (200, 150), device=device).float()
    together = linear(x, weight)
    for first, last in ((0, 1), (3, 20), (190, 200)):
        assert torch.equal(linear(x[first:last], weight), together[first:last])


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_rows_are_found_as_they_were_rounded(element: torch.dtype, device: torch.device) -> None:
    weight, meant = filled(9, 64, torch.float32, element, device)
    token_ids = torch.tensor([8, 0, 8], device=device)
    assert torch.equal(embedding(token_ids, weight), meant[token_ids].float())


def test_memory_is_one_byte_a_weight_and_a_scale_an_output(device: torch.device) -> None:
    weight = ChannelQuantizedWeight(8, 64, torch.float32, torch.int8, device=device, bias=True)
    assert weight.num_bytes == 8 * (64 + 4 + 4)
