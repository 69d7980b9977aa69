"""Triton's products with weights of 4 and 8 bits: the stored weights exactly, summed in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.ops import ACTIVATIONS, GATED_ACTIVATIONS, embedding, gated_linear, linear
from triptych_kernels.reference.linear import activate
from triptych_kernels.reference.linear import gated_linear as reference_gated_linear
from triptych_kernels.triton.linear import quantized_linear, quantized_weight
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.weights.formats import BLOCK_FORMATS, QuantizedFormat
from triptych_services.worker.loader.gguf import dequantize

FORMATS = [
    QuantizedFormat(bits, "minimum" if is_affine else "none")
    for bits in (4, 8)
    for is_affine in (False, True)
]
HELD = [(type, f) for type, smallest in BLOCK_FORMATS.items() for f in FORMATS if f.holds(smallest)]
UNIT = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Rounding error of a result, relative to the sum of its terms' magnitudes."""


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are summed in several splits as well."""
    monkeypatch.setattr(quantized_linear, "MIN_SPLIT_GROUPS", 4)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Groups of different sizes, as in real weights."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2 ** torch.randn(*shape[:-1], shape[-1] // 32, generator=generator)
    return torch.randn(shape, generator=generator) * sizes.repeat_interleave(32, -1)


def blocks(num_rows: int, in_features: int, type: str) -> tuple[Tensor, Tensor]:
    """Rows of a GGUF file, and what they mean by the loader, which is tested against GGUF's own package."""
    generator = torch.Generator().manual_seed(in_features)
    num_halves = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}[type]
    num_bytes = BLOCK_FORMATS[type].bits * 4
    halves = torch.randn(num_rows, in_features // 32, num_halves, generator=generator).div(16).half()
    integers = torch.randint(
        256, (num_rows, in_features // 32, num_bytes), generator=generator, dtype=torch.uint8
    )
    data = torch.cat([halves.view(torch.uint8), integers], dim=-1).flatten(1)
    return data, dequantize(data.flatten(), type, torch.float32).view(num_rows, in_features)


def filled(
    format: QuantizedFormat,
    out_features: int,
    in_features: int,
    device: torch.device,
    dtype=torch.float32,
    **options,
) -> tuple[GroupQuantizedWeight, Tensor]:
    """A weight with such blocks as it can hold, and what they mean in float64."""
    type = {4: {False: "Q4_0", True: "Q4_1"}, 8: {False: "Q8_0", True: "Q4_1"}}[format.bits][format.is_affine]
    data, meant = blocks(out_features, in_features, type)
    with poisoned_allocations():
        weight = GroupQuantizedWeight(out_features, in_features, dtype, format, device=device, **options)
    weight.fill_blocks(0, type, data)
    return weight, meant.double().to(device)


def every_row(weight: GroupQuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    return embedding(torch.arange(weight.out_features, device=weight.device), weight, out_dtype=dtype)


@pytest.mark.parametrize("in_features", [32, 96, 1088])
@pytest.mark.parametrize(("type", "format"), HELD, ids=str)
def test_stored_blocks_are_held_without_loss(
    type: str, format: QuantizedFormat, in_features: int, device: torch.device
) -> None:
    data, meant = blocks(7, in_features, type)
    weight = GroupQuantizedWeight(7, in_features, torch.float32, format, device=device)
    weight.fill_blocks(3, type, data[3:])
    weight.fill_blocks(0, type, data[:3])
    assert torch.equal(every_row(weight).cpu(), meant)
    assert torch.equal(every_row(weight, torch.float16).cpu(), meant.half())


def test_a_format_that_would_lose_something_refuses_the_blocks(device: torch.device) -> None:
    weight = GroupQuantizedWeight(32, 32, torch.float32, QuantizedFormat(8), device=device)
    with pytest.raises(ValueError, match="Q4_1 blocks do not fit"):
        weight.fill_blocks(0, "Q4_1", blocks(32, 32, "Q4_1")[0])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rows_are_rounded_in_place(
    format: QuantizedFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_weight, "FILLED_AT_ONCE", 3 * 96)  # three rows
    rows = random(9, 96)
    weight = GroupQuantizedWeight(12, 96, torch.float32, format, device=device)
    weight.fill_rows(2, rows)
    largest = rows.view(9, 3, 32).abs().amax(-1).repeat_interleave(32, -1)
    error = (every_row(weight)[2:11].cpu() - rows).abs()
    assert (error <= largest * {4: 0.13, 8: 0.0042}[format.bits]).all()
    assert (every_row(weight)[[0, 1, 11]] == 0).all()


def test_a_number_of_inputs_that_no_group_divides_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"40 inputs.*multiple of 32"):
        GroupQuantizedWeight(8, 40, torch.float32, FORMATS[0], device=device)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("num_rows", "out_features", "in_features"), [(1, 70, 96), (18, 5, 288)])
def test_products_are_those_of_the_stored_weights(
    num_rows: int,
    out_features: int,
    in_features: int,
    format: QuantizedFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weight, meant = filled(format, out_features, in_features, device, dtype, bias=True)
    bias = torch.randn(out_features)
    weight.fill_bias(0, bias)
    padded = random(num_rows, in_features + 32, seed=1).to(device, dtype)
    x = padded[:, :in_features]
    for out_dtype in {dtype, torch.float32}:
        with poisoned_allocations():
            out = linear(x, weight, out_dtype=out_dtype)
        exact = x.double() @ meant.T + bias.double().to(device)
        magnitudes = x.double().abs() @ meant.abs().T
        assert out.dtype == out_dtype
        assert ((out - exact).abs() <= UNIT[torch.float32] * magnitudes + UNIT[out_dtype] * exact.abs()).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_many_rows_round_their_weights_where_they_may(format: QuantizedFormat, device: torch.device) -> None:
    dtype = torch.float16
    weight, _ = filled(format, 70, 96, device, dtype, batch_invariant=False)
    x = random(quantized_linear.WIDE_ROWS, 96, seed=1).to(device, dtype)
    with poisoned_allocations():
        out = linear(x, weight, out_dtype=torch.float32)
    rounded = every_row(weight, dtype).double()
    exact = x.double() @ rounded.T
    assert ((out - exact).abs() <= UNIT[torch.float32] * (x.double().abs() @ rounded.abs().T)).all()
    few = linear(x[:-1], weight, out_dtype=torch.float32)
    weight.batch_invariant = True
    assert torch.equal(few, linear(x[:-1], weight, out_dtype=torch.float32))
    assert not torch.equal(out, linear(x, weight, out_dtype=torch.float32))


@pytest.mark.parametrize("num_rows", [1, 17, 70])
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_gate_and_up_are_multiplied(
    activation: str, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    format = QuantizedFormat(4, "minimum")
    weight = GroupQuantizedWeight(2 * 37, 64, dtype, format, device=device, gated=True, bias=True)
    plain = GroupQuantizedWeight(2 * 37, 64, dtype, format, device=device)
    torch.manual_seed(0)
    rows, bias = torch.randn(74, 64) / 8, torch.randn(74)
    plain.fill_rows(0, rows)
    for half, part in (("up", slice(37, 74)), ("gate", slice(0, 37))):
        weight.fill_rows(0, rows[part], half=half)
        weight.fill_bias(0, bias[part], half=half)
    x = torch.randn(num_rows, 64).to(device, dtype)
    with poisoned_allocations():
        out = gated_linear(x, weight, activation=activation)
    expected = reference_gated_linear(x, every_row(plain), bias.to(device), activation)
    torch.testing.assert_close(out, expected, rtol=2 * UNIT[dtype], atol=8 * UNIT[dtype])


@pytest.mark.parametrize("format", FORMATS[1:3], ids=str)
def test_a_rows_result_does_not_depend_on_its_batch(
    format: QuantizedFormat, dtype: torch.dtype, device: torch.device
) -> None:
    weight, _ = filled(format, 20, 352, device, dtype)  # 11 groups in 2 splits
    # the interpreter's tiles are numpy's products, whose order depends on their size: there, sums that are exact in
    # any order, so that what is left is the order of groups and splits
    x = (random(70, 352, seed=1) if device.type == "cuda" else torch.randint(-8, 9, (70, 352))).to(
        device, dtype
    )
    together = linear(x, weight, out_dtype=torch.float32)
    for first, last in ((0, 1), (3, 20), (60, 70)):
        assert torch.equal(linear(x[first:last], weight, out_dtype=torch.float32), together[first:last])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the interpreter says so
def test_a_gated_rows_result_does_not_depend_on_its_batch(
    bits: int, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Few rows are activated after their splits are summed, many by the program that sums them."""
    format = QuantizedFormat(bits, "minimum")
    weight = GroupQuantizedWeight(2 * 35, 352, dtype, format, device=device, gated=True, bias=True)
    # as above, sums that are exact in any order; the smallest steps of 4 and 8 bits, so that weights are exact too
    for half in ("gate", "up"):
        weight.fill_rows(0, torch.randint(0, 16, (35, 352)).float() / 16, half=half)  # type: ignore[arg-type]
        weight.fill_bias(0, torch.randint(-8, 9, (35,)) / 8, half=half)  # type: ignore[arg-type]
    x = torch.randint(-2, 3, (70, 352)).to(device, dtype)
    together = gated_linear(x, weight, activation=activation)
    for first, last in ((0, 1), (3, 19), (60, 70)):
        assert torch.equal(gated_linear(x[first:last], weight, activation=activation), together[first:last])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the interpreter says so
@pytest.mark.parametrize("in_features", [64, 1088], ids=["whole", "splits"])
def test_outputs_are_activated(in_features: int, device: torch.device) -> None:
    weight, _ = filled(QuantizedFormat(4, "minimum"), 33, in_features, device, torch.float32)
    for num_rows in (1, 17):
        x = random(num_rows, in_features, seed=1).to(device)
        for activation in ACTIVATIONS:
            out = linear(x, weight, activation=activation)
            expected = activate(linear(x, weight).double(), activation).float()
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_a_gated_product_of_many_rows_writes_no_float32(
    num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        quantized_linear,
        "sum_splits",
        lambda partials, *rest, **options: shapes.append(tuple(partials.shape)) or partials,
    )
    weight = GroupQuantizedWeight(2 * 33, 352, torch.float16, FORMATS[1], device=device, gated=True)
    gated_linear(torch.ones(num_rows, 352, device=device, dtype=torch.float16), weight)
    assert bool(shapes) == (num_rows == 3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter says so
def test_what_is_no_number_stays_in_its_row(poison: float, device: torch.device) -> None:
    weight, _ = filled(QuantizedFormat(4, "minimum"), 33, 96, device)
    x = random(3, 96, seed=1).to(device)
    x[1, 40] = poison
    out = linear(x, weight)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_no_rows_give_no_results(device: torch.device) -> None:
    weight, _ = filled(QuantizedFormat(4), 8, 64, device)
    assert linear(torch.empty(0, 64, device=device), weight).shape == (0, 8)
    assert embedding(torch.empty(0, dtype=torch.int64, device=device), weight).shape == (0, 64)


def test_memory_is_what_the_bits_say(device: torch.device) -> None:
    sizes = [
        GroupQuantizedWeight(64, 64, torch.float32, format, device=device).num_bytes for format in FORMATS
    ]
    assert sizes == [64 * 64 * bits // 64 for bits in (36, 40, 68, 72)]
