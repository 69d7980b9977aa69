"""gated_linear with plain and packed weights against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.operands import ModelCall, SmallOperands, meta
from tests.kernels.ops.implementations import Case, cases_of
from tests.kernels.ops.weights import random, tiles_of_each_width, weight_for
from triptych_kernels.ops import GATED_ACTIVATIONS, gated_linear, linear
from triptych_kernels.triton.linear.few_rows import (
    GATED_LINEAR,
    Tiles,
    multiply_few_rows,
)
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.weights.formats import QuantizedFormat

# of Triton's interpreter: inf, as on GPUs
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

case = cases_of("gated_linear")


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
@pytest.mark.parametrize(("inner", "size"), [(3, 4), (16, 34), (33, 24), (50, 64)])
def test_gated_products_are_those_of_the_reference(
    inner: int, size: int, activation: str, case: Case
) -> None:
    weight = random(2 * inner, size, dtype=case.dtype, device=case.device)
    bias = random(2 * inner, dtype=case.dtype, device=case.device)
    # a plain weight in half precision is rounded before the activation too
    rtol, atol = (1e-4, 1e-3) if case.dtype == torch.float32 else (2**-6, 0.2)
    for given in (None, bias):
        operands = weight_for(case.implementation, weight, given, gated=True)
        for num_rows in (1, 5, 14):
            x = random(num_rows, size, dtype=case.dtype, device=case.device)
            # far enough for the tails of the activation; squares would not fit float16
            x = x if activation == "relu2" else x * 4
            expected = gated_linear(x, weight, given, activation=activation, impl="reference")
            out = case(gated_linear, x, **operands, activation=activation)
            torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="gated_linear: activation 'tanh' is none of silu"):
        gated_linear(torch.ones(2, 6), torch.ones(4, 6), activation="tanh")


def test_a_weight_of_the_other_kind_is_refused(case: Case) -> None:
    if not case.implementation.isa:
        pytest.skip("plain weights are of either kind")
    x = torch.ones(2, 6, dtype=case.dtype)
    gated, plain = (
        weight_for(case.implementation, torch.ones(4, 6).to(case.dtype), gated=g) for g in (True, False)
    )
    with pytest.raises(ValueError, match=r"linear: the weight \[4, 6\] was created with gated=True"):
        linear(x, **gated, activation="relu")
    with pytest.raises(ValueError, match=r"gated_linear: the weight \[4, 6\] was created with gated=False"):
        gated_linear(x, **plain)


def test_the_activation_of_gpt_oss_is_that_of_transformers(case: Case) -> None:
    gate, up = torch.linspace(-12, 12, 25).repeat(25), torch.linspace(-12, 12, 25).repeat_interleave(25)
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=1)
    expected = GptOssExperts(config)._apply_gate(torch.stack((gate, up), dim=-1).flatten())
    eye = torch.eye(2).to(case.device, case.dtype)
    operands = weight_for(case.implementation, eye, gated=True)
    x = torch.stack((gate, up), dim=-1).to(case.device, case.dtype)
    out = case(gated_linear, x, **operands, activation="swiglu_oai")
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 2**-6, "atol": 1e-2}
    torch.testing.assert_close(out[:, 0].float().cpu(), expected, **tolerance)


def _few_rows(
    num_rows: int,
    out_features: int,
    in_features: int,
    tiles: Tiles,
    activation: str = "silu",
    dtype: torch.dtype = torch.bfloat16,
) -> object:
    """Multiply by one of the candidates for such a product."""
    assert tiles in GATED_LINEAR.candidates(out_features, in_features, dtype, 1)
    x, weight = (meta(rows, in_features, dtype=dtype) for rows in (num_rows, out_features))
    return multiply_few_rows(x, weight, meta(out_features, dtype=dtype), dtype, activation, tiles, gated=True)


def _quantized(
    num_rows: int, bits: int, *, affine: bool, activation: str = "silu", **options: bool
) -> object:
    format, device = QuantizedFormat(bits, "minimum" if affine else "none"), torch.device("meta")
    weight = GroupQuantizedWeight(28672, 4096, torch.bfloat16, format, device=device, gated=True, **options)
    return gated_linear(meta(num_rows, 4096), weight, activation=activation)


def _w8a8(num_rows: int, element: torch.dtype) -> object:
    device = torch.device("meta")
    weight = ChannelQuantizedWeight(6144, 4096, torch.bfloat16, element, device=device, gated=True)
    return gated_linear(meta(num_rows, 4096), weight)


_TANH = "gelu_pytorch_tanh"

MODEL_CALLS = {
    name: ModelCall(launch, is_memory_bound=True)
    for name, launch in {
        "silu": lambda: gated_linear(meta(256, 4096), meta(28672, 4096), impl="triton"),
        "gelu": lambda: gated_linear(meta(256, 2304), meta(18432, 2304), activation=_TANH, impl="triton"),
        "few rows, 8B": lambda: _few_rows(1, 28672, 4096, Tiles(16, 256, 1, 2, 5)),
        "few rows, 8B, 4 warps": lambda: _few_rows(16, 28672, 4096, Tiles(64, 128, 1, 4, 3)),
        "few rows, 0.6B, gelu": lambda: _few_rows(4, 6144, 1024, Tiles(32, 128, 1, 4, 5), _TANH),
        "few rows, float32": lambda: _few_rows(1, 6144, 1024, Tiles(32, 64, 1, 4, 5), dtype=torch.float32),
        "4 bits": lambda: _quantized(1, 4, affine=True),
        "4 bits, 2048 rows": lambda: _quantized(2048, 4, affine=True),
        "4 bits, 2048 rows by weights": lambda: _quantized(
            2048, 4, affine=True, activation=_TANH, batch_invariant=False
        ),
        "8 bits, 32 rows": lambda: _quantized(32, 8, affine=False),
        "float8, 64 rows": lambda: _w8a8(64, torch.float8_e4m3fn),
        "int8, 2048 rows": lambda: _w8a8(2048, torch.int8),
        "float8, 2048 rows": lambda: _w8a8(2048, torch.float8_e4m3fn),
    }.items()
}


def launch_small(draw: SmallOperands) -> None:
    x, weight = draw.normal(5, 40), draw.normal(2 * 33, 40)
    gated_linear(x, weight, impl="triton")
    for tiles in tiles_of_each_width(GATED_LINEAR, weight):
        multiply_few_rows(x, weight, draw.normal(2 * 33), draw.dtype, "silu", tiles, gated=True)
