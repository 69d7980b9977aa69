"""Products with 4- and 8-bit weights: exactly the stored weights, and inputs rounded finer than bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from triptych_kernels.cpu.library import forced_isa, usable_isas, use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.ops import ACTIVATIONS, GATED_ACTIVATIONS, embedding, gated_linear, linear
from triptych_kernels.reference.linear import activate
from triptych_kernels.reference.linear import gated_linear as reference_gated_linear
from triptych_kernels.weights.formats import BLOCK_FORMATS, QuantizedFormat, common_format
from triptych_kernels.weights.quantized import NEVER, QuantizedWeight

FORMATS = [
    QuantizedFormat(bits, "minimum" if is_affine else "none")
    for bits in (4, 8)
    for is_affine in (False, True)
]
LEVELS = {8: 254, 16: 65534}
"""Bits of an input's integer -> number of steps that a group's range is cut into.

The range of 8 bits is from the smallest input to the largest, that of 16 bits from -m to m, m the largest magnitude.
"""
ARITHMETICS = ("8 bits", "16 bits", "wide", "wide bytes")
COMPUTED = [(f, a) for f in FORMATS for a in ARITHMETICS if f.bits == 4 or a != "wide bytes"]
"""(format, arithmetic of its products)."""
UNIT = {torch.float32: 2**-22, torch.bfloat16: 2**-8}
"""Rounding error of a result, relative to the sum of its terms' magnitudes: float32 sums, then the dtype."""


def choose(weight: QuantizedWeight, arithmetic: str) -> None:
    weight.input_bits = 8 if arithmetic == "8 bits" else 16
    weight.wide_rows = 1 if arithmetic.startswith("wide") else NEVER
    weight.wide_bits = 8 if arithmetic == "wide bytes" else 16


@pytest.fixture(
    params=usable_isas() or [pytest.param("", marks=pytest.mark.skip(reason="no native kernels"))]
)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


def random(*shape: int, seed: int = 0) -> Tensor:
    """Groups of very different sizes, as in real weights and activations."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * 4 ** torch.randn(*shape[:-1], shape[-1] // 32, generator=generator).repeat_interleave(
        32, -1
    )


def blocks(values: Tensor, type: str) -> tuple[Tensor, Tensor]:
    """Return the blocks of a GGUF file for these weights, and their values, by GGUF's own package."""
    kind = GGMLQuantizationType[type]
    data = quantize(values.numpy(), kind)
    return torch.from_numpy(data), torch.from_numpy(dequantize(data, kind))


def filled(
    format: QuantizedFormat, type: str, weight: Tensor, *, bias: Tensor | None = None
) -> tuple[QuantizedWeight, Tensor]:
    """The weight with such blocks, and what they mean."""
    data, meant = blocks(weight, type)
    packed = QuantizedWeight(*weight.shape, torch.float32, format, bias=bias is not None)
    packed.data.random_(0, 120)  # whatever is not filled would show
    packed.fill_blocks(0, type, data)
    if bias is not None:
        packed.fill_bias(0, bias)
    return packed, meant


def allowed_error(x: Tensor, weight: Tensor, out_dtype: torch.dtype, input_bits: int = 16) -> Tensor:
    """Return the error allowed for each output.

    It is half a step of each input's integer, and the sum's rounding. A zero point is rounded, too.
    """
    magnitudes, groups = x.double().abs(), x.double().unflatten(1, (-1, 32))
    if input_bits == 16:
        ranges = 2 * groups.abs().amax(-1)
    else:
        ranges = 2 * (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0))
    steps = ranges.repeat_interleave(32, 1) / LEVELS[input_bits]
    return (0.501 * steps + UNIT[out_dtype] * magnitudes) @ weight.double().abs().T


def every_row(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    return embedding(torch.arange(weight.out_features), weight, out_dtype=dtype)


HELD = [(type, f) for type, smallest in BLOCK_FORMATS.items() for f in FORMATS if f.holds(smallest)]


@pytest.mark.parametrize(("type", "format"), HELD, ids=str)
def test_stored_blocks_are_held_without_loss(isa: str, type: str, format: QuantizedFormat) -> None:
    packed, meant = filled(format, type, random(45, 96))
    assert torch.equal(every_row(packed), meant)
    assert torch.equal(every_row(packed, torch.bfloat16), meant.bfloat16())


def test_a_format_that_would_lose_something_refuses_the_blocks(isa: str) -> None:
    packed = QuantizedWeight(32, 32, torch.float32, QuantizedFormat(8))
    data, _ = blocks(random(32, 32), "Q4_1")
    with pytest.raises(ValueError, match="Q4_1 blocks do not fit"):
        packed.fill_blocks(0, "Q4_1", data)


def test_pieces_stored_in_different_forms_share_a_weight(isa: str) -> None:
    pieces = {type: blocks(random(21, 64, seed=i), type) for i, type in enumerate(BLOCK_FORMATS)}
    packed = QuantizedWeight(63, 64, torch.float32, common_format(BLOCK_FORMATS.values()))
    for i, (type, (data, _)) in enumerate(pieces.items()):
        packed.fill_blocks(21 * i, type, data)
    assert torch.equal(every_row(packed), torch.cat([meant for _, meant in pieces.values()]))


@pytest.mark.parametrize("input_bits", LEVELS)
@pytest.mark.parametrize("x_dtype", UNIT, ids=str)
@pytest.mark.parametrize(("type", "format"), HELD, ids=str)
def test_products_are_as_exact_as_their_inputs_are_fine(
    isa: str, type: str, format: QuantizedFormat, x_dtype: torch.dtype, input_bits: Literal[8, 16]
) -> None:
    packed, meant = filled(format, type, random(71, 160), bias=torch.ones(71))
    packed.input_bits = input_bits
    for num_rows in (1, 2, 3, 5, 6, 7, 8, 9, 13, 31):
        x = random(num_rows, 160, seed=num_rows).to(x_dtype)
        exact = x.double() @ meant.double().T + 1
        for out_dtype in UNIT:
            out = linear(x, packed, out_dtype=out_dtype)
            assert out.dtype == out_dtype
            assert (
                (out - exact).abs() <= allowed_error(x, meant, out_dtype, input_bits) + UNIT[out_dtype]
            ).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_inputs_of_8_bits_are_rounded_and_multiplied_exactly(isa: str, format: QuantizedFormat) -> None:
    packed = QuantizedWeight(71, 160, torch.float32, format)
    packed.fill_rows(0, random(71, 160))
    packed.input_bits = 8
    weight = every_row(packed).double()
    for num_rows in (1, 5, 17, 40):
        groups = random(num_rows, 160, seed=num_rows).unflatten(1, (-1, 32))
        low, high = (extreme(groups, dim=-1, keepdim=True) for extreme in (torch.amin, torch.amax))
        scales = (high.clamp_min(0) - low.clamp_max(0)) / 254
        rounded = ((groups * (1 / scales)).round() * scales).flatten(1).double()
        # of scales and sums in float32, and of a scale's last two bits, which are dropped
        allowed = 8 * UNIT[torch.float32] * rounded.abs() @ weight.abs().T
        assert ((linear(groups.flatten(1), packed) - rounded @ weight.T).abs() <= allowed).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_largest_sums_of_bytes_are_exact(isa: str, format: QuantizedFormat) -> None:
    """Every product of a group has the same sign and the largest magnitude, where 16-bit sums would saturate."""
    weight = torch.ones(33, 64)
    weight[:, 0] = -1.0  # so that ones become the largest integer
    packed = QuantizedWeight(33, 64, torch.float32, format)
    packed.fill_rows(0, weight)
    packed.input_bits = 8
    held = every_row(packed).double()
    x = torch.full((3, 64), 127.0) * torch.tensor([[1.0], [-1.0], [0.5]])
    for rows in (x, x.repeat(11, 1)):
        exact = rows.double() @ held.T
        assert ((linear(rows, packed) - exact).abs() <= 1e-6 * exact.abs()).all()


@pytest.mark.parametrize(("type", "format"), HELD, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 9, 37])
def test_sums_of_the_extreme_integers_are_exact(
    isa: str, type: str, format: QuantizedFormat, num_rows: int
) -> None:
    """Blocks hold the least or the largest integer only, in every mixture, and inputs are the least or the largest."""
    values = {
        "Q4_0": (0x00, 0xFF, 0x0F, 0xF0),
        "Q4_1": (0x00, 0xFF, 0x0F, 0xF0),
        "Q8_0": (0x80, 0x7F, 0x81, 0xFF),
    }
    head = np.array([0.5] if type != "Q4_1" else [0.5, -3.0], dtype=np.float16).view(np.uint8)
    integers = np.repeat(np.array(values[type], np.uint8), 32 if type == "Q8_0" else 16).reshape(4, -1)
    kinds = np.concatenate([np.broadcast_to(head, (4, head.size)), integers], axis=1)
    data = np.concatenate([kinds[np.arange(48) % 4], kinds[np.arange(48) // 4 % 4]], axis=1)
    meant = torch.from_numpy(dequantize(data, GGMLQuantizationType[type]))
    packed = QuantizedWeight(48, 64, torch.float32, format)
    packed.fill_blocks(0, type, torch.from_numpy(data))
    packed.input_bits = 8
    signs = torch.arange(num_rows)[:, None]
    x = torch.where(torch.arange(64) % 32 < 4 * (signs % 9), 127.0, -127.0) * torch.where(
        signs % 3 == 2, 0.5, 1.0
    )
    exact = x.double() @ meant.double().T
    allowed = 1e-6 * (x.double().abs() @ meant.double().abs().T)
    assert ((linear(x, packed) - exact).abs() <= allowed).all()


def test_rounding_the_inputs_costs_less_than_bfloat16_would(isa: str) -> None:
    packed, meant = filled(BLOCK_FORMATS["Q4_1"], "Q4_1", random(64, 576))
    x = random(16, 576, seed=1)
    exact = x.double() @ meant.double().T
    error = (linear(x, packed) - exact).abs().mean()
    bfloat16_error = (x.bfloat16().double() @ meant.double().T - exact).abs().mean()
    float32_error = (x @ meant.T - exact).abs().mean()
    assert float32_error < error < bfloat16_error / 20


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_gate_and_up_are_multiplied(isa: str, format: QuantizedFormat, activation: str) -> None:
    packed = QuantizedWeight(2 * 37, 64, torch.float32, format, gated=True, bias=True)
    torch.manual_seed(0)
    gate, up, bias = torch.randn(37, 64) / 8, torch.randn(37, 64) / 8, torch.randn(74)
    for half, weight, values in (("gate", gate, bias[:37]), ("up", up, bias[37:])):
        packed.fill_rows(0, weight, half=half)
        packed.fill_bias(0, values, half=half)
    plain = QuantizedWeight(74, 64, torch.float32, format)
    plain.fill_rows(0, torch.cat([gate, up]))
    for num_rows in (1, 7):
        x = torch.randn(num_rows, 64)
        expected = reference_gated_linear(x, every_row(plain), bias, activation)
        for arithmetic, rtol in (("16 bits", 1e-4), ("wide bytes", 0.03)):
            if (format, arithmetic) not in COMPUTED:
                continue
            choose(packed, arithmetic)
            out = gated_linear(x, packed, activation=activation)
            torch.testing.assert_close(out, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


@pytest.mark.parametrize(("format", "arithmetic"), COMPUTED, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_are_activated(isa: str, format: QuantizedFormat, activation: str, arithmetic: str) -> None:
    packed = QuantizedWeight(37, 64, torch.float32, format, bias=True)
    packed.fill_rows(0, random(37, 64) / 8)
    packed.fill_bias(0, random(1, 64)[0, :37])
    choose(packed, arithmetic)
    for num_rows in (1, 7, 20):
        x = random(num_rows, 64, seed=1)
        expected = activate(linear(x, packed).double(), activation).float()
        out = linear(x, packed, activation=activation)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("format", "arithmetic"), COMPUTED, ids=str)
def test_a_rows_result_does_not_depend_on_its_batch(
    isa: str, format: QuantizedFormat, arithmetic: str
) -> None:
    packed = QuantizedWeight(50, 96, torch.float32, format)
    packed.fill_rows(0, random(50, 96))
    choose(packed, arithmetic)
    x = random(200, 96, seed=1)
    together = linear(x, packed)
    for first, last in ((0, 1), (0, 3), (5, 13), (7, 23), (9, 26), (60, 107), (1, 200)):
        assert torch.equal(linear(x[first:last], packed), together[first:last])
    for size in range(1, 41):  # every height of a tile, and of few tiles
        assert torch.equal(linear(x[:size], packed), together[:size])


@pytest.fixture
def _one_thread_afterwards(isa: str) -> Iterator[None]:
    yield
    use_threads(1)


@pytest.mark.usefixtures("_one_thread_afterwards")
@pytest.mark.parametrize(("format", "arithmetic"), COMPUTED, ids=str)
def test_a_rows_result_does_not_depend_on_the_threads(
    isa: str, format: QuantizedFormat, arithmetic: str
) -> None:
    packed = QuantizedWeight(50, 96, torch.float32, format)
    packed.fill_rows(0, random(50, 96))
    choose(packed, arithmetic)
    x = random(230, 96, seed=1)
    use_threads(1)
    expected = linear(x, packed)
    for num_threads in range(2, 9):
        use_threads(num_threads)
        for num_rows in (1, 7, 230):
            assert torch.equal(linear(x[:num_rows], packed), expected[:num_rows])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_wide_products_are_those_of_bfloat16(isa: str, format: QuantizedFormat) -> None:
    packed = QuantizedWeight(75, 96, torch.bfloat16, format)
    packed.fill_rows(0, random(75, 96))
    packed.wide_rows = 10
    rounded = every_row(packed, torch.bfloat16).double()
    x = random(14, 96, seed=1)
    exact = x.bfloat16().double() @ rounded.T
    assert (linear(x, packed) - exact).abs().max() <= 1e-5 * exact.abs().max()
    exact = x[:9].double() @ every_row(packed).double().T
    error = (linear(x[:9], packed) - exact).abs()
    assert (error <= allowed_error(x[:9], every_row(packed), torch.float32)).all()


def hadamard() -> np.ndarray:
    """Return the matrix of order 16 by Sylvester's construction."""
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def turned(values: Tensor) -> np.ndarray:
    """Return float64 [rows, groups, 32], sixteen values at a time multiplied by the matrix."""
    sixteens = values.double().numpy().reshape(len(values), -1, 16)
    return (sixteens @ hadamard()).reshape(len(values), -1, 32)


@pytest.mark.parametrize("x_dtype", UNIT, ids=str)
@pytest.mark.parametrize("is_affine", [False, True], ids=["Q4_0", "Q4_1"])
@pytest.mark.parametrize(("out_features", "in_features"), [(5, 32), (71, 160), (33, 576), (64, 608)])
def test_wide_products_in_bytes_turn_inputs_and_round_them(
    isa: str, out_features: int, in_features: int, is_affine: bool, x_dtype: torch.dtype
) -> None:
    type = "Q4_1" if is_affine else "Q4_0"
    offsets = random(out_features, in_features, seed=3) if is_affine else torch.zeros(())
    packed, meant = filled(
        BLOCK_FORMATS[type], type, random(out_features, in_features) + offsets, bias=torch.ones(out_features)
    )
    choose(packed, "wide bytes")
    # the middle of each group's weights, of which the sum of inputs is not rounded
    scales = blocks(random(out_features, in_features) + offsets, type)[0].view(torch.float16)
    scales = scales.view(out_features, in_features // 32, -1)
    d = scales[..., :1].double()
    middle = scales[..., 1:2].double() + 8 * d if is_affine else torch.zeros_like(d)
    integers = meant.double().unflatten(1, (-1, 32)) - middle
    for num_rows in (1, 5, 6, 7, 13, 40):
        x = random(num_rows, in_features, seed=num_rows).to(x_dtype)
        spread = turned(x)
        steps = np.abs(spread).max(-1, keepdims=True) / 127
        rounded = np.round(spread / steps) * steps
        products = np.einsum("rgi,ogi->ro", rounded, turned(integers.flatten(1)) / 16)
        sums = x.double().unflatten(1, (-1, 32)).sum(-1).numpy() @ middle[..., 0].T.numpy()
        expected = torch.from_numpy(products + sums) + 1
        # of sums in float32 of inputs in any order, and of an integer here and there that is rounded otherwise
        allowed = 40 * UNIT[torch.float32] * (x.double().abs() @ (meant.double().abs()).T + 1)
        allowed += 2e-5 * torch.from_numpy(np.abs(rounded).sum((1, 2))[:, None]) * float(integers.abs().max())
        assert ((linear(x, packed, out_dtype=torch.float32) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("is_affine", [False, True])
def test_the_largest_turned_sums_are_exact(isa: str, is_affine: bool) -> None:
    """Each integer of a weight is the smallest, and turned inputs are the largest of each row."""
    packed = QuantizedWeight(33, 64, torch.float32, QuantizedFormat(4, "minimum" if is_affine else "none"))
    weight = torch.full((33, 64), -8.0)
    weight[:, ::16] = -8.0
    packed.fill_rows(0, weight)
    choose(packed, "wide bytes")
    held = every_row(packed).double()
    x = torch.full((3, 64), 127.0) * torch.tensor([[1.0], [-1.0], [0.5]])
    exact = x.double() @ held.T
    assert ((linear(x, packed) - exact).abs() <= 1e-6 * exact.abs()).all()


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1"])
def test_wide_products_in_bytes_are_finer_than_those_of_few_rows(isa: str, type: str) -> None:
    packed, meant = filled(BLOCK_FORMATS[type], type, random(64, 576))
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(1))
    x[:, ::71] *= 20  # single channels that are far larger, as in real activations
    exact = x.double() @ meant.double().T
    errors = []
    for arithmetic in ("wide bytes", "8 bits"):
        choose(packed, arithmetic)
        errors.append(float((linear(x, packed) - exact).abs().mean()))
    assert 0 < errors[0] < errors[1]


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_weights_are_quantized_as_ggml_does(isa: str, type: str) -> None:
    weight = random(40, 128)
    weight[3, 32:64] = 0.0
    packed = QuantizedWeight(40, 128, torch.float32, BLOCK_FORMATS[type])
    packed.fill_rows(0, weight)
    assert torch.equal(every_row(packed), blocks(weight, type)[1])


def test_each_affine_group_takes_the_nearer_form(isa: str) -> None:
    weight = random(40, 128) + torch.randn(40, 4).repeat_interleave(32, 1)
    packed = QuantizedWeight(40, 128, torch.float32, QuantizedFormat(4, "minimum"))
    packed.fill_rows(0, weight)
    forms = [blocks(weight, type)[1].view(40, 4, 32) for type in ("Q4_0", "Q4_1")]
    errors = [(form - weight.view(40, 4, 32)).square().sum(-1) for form in forms]
    nearer = torch.where((errors[1] < errors[0])[..., None], forms[1], forms[0])
    assert 0 < int((errors[1] < errors[0]).sum()) < 160, "both forms are seen"
    assert torch.equal(every_row(packed).view(40, 4, 32), nearer)


@pytest.mark.parametrize("arithmetic", ["8 bits", "16 bits", "wide bytes"])
def test_empty_inputs_and_padded_outputs_are_harmless(isa: str, arithmetic: str) -> None:
    packed = QuantizedWeight(5, 64, torch.float32, QuantizedFormat(4, "minimum"))
    packed.fill_rows(0, random(5, 64))
    choose(packed, arithmetic)
    x = torch.zeros(2, 64)
    x[1] = 1e-38  # its integers would need a scale that float32 has not
    assert (linear(x, packed).abs() <= (1e-30 if arithmetic == "wide bytes" else 0.0)).all()
    strided = torch.full((3, 80), float("nan"))
    strided[:, :64] = 1.0
    out = linear(strided[:, :64], packed)
    torch.testing.assert_close(out, every_row(packed).sum(1).expand(3, 5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("format", "arithmetic"), [c for c in COMPUTED if c[1] != "wide"], ids=str)
def test_what_is_no_number_stays_none_in_its_row_alone(
    isa: str, format: QuantizedFormat, poison: float, arithmetic: str
) -> None:
    packed = QuantizedWeight(33, 96, torch.float32, format)
    packed.fill_rows(0, random(33, 96))
    choose(packed, arithmetic)
    for place in range(0, 96, 7):
        x = random(3, 96, seed=1)
        x[1, place] = poison
        out = linear(x, packed)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("input_bits", LEVELS)
def test_products_are_recorded(isa: str, input_bits: Literal[8, 16]) -> None:
    packed = QuantizedWeight(40, 64, torch.float32, QuantizedFormat(4, "minimum"))
    packed.fill_rows(0, random(40, 64))
    packed.input_bits = input_bits
    token_ids = torch.tensor([3, 39, 0, 7, 7])
    program = record(
        lambda recording: [linear(embedding(recording.input(token_ids, count="tokens"), packed), packed)]
    )
    program.run({"tokens": 4})
    assert torch.equal(program.outputs[0][:4], linear(embedding(token_ids[:4], packed), packed))


def test_a_number_of_inputs_that_no_group_divides_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="40 inputs"):
        QuantizedWeight(8, 40, torch.float32, FORMATS[0])


def test_memory_is_what_the_bits_say(isa: str) -> None:
    sizes = [QuantizedWeight(64, 64, torch.float32, format).num_bytes for format in FORMATS]
    assert np.array(sizes).tolist() == [64 * 64 * bits // 64 for bits in (36, 40, 68, 72)]
