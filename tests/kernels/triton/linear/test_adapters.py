"""Products with low-rank adapters of their rows against float64, and what rows without one get."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.weights.adapter_tables import create_adapter_table
from triptych_kernels.weights.adapters import (
    AdaptedRows,
    AdapterRef,
    Factors,
    StackedLayout,
    StackedTable,
)
from triptych_kernels.weights.base import LinearWeight
from triptych_kernels.weights.formats import QuantizedFormat

ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10}
"""Error of a sum, relative to the sum of its terms' magnitudes; products are rounded to the factors' dtype."""
NUM_SLOTS = 4


def table_of(
    in_features: int, lengths: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device
) -> StackedTable:
    """Return a table with adapters in all slots but the last, the ranks of which differ."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    pieces = [AdaptedRows(start, length) for start, length in zip(starts, lengths, strict=True)]
    table = StackedTable(StackedLayout(tuple(pieces), in_features, NUM_SLOTS, rank, dtype, device))
    fill(table, rank, dtype)
    return table


def fill(table: StackedTable, rank: int, dtype: torch.dtype) -> None:
    in_features, lengths = table.in_features, [piece.length for piece in table.pieces]
    for slot in range(NUM_SLOTS - 1):
        own = max(rank - slot, 1)
        factors = {
            number: Factors(torch.randn(own, in_features) / 8, torch.randn(length, own))
            for number, length in enumerate(lengths)
            if (number + slot) % 2 == 0 or len(lengths) == 1
        }
        table.put(slot, table.pack(factors, dtype))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "in_features", "lengths", "rank"),
    [
        (37, 200, (70, 33), 5),
        (1, 8, (9, 1), 1),
        (3, 40, (33,), 8),
        (16, 129, (64, 64), 17),
        (18, 72, (20, 12), 64),
        (5, 33, (17,), 256),
    ],
)
def test_rows_get_what_their_adapter_adds(device, dtype, num_rows, in_features, lengths, rank):
    table = table_of(in_features, lengths, rank, dtype, device)
    weight = torch.randn(sum(lengths), in_features, device=device).to(dtype)
    x = torch.randn(num_rows, in_features + 3, device=device).to(dtype)[:, :in_features]
    slots = torch.randint(-1, NUM_SLOTS, (num_rows,), dtype=torch.int32, device=device)
    slots[0] = 0
    out = linear(x, weight, out_dtype=torch.float32, adapters=AdapterRef(table, slots), impl="triton")
    base = linear(x, weight, out_dtype=torch.float32, impl="triton")
    expected, size = base.double(), torch.zeros_like(base, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            a, b = table.a[slot].double(), table.b[slot].double()
            expected[row] += x[row].double() @ a.T @ b
            size[row] = x[row].double().abs() @ a.abs().T @ b.abs()
    # sums in float32 of up to 200 terms, products rounded to the dtype of factors, and the sum with the base
    error = (out.double() - expected).abs()
    assert (error <= ROUNDING[dtype] * (size + expected.abs()) + 1e-12).all()
    without = (slots < 0) | (slots == NUM_SLOTS - 1)
    assert torch.equal(out[without], base[without])


def test_a_row_has_the_same_bits_alone_and_with_others(device):
    table = table_of(100, (40, 30), 6, torch.float32, device)
    weight = torch.randn(70, 100, device=device)
    x = torch.randn(35, 100, device=device)
    slots = torch.randint(-1, NUM_SLOTS, (35,), dtype=torch.int32, device=device)
    plain = torch.zeros_like(weight)  # cuBLAS gives a row other bits among others
    together = linear(x, plain, adapters=AdapterRef(table, slots), impl="triton")
    for row in (0, 16, 34):
        part = slice(row, row + 1)
        alone = linear(x[part], plain, adapters=AdapterRef(table, slots[part]), impl="triton")
        assert torch.equal(alone[0], together[row])


def test_gates_and_ups_are_adapted_before_they_are_multiplied(device):
    table = table_of(64, (48, 48), 4, torch.float32, device)
    weight = torch.randn(96, 64, device=device) / 8
    x = torch.randn(5, 64, device=device)
    slots = torch.tensor([0, -1, 2, 1, 0], dtype=torch.int32, device=device)
    adapters = AdapterRef(table, slots)
    out = gated_linear(x, weight, activation="silu", adapters=adapters, impl="triton")
    expected = gated_linear(
        x.double(), weight.double(), activation="silu", adapters=adapters, impl="reference"
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_rows_without_an_adapter_get_the_bits_of_the_product_alone(device, activation):
    """Also where all rows of a tile have none, and where an adapter has left the slot."""
    table = table_of(64, (48,), 8, torch.float16, device)
    weight = torch.randn(48, 64, device=device).half() / 8
    x = torch.randn(40, 64, device=device).half()
    slots = torch.full((40,), -1, dtype=torch.int32, device=device)
    slots[33] = 2
    table.put(1, None)
    slots[35] = 1
    out = linear(x, weight, activation=activation, adapters=AdapterRef(table, slots), impl="triton")
    alone = linear(x, weight, activation=activation, impl="triton")
    is_same = (out == alone).all(dim=1).tolist()
    assert [row for row, same in enumerate(is_same) if not same] == [33]


def quantized(kind: str, num_outputs: int, device: torch.device, *, gated: bool) -> LinearWeight:
    """Return a filled weight of 64 inputs with biases."""
    options = {"device": device, "gated": gated, "bias": True}
    weight: LinearWeight
    if kind == "int8":
        weight = ChannelQuantizedWeight(num_outputs, 64, torch.float32, torch.int8, **options)
    else:
        format = QuantizedFormat(4, "minimum") if kind == "q4" else QuantizedFormat(8, "none")
        weight = GroupQuantizedWeight(num_outputs, 64, torch.float32, format, **options)
    halves = ("gate", "up") if gated else (None,)
    for half in halves:
        weight.fill_rows(0, torch.randn(num_outputs // len(halves), 64) / 8, half)
        weight.fill_bias(0, torch.randn(num_outputs // len(halves)), half)
    return weight


@pytest.mark.parametrize("kind", ["q4", "q8", "int8"])
def test_products_with_quantized_weights_are_adapted(device, kind):
    weight = quantized(kind, 72, device, gated=False)
    pieces = [AdaptedRows(0, 40), AdaptedRows(40, 32)]
    table = create_adapter_table(weight, pieces, num_slots=NUM_SLOTS, max_rank=8)
    assert isinstance(table, StackedTable)
    fill(table, 8, torch.float32)
    x = torch.randn(6, 64, device=device)
    slots = torch.tensor([0, -1, 2, 1, 0, NUM_SLOTS - 1], dtype=torch.int32, device=device)
    out = linear(x, weight, activation="relu", adapters=AdapterRef(table, slots))
    base = linear(x, weight).double()
    added = torch.stack(
        [row @ table.a[slot].double().T @ table.b[slot].double() * (slot >= 0)
         for row, slot in zip(x.double(), slots.tolist(), strict=True)]
    )  # fmt: skip
    assert added.abs().max() > 0.5
    torch.testing.assert_close(out.double(), (base + added).relu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["q4", "q8", "int8"])
def test_quantized_gates_and_ups_are_adapted_before_they_are_multiplied(device, kind):
    weight = quantized(kind, 96, device, gated=True)
    pieces = [AdaptedRows(0, 48, "gate"), AdaptedRows(0, 48, "up")]
    table = create_adapter_table(weight, pieces, num_slots=NUM_SLOTS, max_rank=4)
    assert isinstance(table, StackedTable)
    fill(table, 4, torch.float32)
    x = torch.randn(5, 64, device=device)
    slots = torch.tensor([0, -1, 2, 1, 0], dtype=torch.int32, device=device)
    out = gated_linear(x, weight, adapters=AdapterRef(table, slots))
    alone = gated_linear(x, weight)
    torch.testing.assert_close(out[1], alone[1], atol=1e-6, rtol=1e-6)
    whole = weight.multiply(x, torch.float32).double()
    added = torch.stack(
        [row @ table.a[slot].double().T @ table.b[slot].double() * (slot >= 0)
         for row, slot in zip(x.double(), slots.tolist(), strict=True)]
    )  # fmt: skip
    gate, up = (whole + added).chunk(2, dim=1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5)
    assert (out - alone)[0].abs().max() > 0.1
