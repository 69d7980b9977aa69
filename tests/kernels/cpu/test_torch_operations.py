"""Recorded operations of torch: the same numbers as torch, for any views and dtypes, at any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.kernels.cpu.recorded import MODES, TOKENS, Mode, assert_recorded
from triptych_kernels.cpu.expressions import EXPRESSIONS
from triptych_kernels.cpu.torch_ops import OPERATIONS

pytestmark = pytest.mark.usefixtures("each_isa")

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 0.1).reciprocal(),
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 0.1).log(),
    "expm1": torch.expm1,
    "log1p": lambda x: x.abs().log1p(),
    "tanh": lambda x: torch.tanh(3 * x),
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "cos": torch.cos,
    "sin": torch.sin,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "glu": lambda x: functional.glu(torch.cat((x, x + 1), -1), -1),
    "softplus": lambda x: functional.softplus(8 * x),
    "softplus, beta": lambda x: functional.softplus(x, beta=2.0, threshold=1.0),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "hardtanh": functional.relu6,
    "clamp": lambda x: x.clamp(-0.3, 0.6),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "add": lambda x: x + 1.5,
    "sub": lambda x: x - 0.3,
    "rsub": lambda x: 1 - x,
    "mul": lambda x: x * 0.1,
    "div": lambda x: x / 3,
    "div by": lambda x: 2.0 / (x.abs() + 1),
    **{f"pow {e}": lambda x, e=e: (x.abs() + 0.1) ** e for e in (1, 2, 3, 0.5, -0.5, -1, -2, 1.7)},
    "pow of a number": lambda x: 2.0**x,
    "minimum": lambda x: torch.minimum(x, torch.tensor(0.25, dtype=x.dtype)),
    "maximum": lambda x: torch.maximum(x, torch.tensor(0.25, dtype=x.dtype)),
    "eq": lambda x: (x > 0) == (x > 1),
    "ne": lambda x: x != 0.5,
    "lt": lambda x: x < 0.3,
    "le": lambda x: x <= 0.3,
    "gt": lambda x: x > 0.3,
    "ge": lambda x: x >= 0.3,
    "logical_not": lambda x: ~(x > 0),
    "logical_and": lambda x: torch.logical_and(x > 0, x < 1),
    "bitwise_or": lambda x: (x > 1) | (x < 0),
    "where": lambda x: torch.where(x > 0, x, -2.5),
    "masked_fill": lambda x: x.masked_fill(x < 0, float("-inf")),
    "fill": lambda x: torch.empty_like(x).copy_(x).fill_(2.0) + x,
    "zero": lambda x: (x + 1).zero_() + x,
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: x * torch.ones_like(x),
    "full_like": lambda x: torch.full_like(x, 0.3) + x,
    "new_zeros": lambda x: x + x.new_zeros(x.shape),
    "new_ones": lambda x: x * x.new_ones(x.shape[-1]),
    "new_full": lambda x: x * x.new_full(x.shape, 0.5),
    "zeros": lambda x: torch.cat((x, torch.zeros(x.shape, dtype=x.dtype, device=x.device)), -1),
    "full": lambda x: x + torch.full((1, x.shape[1], *x.shape[2:-1], 1), 0.5, dtype=x.dtype, device=x.device),
    "clone": lambda x: x.clone(),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "to float32": lambda x: x.float(),
    "to int64": lambda x: (10 * x).long(),
    "to bool": lambda x: (x > 0).to(x.dtype),
    "cat": lambda x: torch.cat((-x, x), -1),
    "stack": lambda x: torch.stack((x, -x), -1).flatten(-2),
    "constant_pad_nd": lambda x: functional.pad(x, (1, 2), value=0.5),
    "repeat": lambda x: x.repeat(1, 1, *[2] * (x.ndim - 3), 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, -1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "amin": lambda x: x.amin(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "norm": lambda x: x.norm(2, -1, keepdim=True),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "var": lambda x: x.var(-1, keepdim=True, correction=0),
    "std": lambda x: torch.cat((x, x + 1), -1).std(-1),
    "_softmax": lambda x: x.softmax(-1),
    "_log_softmax": lambda x: functional.log_softmax(x, -1),
}
"""Name of an operation -> functions of one tensor, of numbers around 0."""
DTYPES = (torch.float32, torch.bfloat16)
dtypes = st.sampled_from(DTYPES)
sizes = st.integers(1, 70)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("name", UNARY)
def test_operation_equals_torch(name: str, mode: Mode) -> None:
    for dtype in DTYPES:
        for shape in ((TOKENS, 5), (TOKENS, 3, 40)):
            with mode():
                assert_recorded(UNARY[name], some(*shape, dtype=dtype))


def test_every_operation_of_the_tables_is_tested() -> None:
    elsewhere = [
        "native_layer_norm",
        "addmm",
        "_fused_rms_norm",
        "embedding",
        "index",
        "index_select",
        "mm",
        "bmm",
        "_to_copy",
    ]
    tested = {name.partition(" ")[0].rstrip(",") for name in UNARY}
    twins = {"bitwise_not": "logical_not", "bitwise_and": "logical_and", "logical_or": "bitwise_or"}
    assert (EXPRESSIONS.keys() | OPERATIONS.keys()) - tested - set(elsewhere) <= twins.keys()


@settings(deadline=None, max_examples=30)
@given(data=st.data(), dtype=dtypes, heads=st.integers(1, 4), size=sizes)
def test_views_of_any_strides(data: st.DataObject, dtype: torch.dtype, heads: int, size: int) -> None:
    def view(x: Tensor) -> Tensor:  # [1, tokens, heads, size] -> [1, heads, tokens, some of them]
        return x.transpose(1, 2)[..., start:end:step]

    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    step = data.draw(st.integers(1, 3))
    x, y = some(TOKENS, heads, size, dtype=dtype), some(TOKENS, heads, size, dtype=dtype)
    weight = some(heads, 1, size)
    assert_recorded(lambda x, y: view(x) * weight[..., start:end:step] + view(y), x, y, token_axis=2)
    assert_recorded(lambda x: view(x)[..., :1] - view(x), x, token_axis=2)
    assert_recorded(lambda x: view(x).softmax(-1).mean(1, keepdim=True), x, token_axis=2)
    assert_recorded(lambda x: view(x).transpose(1, 2).reshape(*x.shape[:2], -1), x)
    assert_recorded(lambda x: torch.cat((view(x), view(x[:, :, :1])), 1).transpose(1, 2), x)


@settings(deadline=None, max_examples=30)
@given(
    left=st.sampled_from([*DTYPES, torch.int64, torch.bool]),
    right=st.sampled_from([*DTYPES, torch.int64]),
    shape=st.sampled_from([(3, 5), (1, 5), (3, 1), (1, 1)]),
    operation=st.sampled_from([torch.add, torch.mul, torch.sub, torch.maximum, torch.lt, torch.eq]),
)
def test_dtypes_are_promoted_and_broadcast(
    left: torch.dtype,
    right: torch.dtype,
    shape: tuple[int, int],
    operation: Callable[[Tensor, Tensor], Tensor],
) -> None:
    if operation is torch.sub and left == torch.bool:
        left = torch.int64
    x, y = (20 * some(TOKENS, 3, 5)).to(left), (20 * some(TOKENS, *shape)).to(right)
    assert_recorded(operation, x, y)
    assert_recorded(lambda x: operation(x, y[0]), x)


def test_integers_are_exact() -> None:
    ids = torch.tensor([2**40 + 3, 5, 2**40 + 4, 7, 1, 2, 3])
    large = torch.tensor(2**40 + 3)
    assert_recorded(lambda ids: (ids + 2) * 3 - ids, ids)
    assert_recorded(lambda ids: ids == large, ids)
    assert_recorded(lambda ids: torch.where(ids > 4, ids, 0), ids)


@pytest.mark.parametrize("mode", MODES)
def test_large_and_special_numbers(mode: Mode) -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 88.0, -88.0, 104.0, -104.0, 1e-30]
    x = torch.tensor(special).repeat(TOKENS, 3)
    names = [
        "exp",
        "tanh",
        "sigmoid",
        "silu",
        "relu",
        "softplus",
        "clamp",
        "maximum",
        "minimum",
        "amax",
        "amin",
    ]
    names += ["where", "abs", "le", "masked_fill"]
    with mode():
        for name in names:
            assert_recorded(UNARY[name], x.clone())


@pytest.mark.parametrize("mode", MODES)
def test_assigning_to_parts(mode: Mode) -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[..., :2] = x[..., 2:4]
        out[..., 2:] = x[..., 2:] * 2
        out[..., 3] += 1
        out.mul_(x).add_(x, alpha=0.5).clamp_(min=-1)
        out[..., 4:].sub_(1).neg_()
        out[..., 0] = 0.25
        return out

    for dtype in DTYPES:
        with mode():
            assert_recorded(function, some(TOKENS, 9, dtype=dtype))


@pytest.mark.parametrize("mode", MODES)
def test_norms(mode: Mode) -> None:
    for dtype in DTYPES:
        x, weight, bias = some(TOKENS, 3, 37, dtype=dtype), some(37, dtype=dtype), some(37, dtype=dtype)
        with mode():
            assert_recorded(lambda x, w=weight, b=bias: functional.layer_norm(x, (37,), w, b, 1e-3), x)
            assert_recorded(lambda x: functional.layer_norm(x, (37,)), x)
            assert_recorded(lambda x, w=weight: functional.rms_norm(x, (37,), w, 1e-3), x)
            assert_recorded(lambda x: functional.rms_norm(x, (37,)), x)


@pytest.mark.parametrize("mode", MODES)
def test_looking_up_rows_of_a_table(mode: Mode) -> None:
    ids = torch.tensor([4, 0, 2, 9, 9, 1, 3])
    for dtype in DTYPES:
        table, deep = some(10, 6, dtype=dtype), some(10, 2, 3, dtype=dtype)
        with mode():
            assert_recorded(lambda ids, t=table: functional.embedding(ids, t), ids)
            assert_recorded(lambda ids, t=table: functional.embedding(ids + 1 - 1, t), ids)
            assert_recorded(lambda ids, t=table: t[ids], ids)
            assert_recorded(lambda ids, t=table: t.index_select(0, ids[0]), ids, token_axis=0)
            assert_recorded(lambda ids, t=deep: t[ids], ids)


@pytest.mark.parametrize("mode", MODES)
def test_outer_products_with_constants(mode: Mode) -> None:
    positions, frequencies = torch.arange(TOKENS) * 5, some(6).abs()

    def rotary(positions: Tensor) -> Tensor:
        expanded = frequencies[None, :, None].float().expand(positions.shape[0], -1, 1).to(positions.device)
        return (expanded @ positions[:, None, :].float()).transpose(1, 2)

    with mode():
        assert_recorded(rotary, positions)
        assert_recorded(lambda p: torch.outer(p[0].float(), frequencies), positions, token_axis=0)
        assert_recorded(lambda p: torch.einsum("bt,d->btd", p.float(), frequencies), positions)


@pytest.mark.parametrize("mode", MODES)
def test_products_with_constants(mode: Mode) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        weight, bias = some(5, 24, dtype=dtype), some(5, dtype=dtype)
        close = {"rtol": tolerance, "atol": 10 * tolerance}
        with mode():
            for own in (None, bias):
                assert_recorded(
                    lambda x, b=own, w=weight: functional.linear(x, w, b),
                    some(TOKENS, 24, dtype=dtype),
                    **close,
                )
            assert_recorded(
                lambda x, w=weight: x.transpose(2, 3)[:, :, 0] @ w.t(),
                some(TOKENS, 24, 2, dtype=dtype),
                **close,
            )
