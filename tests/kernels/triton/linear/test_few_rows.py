"""Products of few rows with plain weights against float64, and the choice between them and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.kernels.poison import poisoned_allocations
from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.ops.linear import ACTIVATIONS
from triptych_kernels.reference.linear import activate
from triptych_kernels.triton.linear import few_rows
from triptych_kernels.triton.linear.few_rows import FEW_ROWS, GATED_LINEAR, LINEAR, ByTorch, Tiles

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # of the interpreter: inf, as on GPUs

NARROW = Tiles(16, 32, num_splits=1, num_warps=2, num_stages=3)
SPLIT = Tiles(32, 32, num_splits=3, num_warps=4, num_stages=3)
ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@contextmanager
def multiplied_with(tiles: Tiles | ByTorch, weight: Tensor) -> Iterator[None]:
    """Multiply few rows with such a weight by these tiles inside the context."""
    key = (*weight.shape, weight.dtype)
    one, four, sixteen = ((*key, rows) for rows in FEW_ROWS)
    with (
        LINEAR.forced(weight.device, one, tiles),
        LINEAR.forced(weight.device, four, tiles),
        LINEAR.forced(weight.device, sixteen, tiles),
        GATED_LINEAR.forced(weight.device, one, tiles),
        GATED_LINEAR.forced(weight.device, four, tiles),
        GATED_LINEAR.forced(weight.device, sixteen, tiles),
        poisoned_allocations(),
    ):
        yield


def drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device=device).to(dtype)


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the sum of its terms' magnitudes, which bounds the error of a float32 sum."""
    product = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return (product, size) if bias is None else (product + bias.double(), size + bias.double().abs())


@pytest.mark.parametrize("tiles", [NARROW, SPLIT], ids=["whole", "splits"])
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    [(1, 1, 8), (1, 37, 100), (2, 64, 96), (5, 70, 33), (16, 130, 257), (4, 33, 31)],
)
def test_products_are_sums_in_float32(
    num_rows: int, out_features: int, in_features: int, tiles: Tiles, dtype: torch.dtype, device: torch.device
) -> None:
    options = {"dtype": dtype, "device": device}
    x, weight = drawn(num_rows, in_features, **options), drawn(out_features, in_features, **options)
    for bias in (None, drawn(out_features, **options)):
        exact, size = exact_product(x, weight, bias)
        with multiplied_with(tiles, weight):
            out = linear(x, weight, bias, out_dtype=torch.float32, impl="triton")
            rounded = linear(x, weight, bias, impl="triton")
        assert (out.dtype, out.shape) == (torch.float32, exact.shape)
        assert ((out - exact).abs() <= 2.0**-20 * size).all()
        assert torch.equal(rounded, out.to(dtype)), "rounded once, from the same sums"


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "in_features"), [(1, 1, 8), (1, 40, 100), (3, 33, 64), (16, 50, 70)]
)
def test_gates_and_ups_are_rounded_once(
    num_rows: int,
    num_outputs: int,
    in_features: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    options = {"dtype": dtype, "device": device}
    x, weight = drawn(num_rows, in_features, **options), drawn(2 * num_outputs, in_features, **options)
    for bias in (None, drawn(2 * num_outputs, **options)):
        (gate, up), (gate_size, up_size) = (part.chunk(2, dim=1) for part in exact_product(x, weight, bias))
        gates = torch.nn.functional.silu(gate) if activation == "silu" else gelu(gate)
        with multiplied_with(NARROW, weight):
            out = gated_linear(x, weight, bias, activation=activation, impl="triton")
        assert (out.dtype, out.shape) == (dtype, gate.shape)
        # both activations are steeper than 1.13 nowhere
        slack = 2.0**-20 * (1.13 * gate_size * up.abs() + gates.abs() * up_size + 1)
        assert ((out.double() - gates * up).abs() <= ROUNDING[dtype] * (gates * up).abs() + slack).all()


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("tiles", [NARROW, SPLIT], ids=["whole", "splits"])
def test_outputs_are_activated_before_they_are_rounded(
    tiles: Tiles, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = (drawn(*shape, dtype=dtype, device=device) for shape in ((3, 200), (48, 200), (48,)))
    with multiplied_with(tiles, weight):
        sums = linear(x, weight, bias, out_dtype=torch.float32, impl="triton")
        for activation in ACTIVATIONS:
            out = linear(x, weight, bias, activation=activation, impl="triton")
            expected = activate(sums.double(), activation)
            torch.testing.assert_close(out.double(), expected, rtol=2 * ROUNDING[dtype] + 1e-5, atol=1e-5)


@pytest.mark.parametrize("tiles", [NARROW, SPLIT], ids=["whole", "splits"])
def test_a_row_has_the_same_bits_whoever_is_beside_it(
    tiles: Tiles, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (drawn(n, 200, dtype=dtype, device=device) for n in (16, 48))
    with multiplied_with(tiles, weight):
        together = linear(x, weight, impl="triton")
        for first, last in ((0, 1), (7, 8), (3, 7), (1, 16)):
            assert torch.equal(linear(x[first:last], weight, impl="triton"), together[first:last])


def test_what_is_no_number_stays_in_its_row(device: torch.device) -> None:
    x, weight = torch.ones(3, 40, device=device), torch.ones(20, 40, device=device)
    x[1, 7] = torch.nan
    with multiplied_with(NARROW, weight):
        for out in (linear(x, weight, impl="triton"), gated_linear(x, weight, impl="triton")):
            assert out[1].isnan().all()
            assert out[[0, 2]].isfinite().all()


def test_rows_may_be_views_that_lie_apart(device: torch.device) -> None:
    packed, weight = (drawn(n, 90, dtype=torch.float32, device=device) for n in (6, 24))
    weight = weight[:, :40].contiguous()
    x = packed[::2, 30:70]
    with multiplied_with(NARROW, weight):
        assert torch.equal(linear(x, weight, impl="triton"), linear(x.clone(), weight, impl="triton"))


class Launched(Exception):
    """An exception in place of the kernel's launch."""


@pytest.mark.parametrize("multiply", [linear, gated_linear])
def test_torch_multiplies_unless_tiles_are_chosen(
    multiply: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Many rows, weights that are views, and no rows are torch's for any choice."""

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            raise Launched

    monkeypatch.setattr(few_rows, "_multiply_few_rows", Kernel())
    wide = drawn(32, 50, dtype=torch.float32, device=device)
    weight = wide[:, :40].contiguous()
    x = drawn(17, 40, dtype=torch.float32, device=device)
    expected = multiply(x, weight, impl="reference").float()

    def check(num_rows: int, weight: Tensor) -> None:
        out = multiply(x[:num_rows], weight, impl="triton")
        torch.testing.assert_close(out, expected[:num_rows], rtol=1e-4, atol=1e-4)

    check(1, weight)
    with multiplied_with(ByTorch(), weight):
        check(16, weight)
    with multiplied_with(NARROW, weight):
        check(17, weight)
        check(0, weight)
        check(16, wide[:, :40])
        for num_rows in (1, 2, 4, 5, 16):
            with pytest.raises(Launched):
                check(num_rows, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out_features", [4096, 6144, 28672, 128256])
def test_candidates_bring_enough_bytes_and_programs(out_features: int, dtype: torch.dtype) -> None:
    """Otherwise they would wait for memory, 40 KiB for each of an H200's 132 multiprocessors."""
    for tunable, is_gated in ((LINEAR, False), (GATED_LINEAR, True)):
        tried = []
        default, *candidates = tunable.candidates(out_features, 4096, dtype, 1)
        assert default == ByTorch()
        for tiles in candidates:
            outputs = tiles.block_n * (1 + is_gated)
            ahead = (tiles.num_stages - 1) * outputs * tiles.block_k * dtype.itemsize
            assert ahead >= 32 << 10
            tried.append(-(-out_features // outputs) * tiles.num_splits * ahead)
        assert max(tried) >= 132 * 40 << 10
    assert {tiles.num_splits for tiles in candidates} == {1}, "a gate is multiplied with its whole up"
